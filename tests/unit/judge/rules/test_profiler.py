from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fake_runs import HEALTHY, FakeRun
from findings import found, recovery
from lightning_memprof.judge import Finding


def profiled(directory: Path, other_profiler: Callable[[int], int | None]) -> dict[str, Finding]:
    """Two of ten steps take six times as long as the others."""
    slow = {**HEALTHY, "callbacks": HEALTHY["callbacks"] + 5 * sum(HEALTHY.values())}
    fake = FakeRun(
        steps=60, phases=lambda _, step: slow if step % 10 in {4, 5} else HEALTHY, other_profiler=other_profiler
    )
    return found(directory, fake)


def test_a_profiler_that_records_some_steps_costs_what_they_and_the_next_ones_take_more(tmp_path: Path) -> None:
    finding = profiled(tmp_path, lambda step: 1 if step % 10 == 4 else None)["other_profiler"]
    assert "torch.profiler records the training in 6 of 57 steps" in finding.title
    assert finding.numbers["beyond_others_ns"] == pytest.approx(12 * 5 * sum(HEALTHY.values()) / 57)
    assert recovery(finding).max <= finding.numbers["beyond_others_ns"]


def test_a_python_profiler_that_records_all_steps_is_found_and_a_single_profiled_step_is_not(tmp_path: Path) -> None:
    finding = profiled(tmp_path / "all", lambda _: 2)["other_profiler"]
    assert "cProfile, records the training." in finding.title
    assert "Trainer(profiler=...)" in finding.next_steps[0]
    assert "other_profiler" not in profiled(tmp_path / "two", lambda step: 1 if step in {30, 31} else None)
    assert "other_profiler" not in profiled(tmp_path / "none", lambda _: None)
