"""Calls and operators that initialise something, in a trace."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof.account.parts import Part
from trace_events import call, causes, event, kernel, report

# In the first 70 us, a kernel as long as those may run that began before the recording.
KERNEL_US = 70


def steps_with(first_us: float, name: str = "cudaLaunchKernel", cat: str = "cuda_runtime") -> Iterable[dict[str, Any]]:
    now = 0.0
    for number in range(3):
        took = first_us if number == 0 else 20
        yield step(now, now + took + 100, number)
        yield event(cat, name, now + 10, now + 10 + took)
        yield call(now + 10 + took, now + 15 + took, number + 1)
        yield kernel(now + 30 + took, now + 30 + took + KERNEL_US, number + 1)
        now += took + 100


def step(start: float, end: float, number: int) -> dict[str, Any]:
    return event("user_annotation", f"ProfilerStep#{number}", start, end)


def idle_us(path: Path, part: Part, *events: dict[str, Any]) -> float:
    """Return the idle time of a part in all steps."""
    found = report(path, *events).device_ledger
    assert found is not None
    return found.ns(part) * found.steps / 1000


@pytest.mark.parametrize(
    ("name", "cat"),
    [("cudaFree", "cuda_runtime"), ("aten::cudnn_convolution", "cpu_op"), ("cuLaunchKernel", "cuda_driver")],
)
def test_a_first_call_that_initialises_something_is_a_cold_start(name: str, cat: str, tmp_path: Path) -> None:
    assert idle_us(tmp_path, Part.COLD_START, *steps_with(9_000, name, cat)) == 9_000 + 10 - KERNEL_US
    assert idle_us(tmp_path, Part.COLD_START, *steps_with(190, name, cat)) == 0


def test_a_wait_for_the_device_is_no_cold_start(tmp_path: Path) -> None:
    assert idle_us(tmp_path, Part.COLD_START, *steps_with(9_000, "cudaDeviceSynchronize")) == 0


def test_memory_that_the_first_step_gets_and_later_ones_keep_is_a_cold_start(tmp_path: Path) -> None:
    once = [call(at, at + 10, name="cudaMalloc") for at in (1, 21)]
    events = [step(0, 100, 0), step(100, 200, 1), *once, kernel(0, 1), kernel(50, 100), kernel(150, 200)]
    assert idle_us(tmp_path, Part.COLD_START, *events) == 20
    assert idle_us(tmp_path, Part.IDLE_ALLOCATOR, *events, call(110, 120, name="cudaMalloc")) == 30


def test_without_steps_a_graphs_capture_behind_the_last_kernel_is_a_cold_start(tmp_path: Path) -> None:
    capture = call(11, 12, name="cudaStreamBeginCapture"), call(1000, 1010, name="cudaGraphInstantiate")
    assert causes(tmp_path, kernel(0, 10), *capture) == {"cold_start": 999, "idle_python": 1}
    assert causes(tmp_path, step(0, 10, 0), kernel(0, 10), *capture) == {}


def test_start_up_and_calls_outside_the_steps_are_no_steady_allocations(tmp_path: Path) -> None:
    found = report(
        tmp_path,
        call(0, 2_000_000, name="cudaFree"),
        event("user_annotation", "ProfilerStep#1", 2_000_000, 2_001_000),
        event("user_annotation", "ProfilerStep#2", 2_001_000, 2_002_000),
        kernel(2_000_100, 2_000_200),
        *(call(at, at + 10, name="cudaMalloc") for at in (2_000_300, 2_001_300)),
        call(2_003_000, 2_003_500, name="cudaMalloc"),
    )
    assert [(each.name, each.count, each.total_ns) for each in found.steady_allocations] == [("cudaMalloc", 2, 20_000)]
