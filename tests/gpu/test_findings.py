"""What the rules say of traces that a real device recorded: each fault, and the same work without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Finding, Severity, examine_files

pytestmark = pytest.mark.gpu

STEPS = 4
SIZE = 4096


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("the accelerator is not CUDA")
    return torch.device("cuda", 0)


def found(tmp_path: Path, step: Callable[[], object]) -> dict[str, Finding]:
    """Record some steps and return the findings by rule."""
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
    return {finding.rule: finding for finding in examine_files((report,), ())}


def products(device: torch.device, dtype: torch.dtype, count: int = 40) -> Callable[[], torch.Tensor]:
    made = torch.ones(SIZE, SIZE, device=device, dtype=dtype)

    def step() -> torch.Tensor:
        result = made
        for _ in range(count):
            result = made @ made
        return result

    return step


def test_large_products_in_bfloat16_have_nothing_above_info(cuda: torch.device, tmp_path: Path) -> None:
    findings = found(tmp_path, products(cuda, torch.bfloat16))
    assert not {rule for rule, finding in findings.items() if finding.severity > Severity.INFO}
    assert "tensor_cores_unused" not in findings


def test_tiny_kernels_are_launch_bound(cuda: torch.device, tmp_path: Path) -> None:
    small = torch.ones(64, device=cuda)

    def step() -> None:
        for _ in range(500):
            small.add_(1).mul_(0.5)

    findings = found(tmp_path, step)
    # On a host that launches fast, recording may cost as much as the device waits: then that is what is said.
    assert findings.keys() & {"gpu_idle", "recording_overhead"}
    assert findings["many_small_kernels"].numbers["share"] > 0


def test_values_that_are_read_after_each_product_are_synchronizations(cuda: torch.device, tmp_path: Path) -> None:
    made = torch.ones(64, 64, device=cuda, dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(50):
            (made @ made).sum().item()

    # How long the device waits after each depends on the host.
    finding = found(tmp_path, step)["synchronization"]
    assert finding.numbers["by_name"]["aten::item"]["calls"] == 50 * STEPS


@pytest.mark.parametrize("pinned", [False, True])
def test_only_pageable_copies_are_blocking(cuda: torch.device, tmp_path: Path, pinned: bool) -> None:
    host = torch.ones(16 << 20, pin_memory=pinned)
    multiply = products(cuda, torch.bfloat16, 10)

    def step() -> None:
        host.to(cuda, non_blocking=True)
        multiply()

    assert ("blocking_transfers" in found(tmp_path, step)) is not pinned


def test_products_in_32_bits_leave_tensor_cores_unused(cuda: torch.device, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability(cuda)[0] < 7:
        pytest.skip("the device has no tensor cores")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        assert "tensor_cores_unused" in found(tmp_path, products(cuda, torch.float32, 10))
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_cache_that_is_emptied_in_each_step_is_thrash(cuda: torch.device, tmp_path: Path) -> None:
    multiply = products(cuda, torch.bfloat16, 1)

    def step() -> None:
        for _ in range(10):
            kept = [torch.empty(64 << 20, dtype=torch.uint8, device=cuda) for _ in range(16)]
            multiply()
            kept.clear()
            torch.cuda.empty_cache()

    # Its severity depends on what a call to the driver takes.
    assert found(tmp_path, step)["allocator_thrash"].numbers["freed"] >= 10 * STEPS


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
