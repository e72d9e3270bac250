from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fake_runs import make_run
from lightning_memprof import judge

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

from promises import Comparison, Promise, are_kept, promised  # noqa: E402 - its folder comes first
from promises import page as promises_page  # noqa: E402 - its folder comes first
from results import Result, page, totals  # noqa: E402 - its folder comes first
from scoring import (  # noqa: E402 - its folder comes first
    ANY_RULE,
    ON_GPU,
    SETS,
    Claim,
    Expected,
    Found,
    Known,
    Page,
    Score,
    accusations,
    expected_of,
    page_of,
    score,
    share,
)
from trainings import RAN, Case, run_case  # noqa: E402 - its folder comes first

PADDING = Expected(
    name="padding",
    script="data.py",
    cause=(r"padd(ed|ing)",),
    near=(r"input",),
    fix=(r"bucket",),
    near_fix=(r"collate",),
)


KNOWN = Known.parsed({
    "training": "slow_dataset",
    "cause": "input_bound:Tiles|collate_fn hot_line",
    "near": "*:decode",
    "fix": "cheaper_samples",
    "near_fix": "workers",
    "accuse": "input_bound:Tiles>20",
    "is_note": "",
})  # fmt: skip


def found(sentence="", next_step="", rule="input_bound", **values):
    return Found(rule=rule, sentence=sentence, next_step=next_step, **values)


@pytest.mark.parametrize(
    ("sentence", "next_step", "expected"),
    [
        ("Padding is 61% of each batch.", "Bucket samples by length.", Score(2, 2)),
        ("Input-bound: 40% of each step.", "Use another collate_fn.", Score(1, 1)),
        ("Compute-bound: 71% of each step.", "Open the timeline.", Score(0, 0)),
        ("Padding is 61% of each batch.", "", Score(2, 0)),
    ],
)
def test_a_page_gets_full_points_for_the_cause_and_half_for_its_surroundings(sentence, next_step, expected):
    assert score(PADDING, Page((found(sentence, next_step),))) == expected


@pytest.mark.parametrize(
    ("verdict", "cause"),
    [
        (found("Waits for Tiles.__getitem__."), 2),
        (found("Waits for data.", why="collate_fn takes 40 ms."), 2),
        (found("Waits for data."), 1),
        (found("Waits for MyTiles."), 1),
        (found("A loop.", rule="hot_line"), 2),
        (found("The callback decode takes 20%.", rule="callback_bound"), 1),
        (found("Waits for Tiles.", rule="callback_bound"), 0),
    ],
)
def test_a_known_fault_is_named_by_a_rule_and_its_owner_and_half_by_the_rule_alone(verdict, cause):
    assert score(KNOWN, Page((verdict,))).cause == cause


@pytest.mark.parametrize(
    ("remedies", "fix"),
    [(("cheaper_samples", "workers"), 2), (("workers", "cheaper_samples"), 1), (("compile",), 0), ((), 0)],
)
def test_a_known_remedy_must_be_the_first_one(remedies, fix):
    assert score(KNOWN, Page((found("Waits.", remedies=remedies),))).fix == fix


def test_a_next_step_is_not_scored_before_its_id_is_in_the_table():
    assert score(replace(KNOWN, fix=()), Page((found("Waits.", remedies=("compile",)),))).fix == -1
    assert share([2, -1]) == 1


def test_a_twin_is_accused_by_any_finding_that_names_the_fault_and_by_no_other():
    page = Page((found("Compute-bound: 71%."), found("18% of each batch is padding.")))
    assert accusations(PADDING, page) == ["18% of each batch is padding."]


@pytest.mark.parametrize(("share", "accused"), [(0.3, ["Waits for Tiles."]), (0.1, [])])
def test_a_twin_of_a_known_fault_is_accused_by_a_claim_above_its_share(share, accused):
    page = Page((found("Waits for Tiles.", share=share), found("Waits for data.", share=0.9)))
    assert accusations(KNOWN, page) == accused
    assert accusations(replace(KNOWN, accuse=()), page) == ["Waits for Tiles."]


def test_a_page_is_read_from_the_json_of_show_without_findings_that_report_no_problem():
    recovers = {"min": 1, "max": 2, "whole": 10}
    remedies = [{"id": "act", "text": "do"}]
    row = {"rule": "a", "title": "b", "why": "c", "remedies": remedies, "recovers": recovers, "severity": "info"}
    quiet = {**row, "rule": "none", "recovers": None, "severity": "none", "remedies": [{"id": "wait", "text": "do"}]}
    page = page_of({"findings": [quiet, row]})
    problem = Found(rule="a", sentence="b", why="c", next_step="do", remedies=("act",), share=0.2)
    assert page.verdict == replace(problem, rule="none", remedies=("wait",), severity="none", share=0)
    assert page.problems == (problem,)


def test_findings_of_rules_that_are_left_out_are_not_scored_but_where_they_are_the_fault():
    page = Page((found("Waits for a core.", rule="core_wait"), found("Waits for Tiles.")))
    assert score(KNOWN, page).cause == 0
    assert score(KNOWN, page.without(["core_wait"], KNOWN)).cause == 2
    alone = Page(page.findings[:1])
    assert alone.without(["core_wait"], KNOWN) == alone
    shared = replace(KNOWN, cause=(Claim("core_wait"),))
    assert score(shared, page.without(["core_wait"], shared)).cause == 2


@pytest.mark.parametrize("folder", [*SETS, ON_GPU])
def test_each_training_is_in_its_script(folder):
    table = expected_of(folder)
    assert len({expected.name for expected in table}) == len(table)
    for expected in table:
        source = (HERE / folder / expected.script).read_text(encoding="utf-8")
        assert re.search(rf"^    main\([^)]*\b{expected.name}\b", source, re.MULTILINE)
        assert expected.cause


@pytest.mark.parametrize("expected", [row for folder in (SETS[1], ON_GPU) for row in expected_of(folder)])
def test_each_unseen_training_has_patterns_that_compile(expected):
    assert expected.fix
    for pattern in expected.cause + expected.near + expected.fix + expected.near_fix + expected.accuse:
        re.compile(pattern)


def test_the_rules_in_the_table_of_known_faults_exist():
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(judge.__file__).parent.rglob("*.py"))
    claims = [claim for row in expected_of(SETS[0]) for claim in (*row.cause, *row.near, *row.accuse)]
    rules = {claim.rule for claim in claims} - {ANY_RULE, "-"}
    assert [rule for rule in rules if f'"{rule}"' not in sources] == []


def test_a_promise_is_that_of_the_finding_that_names_the_fault() -> None:
    step = {"why": "", "remedies": [{"id": "pad_to_longest", "text": ""}], "severity": "info"}
    other = {**step, "rule": "b", "title": "Slow.", "recovers": {"unit": "ns", "min": 1e6, "max": 2e6, "whole": 9e6}}
    named = {
        **step,
        "rule": "a",
        "title": "Padding.",
        "recovers": {"unit": "bytes", "min": 2**20, "max": 2**21, "whole": 2**22},
    }
    unknown = {**step, "rule": "c", "title": "Padding.", "recovers": None}
    assert promised({"findings": [other, unknown, named]}, PADDING) == Promise(
        "a", "pad_to_longest", "bytes", 2**20, 2**21
    )
    assert promised({"findings": [other, unknown]}, PADDING) is None
    assert promised({"findings": [{**named, "rule": "core_wait"}]}, PADDING) is None


@pytest.mark.parametrize(("after", "is_kept"), [(3.0, True), (2.5, False), (8.5, True), (9.5, False)])
def test_a_promise_is_kept_if_the_gain_is_within_30_percent_of_its_range(after: float, is_kept: bool) -> None:
    compared = Comparison("padding", Promise("a", "remedy", "ns", 2.0, 5.5), before=10.0, after=after)
    assert compared.is_kept is is_kept


@pytest.mark.parametrize(("kept", "broken", "are_all"), [(3, 1, True), (2, 2, False), (1, 2, True)])
def test_three_of_four_promises_of_a_remedy_are_to_be_kept(kept: int, broken: int, are_all: bool) -> None:
    promise = Promise("a", "remedy", "ns", 2.0, 5.0)
    rows = [Comparison("x", promise, 10.0, after) for after in [7.0] * kept + [9.9] * broken]
    assert are_kept(rows) is are_all
    assert f"| `a` | `remedy` | {kept + broken} | {kept} | 20% to 50% of the step |" in promises_page(rows, 9)


def test_a_note_is_scored_by_the_finding_that_names_it():
    compute, padding = found("Compute-bound: 71%.", "Compile."), found("Padding.", "Bucket samples by length.")
    page = Page((compute, padding))
    assert score(replace(PADDING, is_note=True), page) == Score(2, 2)
    assert score(PADDING, page) == Score(0, 0)
    assert score(replace(PADDING, is_note=True), Page((compute,))) == Score(0, 0)


def test_the_page_of_scores_has_a_row_per_load_and_one_per_training():
    fault = Result(name="padding", domain="data", healthy=False, repeat=0, sentence="Padding.", cause=2, fix=1)
    twin = Result(name="padding", domain="data", healthy=True, repeat=0, sentence="Compute-bound.")
    beside = replace(fault, loaded=True, load=3.0, cause=0, fix=0, sentence="Slow.")
    failed = replace(twin, loaded=True, load=1.0, error="ValueError")
    unseen = replace(fault, name="secret", set="holdout", load=2.0)
    text = page([fault, twin, beside, failed, unseen])
    assert "| holdout | whatever else runs | 2.0 (max 2.0) | 1 | 100% | 50% | 0 | 0 | 0 |" in text
    assert "secret" not in text
    assert "| faults | whatever else runs | unknown | 1 | 100% | 50% | 1 | 0 | 0 |" in text
    assert "| faults | another busy process | 2.0 (max 3.0) | 1 | 0% | 0% | 0 | 0 | 1 |" in text
    assert "| data | padding | 2 | 50% | 25% | 0 | Padding. |" in text


@pytest.mark.parametrize(
    ("results", "are_met"),
    [
        ([Result(name="twin", domain="data", healthy=True, repeat=0)], True),
        ([Result(name="twin", domain="data", healthy=True, repeat=0, accused=["padding"])], False),
        ([Result(name="twin", domain="data", healthy=True, repeat=0, error="OSError: no space")], False),
        ([Result(name="fault", domain="data", healthy=False, repeat=0, cause=2, fix=2)], True),
        ([Result(name="fault", domain="data", healthy=False, repeat=0, cause=1, fix=2)], False),
    ],
)
def test_healthy_twins_alone_are_judged_without_points(results: list[Result], are_met: bool) -> None:
    assert totals(results).are_met is are_met


def test_a_recording_that_was_kept_is_read_again_without_a_training(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "padding-healthy-0" / "logs")
    (tmp_path / "padding-healthy-0" / RAN).write_text('{"seconds": 9.5, "load": 1.5, "loaded": true}')
    result = run_case(Case(replace(PADDING, script="no such script"), "faults", healthy=True, repeat=0), tmp_path)
    assert (result.error, result.seconds, result.load, result.loaded) == ("", 9.5, 1.5, True)
    assert result.sentence
    assert directory.is_dir()
    other = run_case(Case(replace(PADDING, script="no such script"), "faults", healthy=False, repeat=0), tmp_path)
    assert "no such script" in other.error
