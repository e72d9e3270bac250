from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from fake_runs import HEALTHY, FakeRun, make_run
from findings import found, in_some, phases
from lightning_memprof.judge import Severity
from lightning_memprof.judge.rhythm import rhythm
from lightning_memprof.read.run.load import load_run

MS = 1_000_000


def test_slow_steps_are_told_with_their_rhythm_and_their_phase(tmp_path: Path) -> None:
    fake = FakeRun(steps=60, phases=in_some(lambda step: step % 8 == 7, forward=150 * MS))
    finding = found(tmp_path, fake)["slow_steps"]
    assert finding.title == "Every 8th step takes 8.9 times as long as the median, mostly in forward."
    assert finding.numbers["steps"] == [7, 15, 23, 31, 39, 47, 55]
    assert "triggers=Triggers(anomalies=[SlowStep()])" in finding.next_steps[-1]
    assert (7, 55) in {evidence.steps for evidence in finding.evidence}


@pytest.mark.parametrize("slow", [(30,), (17, 31), (13, 26, 39), (9, 17, 31, 50)])
def test_slow_steps_without_a_rhythm_that_nothing_explains_are_information(
    tmp_path: Path, slow: tuple[int, ...]
) -> None:
    findings = found(tmp_path, FakeRun(steps=60, phases=in_some(lambda step: step in slow, forward=9000 * MS)))
    assert findings["slow_steps"].severity is Severity.INFO
    assert findings["slow_steps"].title.startswith(f"{len(slow)} of 56 steps" if len(slow) != 3 else "Every 13th")
    assert "a busy machine may be the cause" in findings["slow_steps"].why
    assert "triggers=Triggers(anomalies=[SlowStep()])" in findings["slow_steps"].next_steps[-1]
    assert next(iter(findings)) == "nothing_found"


def test_slow_steps_in_a_rhythm_matter_without_an_explanation(tmp_path: Path) -> None:
    slow = (13, 26, 39, 52)
    finding = found(tmp_path, FakeRun(steps=60, phases=in_some(lambda step: step in slow, forward=9000 * MS)))
    assert finding["slow_steps"].severity is Severity.WARNING
    assert "busy machine" not in finding["slow_steps"].why


def test_a_hiccup_does_not_hide_the_rhythm_of_the_slow_steps(tmp_path: Path) -> None:
    def phases(_: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "backward": 200 * MS if step % 6 == 5 else 45 * MS if step in (8, 20, 21) else 10 * MS}

    assert found(tmp_path, FakeRun(steps=60, phases=phases))["slow_steps"].numbers["period"] == 6


@pytest.mark.parametrize(
    "fake",
    [
        pytest.param(
            FakeRun(steps=60, phases=lambda _, step: {**HEALTHY, "forward": (step * 7919 % 60) ** 2 * 100_000}),
            id="batches of different lengths",
        ),
        pytest.param(
            FakeRun(
                steps=60,
                phases=in_some(lambda step: step % 4 == 3, optimizer=90 * MS),
                training={"accumulate_grad_batches": 4},
            ),
            id="accumulation",
        ),
        pytest.param(FakeRun(steps=60, phases=in_some(lambda step: step % 6 == 5, forward=40 * MS)), id="a little"),
        pytest.param(FakeRun(steps=60, phases=in_some(lambda step: step % 2 == 1, forward=90 * MS)), id="half of all"),
    ],
)
def test_steps_that_are_not_few_apart_and_long_are_no_finding(tmp_path: Path, fake: FakeRun) -> None:
    assert "slow_steps" not in found(tmp_path, fake)


@pytest.mark.parametrize(
    ("steps", "subject"),
    [
        ((9, 19, 29), "Every 10th step"),
        ((2, 5, 8, 11), "Every 3rd step"),
        ((1, 23, 45), "Every 22nd step"),
        ((9, 12, 31), "3 of 59 steps"),
        ((9, 19), "2 of 59 steps"),
        ((30,), "1 of 59 steps (step 30)"),
    ],
)
def test_few_steps_are_named_by_their_rhythm(tmp_path: Path, steps: tuple[int, ...], subject: str) -> None:
    slow = {**HEALTHY, "other": 9 * 10**9}
    fake = FakeRun(steps=60, windows=(), phases=lambda _, step: slow if step in steps else HEALTHY)
    few = rhythm(load_run(make_run(tmp_path, fake)).lead, "other")
    assert few is not None
    assert few.subject == subject
    assert few.steps == steps


def test_a_phase_that_is_slow_in_each_step_has_no_rhythm(tmp_path: Path) -> None:
    assert rhythm(load_run(make_run(tmp_path, FakeRun(phases=phases(other=10**9)))).lead, "other") is None


def test_steps_of_one_number_have_no_distance(tmp_path: Path) -> None:
    slow = {**HEALTHY, "other": 9 * 10**9}
    directory = make_run(tmp_path, FakeRun(steps=60, windows=(), phases=lambda _, step: slow if step == 9 else HEALTHY))
    lead = load_run(directory).lead
    (row,) = (row for row in lead.pulse if row["step"] == 9)
    few = rhythm(replace(lead, pulse=(*lead.pulse, row, row)), "other")
    assert few is not None
    assert few.period is None
