"""Hot lines of the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fake_runs import HEALTHY, FakeRun, add_series, make_run
from kineto import write_trace
from lightning_memprof.account.ledger.model import TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Facts, Finding, Severity, examine
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.read.run.load import load_run

MS = 1_000_000


STEP, MODULE = "Net.training_step", "()"


FORWARD = HEALTHY["forward"] / sum(HEALTHY.values())


HELPER = {"functions": [STEP, "Net.penalty"], "place": "net.py:9", "source": "return penalty(self.weight)"}


OTHER = {"functions": [STEP, MODULE], "place": "net.py:20", "source": "loss = self.net(x).sum()"}


BACKWARD = {"functions": [STEP], "place": "net.py:30", "source": "self.manual_backward(loss)"}


def line(like: dict[str, Any], ms: float, looks: int = 40, **changes: Any) -> dict[str, Any]:
    return {**like, "looks": looks, "ns": ms * MS, **changes}


def facts_of(tmp_path: Path, *lines: dict[str, Any], **changes: Any) -> Facts:
    directory = make_run(tmp_path, FakeRun(trace=False, memory=None, **changes))
    add_series(directory, "lines", lines)
    return Facts.of(load_run(directory))


def findings_of(tmp_path: Path, *lines: dict[str, Any], **changes: Any) -> dict[str, Finding]:
    return {finding.rule: finding for finding in examine(facts_of(tmp_path, *lines, **changes))}


def ids(remedies: tuple[Remedy, ...]) -> list[str]:
    return [each.id for each in remedies]


@pytest.mark.parametrize(("copies", "looks", "is_found"), [(60, 40, True), (60, 5, False), (10, 40, False)])
def test_a_line_that_calls_what_has_a_remedy_is_named_with_its_place_its_source_and_the_call(
    tmp_path: Path, copies: int, looks: int, is_found: bool
) -> None:
    copied = {"functions": [STEP], "place": "net.py:7", "source": "kept = copy(self.net)", "called": "deepcopy"}
    found = findings_of(tmp_path, line(copied, copies, looks), line(OTHER, 100 - copies)).get("hot_line")
    assert (found is not None) == (is_found and POLICY.verdict <= 0.6 * FORWARD)
    if found is not None:
        assert (found.owner, found.numbers["place"]) == (STEP, "net.py:7")
        assert "`kept = copy(self.net)`; it calls deepcopy" in found.why
        assert ids(found.remedies) == ["copy_less", "work_less"]
        assert found.recovers is not None
        assert found.recovers.max == pytest.approx(0.95 * 0.6 * HEALTHY["forward"], rel=0.05)


@pytest.mark.parametrize(("asleep", "waits"), [(50, True), (10, False)])
def test_a_line_in_which_the_thread_sleeps_waits_and_is_not_what_computes(
    tmp_path: Path, asleep: int, waits: bool
) -> None:
    sleeping = {"functions": [STEP], "place": "net.py:7", "source": "time.sleep(0.02)"}
    heavy = {**HEALTHY, "forward": 20 * MS}
    rows = line(sleeping, 60, asleep_ns=asleep * MS), line(OTHER, 40)
    findings = findings_of(tmp_path, *rows, phases=lambda *_: heavy)
    assert ("hot_line" in findings) == waits
    if waits:
        found = findings["hot_line"]
        assert next(iter(findings)) == "hot_line"
        assert found.severity > Severity.INFO
        assert found.title.startswith("Net.training_step (net.py:7) waits ")
        assert "sleeps 83%" in found.why
        assert ids(found.remedies)[0] == "wait_outside"


@pytest.mark.parametrize("share", [0.9, 0.2])
def test_a_line_in_whose_operators_the_thread_sleeps_is_no_wait(tmp_path: Path, share: float) -> None:
    sleeping = {"functions": [STEP], "place": "net.py:7", "source": "distances = (points - others).abs()"}
    facts = facts_of(tmp_path, line(sleeping, 90, asleep_ns=80 * MS), line(OTHER, 10))
    ledger = facts.ledgers[0]
    spent = ledger.ns(Part.FORWARD)
    computes = TimeLine(part=Part.FORWARD, module="", operator="aten::abs", ns=share * spent)
    python = TimeLine(part=Part.FORWARD, module="", ns=(1 - share) * spent)
    others = tuple(each for each in ledger.lines if each.part != Part.FORWARD)
    vars(facts)["ledgers"] = {0: replace(ledger, lines=(computes, python, *others))}
    found = {finding.rule: finding for finding in examine(facts)}
    waits = found["hot_line"].numbers["ns"] if "hot_line" in found else 0
    assert waits <= (1 - share) * spent * 1.01


def test_lines_of_one_function_that_do_the_same_are_one_cost(tmp_path: Path) -> None:
    parts = [line({**HELPER, "place": f"net.py:{at}", "called": "deepcopy"}, 30) for at in range(2)]
    found = findings_of(tmp_path, *parts, line(OTHER, 40))["hot_line"]
    assert found.numbers["ns"] == pytest.approx(0.6 * HEALTHY["forward"], rel=0.05)


def test_a_line_that_calls_a_module_is_not_blamed_for_it(tmp_path: Path) -> None:
    assert "hot_line" not in findings_of(tmp_path, line({**OTHER, "called": "deepcopy"}, 90), line(HELPER, 10))


@pytest.mark.parametrize(("ms", "is_found"), [(99, True), (30, False)])
@pytest.mark.parametrize("is_helper", [True, False])
def test_a_helper_with_a_third_of_the_step_is_named_whatever_it_does(
    tmp_path: Path, ms: int, is_found: bool, is_helper: bool
) -> None:
    functions = [STEP, "Net.table"] if is_helper else [STEP, MODULE, "Block.forward"]
    table = {"functions": functions, "place": "net.py:4", "source": "return torch.sin(places)"}
    forward = {**HEALTHY, "forward": 7 * MS}
    found = findings_of(tmp_path, line(table, ms), line(OTHER, 100 - ms), phases=lambda *_: forward).get("hot_line")
    assert (found is not None) == (is_found and is_helper)
    if found is not None:
        assert ids(found.remedies) == ["work_less"]


@pytest.mark.parametrize(
    ("operator", "share", "remedy"),
    [("aten::_linalg_svd", 0.5, "decompose_less"), ("aten::sort", 0.5, "sort_less"), ("aten::_linalg_svd", 0.1, None)],
)
def test_a_helper_whose_time_a_family_of_operators_explains_has_its_remedy(
    tmp_path: Path, operator: str, share: float, remedy: str | None
) -> None:
    facts = facts_of(tmp_path, line(HELPER, 50), line(OTHER, 50))
    ledger = facts.ledgers[0]
    whole, spent = ledger.ns(Part.FORWARD), share * ledger.ns(Part.FORWARD)
    lines = (
        TimeLine(part=Part.FORWARD, module="", operator=operator, ns=spent),
        TimeLine(part=Part.FORWARD, module="", operator="aten::mm", ns=whole - spent),
    )
    others = tuple(each for each in ledger.lines if each.part != Part.FORWARD)
    vars(facts)["ledgers"] = {0: replace(ledger, lines=(*others, *lines))}
    found = {finding.rule: finding for finding in examine(facts)}.get("hot_line")
    assert (ids(found.remedies)[0] if found else None) == remedy


def test_a_run_without_looks_has_no_such_finding(tmp_path: Path) -> None:
    assert "hot_line" not in findings_of(tmp_path)


def test_the_page_of_a_healthy_run_has_the_function_with_much_of_the_forward(tmp_path: Path) -> None:
    events = [
        ("ProfilerStep#2", 0, 4000),
        ("[pl][profile][Strategy]SingleDeviceStrategy.training_step", 0, 2000),
        ("aten::mul", 10, 1990),
        ("[pl][profile][Strategy]SingleDeviceStrategy.backward", 2000, 4000),
        ("aten::mul", 2000, 3990),
    ]
    rows = [
        {"ph": "X", "cat": "user_annotation" if "#" in name else "cpu_op", "name": name, "pid": 9, "tid": 9}
        | {"ts": start, "dur": end - start, "args": {}}
        for name, start, end in events
    ]
    directory = make_run(tmp_path / "log", FakeRun())
    table = {"functions": [STEP, "Net.table"], "place": "net.py:4", "source": "return torch.sin(self.places())"}
    add_series(directory, "lines", [line(table, 30), line(OTHER, 70)])
    trace = trace_report(write_trace(tmp_path / "made.json", rows))
    first, *_ = examine(Facts.of(load_run(directory), (trace,)))
    assert "Net.table (net.py:4) has 30% of the forward" in first.why
    assert "Net.table" in first.next


def test_a_backward_in_training_step_is_not_in_the_forward(tmp_path: Path) -> None:
    copied = line(HELPER, 20, called="deepcopy")
    found = findings_of(tmp_path, line(BACKWARD, 80, called="LightningModule.manual_backward"), copied)
    assert found["hot_line"].numbers["ns"] == pytest.approx(HEALTHY["forward"], rel=0.05)
    helper = {**BACKWARD, "functions": [STEP, "Net.learn"], "called": "Tensor.backward"}
    assert "hot_line" not in findings_of(tmp_path / "helper", line(helper, 80), line(OTHER, 20))
