from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from fake_devices import FakeCuda
from lightning_memprof import ConfigError
from lightning_memprof.capture.base import StepRecord
from lightning_memprof.triggers import AllocatorRetries, Anomaly, NearOOM, SlowStep
from lightning_memprof.units import GIB
from sessions import Times, context

MS = 1_000_000


def step(number: int, duration_ns: int = 10 * MS, *, epoch: int = 0, usual: bool = True) -> StepRecord:
    start = number * 1000 * MS
    return StepRecord(number, number, epoch, None, start, duration_ns, Times(), None, usual)


def said(watch: Any, durations: list[int], **of: Any) -> list[int]:
    return [number for number, ms in enumerate(durations) if watch(step(number, ms * MS, **of)) is not None]


def watching(tmp_path: Path, anomaly: Anomaly, device: str = "cpu") -> Any:
    with context(tmp_path, device) as run:
        assert anomaly.unavailable(run) is None
        return anomaly.watch(run)


def test_a_step_of_twice_the_median_is_slow_and_says_by_how_much(tmp_path: Path) -> None:
    watch = watching(tmp_path, SlowStep())
    assert said(watch, [100] + [10, 11] * 20 + [19, 10]) == []
    text = watch(step(50, 25 * MS))
    assert text == "step 50 took 25.0 ms, 2.3 times the median before it"


def test_the_first_steps_of_a_run_and_of_an_epoch_and_those_with_a_validation_are_not_slow(tmp_path: Path) -> None:
    watch = watching(tmp_path, SlowStep(factor=3))
    assert said(watch, [500] + [100] * 5 + [10] * 13) == []
    assert said(watch, [10] * 30) == []
    assert watch(step(60, 500 * MS, epoch=1)) is None
    assert watch(step(61, 500 * MS, epoch=1, usual=False)) is None
    assert watch(step(62, 500 * MS, epoch=1)) is not None


def test_what_is_usual_follows_a_training_that_becomes_slower(tmp_path: Path) -> None:
    watch = watching(tmp_path, SlowStep())
    slow = said(watch, [10] * 60 + [25] * 60)
    assert slow[0] == 60
    assert max(slow) < 60 + 30


def test_allocator_retries_are_counted_from_where_they_stood(tmp_path: Path) -> None:
    with FakeCuda().installed() as cuda:
        cuda.ooms = 3
        watch = watching(tmp_path, AllocatorRetries(), "cuda")
        assert watch(step(0)) is None
        cuda.ooms = 5
        assert watch(step(1)) == "the allocator had to free its cache and retry 2 times in step 1"
        assert watch(step(2)) is None


def test_allocator_retries_need_an_accelerator(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        assert AllocatorRetries().unavailable(run) == "no accelerator"


def test_near_oom_counts_what_other_processes_hold_and_asks_for_a_higher_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = 8 * GIB
    with FakeCuda(total_bytes=80 * GIB).installed() as cuda:
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda _: (cuda.total_bytes - others - cuda.allocated_bytes, cuda.total_bytes)
        )
        watch = watching(tmp_path, NearOOM(fraction=0.95, limit=2), "cuda")
        cuda.allocate(60 * GIB)
        assert watch(step(0)) is None
        cuda.allocate(9 * GIB)
        assert watch(step(1)) == "96% of 72.0 GiB in use after step 1"
        assert watch(step(2)) is None
        cuda.allocate(1 * GIB)
        assert watch(step(3)) is not None


def test_near_oom_on_the_cpu_is_the_machines_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watching(tmp_path, NearOOM(fraction=0.9))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=5 * GIB))
    assert watch(step(1)) == "92% of 64.0 GiB in use after step 1"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlowStep(factor=1), r"SlowStep\(factor=1\): must be a number above 1"),
        (lambda: SlowStep(limit=0), r"SlowStep\(limit=0\): must be an integer of at least 1"),
        (lambda: SlowStep(factor="2"), "must be a number"),  # type: ignore[arg-type]
        (lambda: NearOOM(fraction=1.0), "less than 1"),
        (lambda: AllocatorRetries(limit=True), r"AllocatorRetries\(limit=True\)"),
    ],
)
def test_values_that_mean_nothing_are_refused(make: Callable[[], Anomaly], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
