"""Steps that take longer and longer."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from fake_runs import HEALTHY, FakeRun, make_run
from findings import HISTORY, ids, recovery, write_rows
from lightning_memprof.account.ledger.model import TimeLine
from lightning_memprof.account.parts import PHASE_PARTS, Part
from lightning_memprof.judge import Facts, Finding, Severity, examine
from lightning_memprof.read.run.load import load_run

MS = 1_000_000
Phases = Mapping[str, int]


def slower(root: Path, phases: Callable[[int, int], Phases], **changes: object) -> dict[str, Finding]:
    facts = Facts.of(load_run(make_run(root, FakeRun(phases=phases, trace=False, memory=None, **changes))))  # type: ignore[arg-type]
    return {finding.rule: finding for finding in examine(facts)}


@pytest.mark.parametrize("phase", PHASE_PARTS)
def test_a_phase_to_which_each_step_adds_is_named_with_its_slope(tmp_path: Path, phase: str) -> None:
    finding = slower(tmp_path, lambda _, step: {**HEALTHY, phase: HEALTHY[phase] + step * MS}, steps=60)["slower_steps"]
    assert PHASE_PARTS[phase].label in finding.title
    assert finding.numbers["per_step_ns"] == MS
    assert finding.severity is Severity.CRITICAL
    # Half of what 53 steps after the warmup add.
    assert recovery(finding).max == pytest.approx(finding.numbers["steps"] * MS / 2, rel=0.01)


def test_of_several_phases_that_grow_the_one_that_adds_most_is_named(tmp_path: Path) -> None:
    def phases(_: int, step: int) -> Phases:
        grown = {
            "forward": 20 * MS + step * MS,
            "backward": 20 * MS + step * MS,
            "optimizer": 20 * MS + step * MS * 3 // 2,
        }
        return {**HEALTHY, **grown}

    finding = slower(tmp_path, phases, steps=60)["slower_steps"]
    assert finding.numbers["phase"] == "optimizer"
    assert finding.numbers["phase_added_ns"] < finding.numbers["added_ns"] / 2
    assert recovery(finding).max <= finding.numbers["added_ns"] / 2


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param(lambda _, step: HEALTHY, id="steady"),
        pytest.param(lambda _, step: {**HEALTHY, "forward": (6 + 6 * (step >= 30)) * MS}, id="a jump"),
        pytest.param(lambda _, step: {**HEALTHY, "forward": 6 * MS + step * MS // 40}, id="too little"),
        pytest.param(lambda _, step: {**HEALTHY, "forward": (6 + step % 20) * MS}, id="lengths sorted in each epoch"),
        pytest.param(
            lambda _, step: {**HEALTHY, "forward": round(random.Random(step).uniform(5, 25) * MS)},
            id="batches of different lengths",
        ),
        pytest.param(lambda _, step: {**HEALTHY, "forward": 6 * MS + min(step, 20) * MS}, id="a cache that is full"),
    ],
)
def test_steps_that_vary_do_not_get_slower(tmp_path: Path, phases: Callable[[int, int], Phases]) -> None:
    assert "slower_steps" not in slower(tmp_path, phases, steps=60)


def test_steps_that_wait_longer_and_longer_for_a_core_do_not_get_slower(tmp_path: Path) -> None:
    def phases(_: int, step: int) -> Phases:
        return {**HEALTHY, "forward": 6 * MS + step * MS}

    assert "slower_steps" not in slower(tmp_path, phases, steps=60, core_wait_ns=lambda step: step * MS)
    assert "slower_steps" in slower(tmp_path / "own", phases, steps=60, core_wait_ns=lambda step: 0)


def test_the_rank_that_gets_slower_is_named(tmp_path: Path) -> None:
    def phases(rank: int, step: int) -> Phases:
        return {**HEALTHY, "forward": 6 * MS + rank * step * MS}

    finding = slower(tmp_path, phases, steps=60, world_size=2)["slower_steps"]
    assert finding.numbers["rank"] == 1
    assert "on rank 1" in finding.title


@pytest.mark.parametrize(
    ("phase", "line", "words", "step"),
    [
        pytest.param(
            "forward",
            TimeLine(part=Part.FORWARD_HOOK, name="watch (net.py:7)", ns=1.0),
            "forward: hook watch (net.py:7).",
            "Remove the hook watch (net.py:7) after use",
            id="a forward hook",
        ),
        pytest.param(
            "backward",
            TimeLine(part=Part.BACKWARD_HOOK, name="clamp (net.py:9)", ns=1.0),
            "backward: hook clamp (net.py:9).",
            "Remove the hook clamp (net.py:9) after use",
            id="a backward hook",
        ),
        pytest.param(
            "callbacks",
            TimeLine(part=Part.CALLBACK, name="EMA.on_train_batch_end", ns=1e9),
            "callbacks: EMA.on_train_batch_end.",
            "Find what EMA.on_train_batch_end adds to",
            id="a callback",
        ),
    ],
)
def test_what_the_ledger_has_in_the_phase_is_named(
    tmp_path: Path, phase: str, line: TimeLine, words: str, step: str
) -> None:
    def phases(_: int, number: int) -> Phases:
        return {**HEALTHY, phase: HEALTHY[phase] + number * MS}

    facts = Facts.of(load_run(make_run(tmp_path, FakeRun(steps=60, phases=phases, trace=False, memory=None))))
    vars(facts)["ledgers"] = {0: replace(facts.ledgers[0], lines=(*facts.ledgers[0].lines, line))}
    finding = next((finding for finding in examine(facts) if finding.rule == "slower_steps"), None)
    assert finding is not None
    assert finding.title.endswith(words)
    assert finding.next_steps[0].startswith(step)


@pytest.mark.parametrize(
    ("forward", "kind", "kept"),
    [
        pytest.param(0, "attribute", "detach_state", id="the graph of earlier steps"),
        pytest.param(MS, "attribute", "find_kept", id="more work in each step"),
        pytest.param(MS, "mapped file", "find_kept", id="no variable"),
    ],
)
def test_the_variable_that_grows_with_the_steps_is_named(tmp_path: Path, forward: int, kind: str, kept: str) -> None:
    def phases(_: int, step: int) -> Phases:
        grown = {"forward": HEALTHY["forward"] + forward * step, "backward": HEALTHY["backward"] + 2 * MS * step}
        return {**HEALTHY, **grown}

    directory = make_run(tmp_path, FakeRun(steps=60, phases=phases, trace=False, memory=None))
    write_rows(directory / "holders.rank00000.jsonl", {**HISTORY, "kind": kind, "since_step": 9, "step": 59})
    finding = next(each for each in examine(Facts.of(load_run(directory))) if each.rule == "slower_steps")
    is_named = kind == "attribute"
    assert finding.title.endswith("backward: Net.history grows." if is_named else "backward.")
    assert ids(finding.remedies) == [*["bound_holder"] * is_named, kept, "record_step"]
