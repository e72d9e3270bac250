"""Steps that take longer and longer."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from fake_runs import HEALTHY, FakeRun, make_run
from lightning_memprof.account.ledger.model import TimeLine
from lightning_memprof.account.parts import PHASE_PARTS, Part
from lightning_memprof.judge import Facts, Finding, Severity, examine
from lightning_memprof.judge.rules.program.slowing import slower_steps
from lightning_memprof.read.run.load import load_run

MS = 1_000_000
Phases = Mapping[str, int]


def slower(root: Path, phases: Callable[[int, int], Phases], **changes: object) -> Finding | None:
    facts = Facts.of(load_run(make_run(root, FakeRun(phases=phases, trace=False, memory=None, **changes))))  # type: ignore[arg-type]
    return next((finding for finding in examine(facts) if finding.rule == "slower_steps"), None)


@pytest.mark.parametrize("phase", PHASE_PARTS)
def test_a_phase_to_which_each_step_adds_is_named_with_its_slope(tmp_path: Path, phase: str) -> None:
    finding = slower(tmp_path, lambda _, step: {**HEALTHY, phase: HEALTHY[phase] + step * MS}, steps=60)
    assert finding is not None
    assert finding.title.startswith("Steps get slower: each takes 1.00 ms longer than the one before, mostly in ")
    assert PHASE_PARTS[phase].label in finding.title
    assert finding.severity > Severity.INFO
    assert finding.recovers is not None
    # Half of what 53 steps after the warmup add.
    assert finding.recovers.max == pytest.approx(finding.numbers["steps"] * MS / 2, rel=0.01)


def test_what_is_recovered_is_no_more_than_the_phase_holds(tmp_path: Path) -> None:
    def phases(_: int, step: int) -> Phases:
        return {**HEALTHY, "forward": 20 * MS + step * MS, "backward": 20 * MS + step * MS // 2}

    finding = slower(tmp_path, phases, steps=60)
    assert finding is not None
    assert finding.numbers["phase"] == "forward"
    assert finding.recovers is not None
    assert finding.recovers.max <= finding.numbers["added_ns"] / 2


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
    assert slower(tmp_path, phases, steps=60) is None


def test_steps_that_wait_longer_and_longer_for_a_core_do_not_get_slower(tmp_path: Path) -> None:
    def phases(_: int, step: int) -> Phases:
        return {**HEALTHY, "forward": 6 * MS + step * MS}

    assert slower(tmp_path, phases, steps=60, core_wait_ns=lambda step: step * MS) is None
    assert slower(tmp_path / "own", phases, steps=60, core_wait_ns=lambda step: 0) is not None


def test_the_rank_that_gets_slower_is_named(tmp_path: Path) -> None:
    def phases(rank: int, step: int) -> Phases:
        return {**HEALTHY, "forward": 6 * MS + rank * step * MS}

    finding = slower(tmp_path, phases, steps=60, world_size=2)
    assert finding is not None
    assert finding.numbers["rank"] == 1
    assert "on rank 1" in finding.title


def test_what_names_the_code_comes_before_it(tmp_path: Path) -> None:
    def phases(_: int, step: int) -> Phases:
        return {**HEALTHY, "data_wait": step * MS}

    loaders = {"dataloaders": [{"num_workers": 0}]}
    run = load_run(make_run(tmp_path, FakeRun(steps=60, phases=phases, trace=False, memory=None, training=loaders)))
    rules = [finding.rule for finding in examine(Facts.of(run))]
    assert rules.index("input_bound") < rules.index("slower_steps")


@pytest.mark.parametrize(
    ("phase", "line", "words", "step"),
    [
        pytest.param(
            "forward",
            TimeLine(part=Part.FORWARD_HOOK, name="watch (net.py:7)", ns=1.0),
            "forward, which calls the forward hook watch (net.py:7).",
            "Remove the forward hook watch (net.py:7) after use",
            id="a forward hook",
        ),
        pytest.param(
            "callbacks",
            TimeLine(part=Part.CALLBACK, name="EMA.on_train_batch_end", ns=1e9),
            "callbacks (largest part: EMA.on_train_batch_end).",
            "Find what EMA.on_train_batch_end keeps",
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
    finding = slower_steps(facts)
    assert finding is not None
    assert finding.title.endswith(words)
    assert finding.next_steps[0].startswith(step)
