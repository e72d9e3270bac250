from __future__ import annotations

from pathlib import Path

import pytest

from device_traces import KERNEL_US, KERNELS, STEPS, Recording, communicating, training
from findings import found_in_trace
from lightning_memprof.account.parts import Part
from lightning_memprof.judge import Severity
from trace_reports import MS, START, call, collective, found_in, gpu_times, idle, trace


def test_a_collective_that_waits_while_memory_is_given_back_is_thrash(tmp_path: Path) -> None:
    finding = found_in_trace(communicating(tmp_path / "thrash.pt.trace.json", 60_000, freeing=True))["allocator_thrash"]
    assert finding.severity is Severity.CRITICAL
    assert "took 60.0 ms (median 300 µs) during an allocator call" in finding.title
    assert finding.numbers["freed"] == 1
    assert "expandable_segments" in finding.next_steps[0]


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
    assert finding.title.startswith("The caching allocator is off: 75 hipMalloc calls per step")
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in finding.next_steps[0]


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
    assert finding.title.startswith("Memory from the driver's pool: 75 cudaMallocAsync calls per step")
    assert "waits for all kernels" not in finding.why
    assert finding.next_steps == (
        "Use PyTorch's native allocator: remove backend:cudaMallocAsync from PYTORCH_CUDA_ALLOC_CONF.",
    )


def test_pinned_memory_of_each_step_is_a_call_of_the_allocator(tmp_path: Path) -> None:
    def pin(made: Recording) -> None:
        made.call("cudaHostAlloc", 20_000)

    findings = found_in_trace(training(tmp_path / "pinned.pt.trace.json", before=pin, kernel_us=100))
    assert findings.keys() == {"allocator_thrash"}
    assert findings["allocator_thrash"].severity > Severity.INFO
    assert findings["allocator_thrash"].next_steps[0].startswith("Keep pinned memory from step to step")


def test_memory_that_is_given_back_and_taken_again_is_thrash() -> None:
    calls = (
        call("cudaFree", 40, 60 * MS, at_ns=START),
        call("cudaMalloc", 40, 20 * MS),
        call("cudaLaunchKernel", 9, 9),
    )
    finding = found_in(trace(steady_allocations=calls, causes=(idle(Part.IDLE_ALLOCATOR, 75 * MS),)))[
        "allocator_thrash"
    ]
    assert finding.severity is Severity.WARNING
    assert finding.numbers["share"] == pytest.approx(75 / 500)
    assert "cudaFree 40 times (60.0 ms), cudaMalloc 40 times (20.0 ms)" in finding.why
    assert finding.numbers["freed"] == 40
    assert "expandable_segments" in finding.next_steps[0]


def test_growing_segments_are_only_info() -> None:
    calls = (call("cuMemCreate", 40, 130 * MS), call("hipMalloc", 40, 20 * MS))
    finding = found_in(trace(steady_allocations=calls, causes=(idle(Part.IDLE_ALLOCATOR, 150 * MS),)))
    assert finding["allocator_thrash"].severity is Severity.INFO
    assert not found_in(trace(steady_allocations=(call("cudaMalloc", 2, MS),)))


def test_a_collective_that_waits_for_the_allocator_takes_hundreds_of_times_as_long() -> None:
    slow = collective(median_ns=MS // 2, max_ns=150 * MS, longest_start_ns=START + 10 * MS)
    report = trace(
        steady_allocations=(call("cudaFree", 2, 2 * MS),),
        collectives=(collective(), slow),
        allocator_spans=((START, START + MS), (START + 100 * MS, START + 101 * MS)),
        gpu_window=gpu_times(500 * MS, 5 * MS, exposed_ns=200 * MS),
    )
    finding = found_in(report)["allocator_thrash"]
    assert finding.severity is Severity.WARNING
    assert finding.numbers["share"] == pytest.approx(149.5 / 500)
    assert finding.title.startswith("Low memory: nccl:all_reduce took 150 ms (median 500 µs) during an allocator call")
    assert finding.numbers["slow_collectives"] == [
        {"name": "nccl:all_reduce", "median_ns": MS // 2, "max_ns": 150 * MS}
    ]
    assert (finding.evidence[-1].start_ns, finding.evidence[-1].end_ns) == (START + 10 * MS, START + 160 * MS)


@pytest.mark.parametrize("spans", [(), ((START, START + MS),), ((START + 161 * MS, START + 162 * MS),)])
def test_a_slow_collective_at_another_time_is_not_the_allocators(spans: tuple[tuple[int, int], ...]) -> None:
    slow = collective(median_ns=MS // 2, max_ns=150 * MS, longest_start_ns=START + 10 * MS)
    report = trace(steady_allocations=(call("cudaFree", 2, 2 * MS),), collectives=(slow,), allocator_spans=spans)
    assert "allocator_thrash" not in found_in(report)
