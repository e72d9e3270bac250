"""What a trace of a device says of each fault, and of the same work without it; the verdict where its times are real.

A simulated device takes the times of its host, so only counts are the same in each run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Finding, Severity, examine_files

pytestmark = pytest.mark.gpu

STEPS = 4
SIZE = 4096
SIMULATED = "FAKE"


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("the accelerator is not CUDA")
    return torch.device("cuda", 0)


@pytest.fixture
def timed(cuda: torch.device) -> torch.device:
    if SIMULATED in torch.cuda.get_device_name(cuda):
        pytest.skip("the device's times are simulated")
    return cuda


def recorded(tmp_path: Path, step: Callable[[], object]) -> TraceReport:
    """Record some steps."""
    path = tmp_path / "recorded.pt.trace.json"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, schedule=schedule(wait=1, warmup=3, active=STEPS, repeat=1)) as profiler:
        for _ in range(4 + STEPS):
            step()
            profiler.step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    report = trace_report(path)
    assert report.gpu_window is not None
    assert len(report.steps) == STEPS
    return report


def found(tmp_path: Path, step: Callable[[], object]) -> dict[str, Finding]:
    """Record some steps and return the findings by rule."""
    return {finding.rule: finding for finding in examine_files((recorded(tmp_path, step),), ())}


def products(device: torch.device, dtype: torch.dtype, count: int = 40) -> Callable[[], torch.Tensor]:
    made = torch.ones(SIZE, SIZE, device=device, dtype=dtype)

    def step() -> torch.Tensor:
        result = made
        for _ in range(count):
            result = made @ made
        return result

    return step


def launches(device: torch.device) -> Callable[[], None]:
    small = torch.ones(64, device=device)

    def step() -> None:
        for _ in range(500):
            small.add_(1).mul_(0.5)

    return step


def reads(device: torch.device) -> Callable[[], None]:
    made = torch.ones(64, 64, device=device, dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(50):
            (made @ made).sum().item()

    return step


def copies(device: torch.device, *, pinned: bool) -> Callable[[], None]:
    host = torch.ones(16 << 20, pin_memory=pinned)
    multiply = products(device, torch.bfloat16, 10)

    def step() -> None:
        host.to(device, non_blocking=True)
        multiply()

    return step


def emptied_cache(device: torch.device) -> Callable[[], None]:
    multiply = products(device, torch.bfloat16, 1)

    def step() -> None:
        for _ in range(10):
            kept = [torch.empty(64 << 20, dtype=torch.uint8, device=device) for _ in range(16)]
            multiply()
            kept.clear()
            torch.cuda.empty_cache()

    return step


def test_large_products_in_bfloat16_have_nothing_above_info(timed: torch.device, tmp_path: Path) -> None:
    findings = found(tmp_path, products(timed, torch.bfloat16))
    assert not {rule for rule, finding in findings.items() if finding.severity > Severity.INFO}


def test_large_products_in_bfloat16_use_tensor_cores(cuda: torch.device, tmp_path: Path) -> None:
    assert "tensor_cores_unused" not in found(tmp_path, products(cuda, torch.bfloat16))


def test_tiny_kernels_are_counted(cuda: torch.device, tmp_path: Path) -> None:
    kernels = recorded(tmp_path, launches(cuda)).kernels
    assert sum(kernel.count for kernel in kernels) == 1000 * STEPS


def test_tiny_kernels_are_launch_bound(timed: torch.device, tmp_path: Path) -> None:
    findings = found(tmp_path, launches(timed))
    # On a host that launches fast, recording may cost as much as the device waits.
    assert "gpu_idle" not in findings or findings["gpu_idle"].numbers["launch_bound"]


def test_each_value_that_is_read_makes_the_host_wait(cuda: torch.device, tmp_path: Path) -> None:
    calls = recorded(tmp_path, reads(cuda)).synchronizations
    assert {call.name: call.count for call in calls}["aten::item"] == 50 * STEPS


def test_values_that_are_read_after_each_product_are_synchronizations(timed: torch.device, tmp_path: Path) -> None:
    assert "synchronization" in found(tmp_path, reads(timed))


@pytest.mark.parametrize("pinned", [False, True])
def test_a_copy_says_whether_its_memory_is_pageable(cuda: torch.device, tmp_path: Path, pinned: bool) -> None:
    (copied,) = (each for each in recorded(tmp_path, copies(cuda, pinned=pinned)).copies if each.kind == "HtoD")
    assert copied.is_pageable is not pinned
    # Pinned copies of the steps before may end in the recording.
    assert copied.count >= STEPS
    assert copied.bytes == copied.count * 64 << 20


@pytest.mark.parametrize("pinned", [False, True])
def test_only_pageable_copies_are_blocking(timed: torch.device, tmp_path: Path, pinned: bool) -> None:
    assert ("blocking_transfers" in found(tmp_path, copies(timed, pinned=pinned))) is not pinned


def test_products_in_32_bits_leave_tensor_cores_unused(cuda: torch.device, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability(cuda)[0] < 7:
        pytest.skip("the device has no tensor cores")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        assert "tensor_cores_unused" in found(tmp_path, products(cuda, torch.float32, 10))
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_cache_that_is_emptied_calls_the_driver_in_each_step(cuda: torch.device, tmp_path: Path) -> None:
    calls = {call.name: call.count for call in recorded(tmp_path, emptied_cache(cuda)).steady_allocations}
    assert calls["cudaFree"] >= 10 * STEPS


def test_a_cache_that_is_emptied_in_each_step_is_thrash(timed: torch.device, tmp_path: Path) -> None:
    # Its severity depends on what a call to the driver takes.
    assert found(tmp_path, emptied_cache(timed))["allocator_thrash"].numbers["freed"] >= 10 * STEPS


def test_a_slow_loader_is_input_bound(cuda: torch.device, tmp_path: Path) -> None:
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.linalg.svdvals(torch.randn(400, 400))

    batches = iter(DataLoader(Slow(), batch_size=4))
    multiply = products(cuda, torch.bfloat16, 2)

    def step() -> None:
        next(batches).to(cuda)
        multiply()

    finding = found(tmp_path, step)["input_bound"]
    assert finding.severity is Severity.CRITICAL
