from __future__ import annotations

from pathlib import Path

import pytest

from device_traces import KERNEL_US, KERNELS, STEPS, Recording, training
from findings import found_in_trace, ids
from lightning_memprof.account.parts import Part
from lightning_memprof.judge import Severity
from trace_reports import MS, call, found_in, idle, trace


@pytest.mark.parametrize("names", [("cudaMalloc", "cudaFree"), ("cuMemCreate", "cuMemUnmap"), ("hipMalloc", "hipFree")])
def test_memory_that_comes_and_goes_in_each_step_is_thrash(tmp_path: Path, names: tuple[str, str]) -> None:
    def churn(made: Recording, kernel: int) -> None:
        if kernel == 3:
            for name in names:
                made.call(name, max(made.free - made.now, 0) + 900)

    finding = found_in_trace(training(tmp_path / "churn.pt.trace.json", churn))["allocator_thrash"]
    assert finding.severity is Severity.WARNING
    assert finding.numbers["calls"] == dict.fromkeys(names, STEPS)


def test_the_start_of_the_driver_and_a_first_pass_are_no_thrash(tmp_path: Path) -> None:
    made = Recording()
    made.call("cudaFree", 900_000)
    with made.inside("ProfilerStep#1"):
        for _ in range(KERNELS):
            made.call("cudaMalloc", 300)
            made.work(20, "aten::linear")
            made.launch(KERNEL_US)
    assert "allocator_thrash" not in found_in_trace(made.write(tmp_path / "cold.pt.trace.json"))


def test_a_tensor_that_is_a_call_to_the_driver_shows_that_the_caching_allocator_is_off(tmp_path: Path) -> None:
    def uncached(made: Recording, _kernel: int) -> None:
        for _ in range(3):
            made.call("hipMalloc", 40)
            made.call("hipFree", 60)

    finding = found_in_trace(training(tmp_path / "uncached.pt.trace.json", uncached, kernel_us=100))["allocator_thrash"]
    assert finding.title.startswith("The driver allocates each tensor: 75 calls per step")
    assert ids(finding.remedies) == ["caching_allocator"]


def test_a_step_that_empties_the_cache_requests_less_than_once_for_four_kernels(tmp_path: Path) -> None:
    def emptied(made: Recording, kernel: int) -> None:
        for _ in range(60 if kernel == 0 else 0):
            made.call("cudaMalloc", 40)
            made.call("cudaFree", 60)
        for _ in range(10):
            made.launch(1)

    finding = found_in_trace(training(tmp_path / "emptied.pt.trace.json", emptied))["allocator_thrash"]
    assert "cache" not in finding.title
    assert any("empty_cache()" in step for step in finding.next_steps)


def test_a_tensor_from_the_drivers_pool_is_cached_and_its_return_waits_for_no_kernel(tmp_path: Path) -> None:
    def pooled(made: Recording, _kernel: int) -> None:
        for _ in range(3):
            made.call("cudaMallocAsync", 40)
            made.call("cudaFreeAsync", 60)

    finding = found_in_trace(training(tmp_path / "pooled.pt.trace.json", pooled, kernel_us=100))["allocator_thrash"]
    assert finding.title.startswith("The driver allocates each tensor: 75 calls per step")
    assert "waits for all kernels" not in finding.why
    assert ids(finding.remedies) == ["caching_allocator"]


def test_pinned_memory_of_each_step_is_a_call_of_the_allocator(tmp_path: Path) -> None:
    def pin(made: Recording) -> None:
        made.call("cudaHostAlloc", 20_000)

    findings = found_in_trace(training(tmp_path / "pinned.pt.trace.json", before=pin, kernel_us=100))
    assert findings.keys() == {"allocator_thrash"}
    assert findings["allocator_thrash"].severity > Severity.INFO
    assert findings["allocator_thrash"].next_steps[0].startswith("Keep pinned memory from step to step")


def test_growing_segments_are_only_info() -> None:
    calls = (call("cuMemCreate", 40, 130 * MS), call("hipMalloc", 40, 20 * MS))
    finding = found_in(trace(steady_allocations=calls, causes=(idle(Part.IDLE_ALLOCATOR, 150 * MS),)))
    assert finding["allocator_thrash"].severity is Severity.INFO
    assert not found_in(trace(steady_allocations=(call("cudaMalloc", 2, MS),)))
