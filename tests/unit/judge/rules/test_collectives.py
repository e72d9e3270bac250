from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from device_traces import communicating
from findings import found_in_trace
from lightning_memprof.judge import Severity
from trace_reports import MS, START, collective, found_in, gpu_times, kernel, trace


def test_collectives_beside_kernels_are_hidden_and_those_between_them_are_not(tmp_path: Path) -> None:
    assert not found_in_trace(communicating(tmp_path / "hidden.pt.trace.json", 300, freeing=False))
    finding = found_in_trace(communicating(tmp_path / "exposed.pt.trace.json", 300, freeing=False, overlapped=False))
    assert finding["communication_exposed"].severity is Severity.WARNING
    assert "on rank 1" in finding["communication_exposed"].title


def test_exposed_communication_names_the_collective_its_size_and_overlap() -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=200 * MS, overlapped_ns=50 * MS)
    worst = collective(exposed_ns=150 * MS, longest_start_ns=START)
    report = trace(gpu_window=times, collectives=(collective(name="nccl:broadcast"), worst), rank=1, world_size=8)
    finding = found_in(report)["communication_exposed"]
    assert finding.severity is Severity.WARNING
    assert finding.title == "Exposed collectives take 40% of each step on rank 1, mostly all_reduce."
    assert "20% of all communication overlaps kernels" in finding.why
    most = trace(gpu_window=gpu_times(500 * MS, 5 * MS, exposed_ns=250 * MS), collectives=(worst,))
    assert found_in(most)["communication_exposed"].title.startswith("Communication-bound: ")
    assert "bucket_cap_mb" in finding.next_steps[0]
    assert finding.numbers["collectives"][0]["bytes_each"] == 25 << 20


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", "forward_prefetch"),
        ("nccl:_reduce_scatter_base", "forward_prefetch"),
        ("nccl:all_to_all", "async_op=True"),
        ("allreduce", "bucket_cap_mb"),
        ("nccl:broadcast", "async_op=True"),
        ("nccl:recv 0<-1", "Fill the pipeline: more micro-batches"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "async_op=True"),
    ],
)
def test_the_advice_fits_the_collective(name: str, advice: str) -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=80 * MS)
    finding = found_in(trace(gpu_window=times, collectives=(collective(name=name),)))["communication_exposed"]
    assert finding.severity is Severity.WARNING
    assert advice in finding.next_steps[0]


def test_what_a_stage_of_a_pipeline_receives_late_is_no_late_rank() -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=80 * MS)
    finding = found_in(trace(gpu_window=times, collectives=(collective(name="recv", max_ns=90 * MS),)))
    assert finding["communication_exposed"].next_steps[0].startswith("Fill the pipeline")


@pytest.mark.parametrize(("sent", "is_advised"), [("Sum_f32", True), ("Sum_bf16", False), ("Sum_f16", False)])
def test_what_is_sent_in_16_bits_is_not_to_be_sent_in_bfloat16(sent: str, is_advised: bool) -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=80 * MS)
    kernels = (
        kernel("gemm", 100, 4 * MS),
        replace(kernel(f"ncclDevKernel_AllReduce_{sent}_RING_LL", 10, MS), kind="communication"),
    )
    for name in ("all_reduce", "all_to_all"):
        report = trace(gpu_window=times, collectives=(collective(name=name),), kernels=kernels)
        steps = found_in(report)["communication_exposed"].next_steps
        assert any("bf16" in step or "bfloat16" in step for step in steps) is is_advised


@pytest.mark.parametrize(("exposed_ns", "first"), [(240 * MS, "Prefetch"), (260 * MS, "Shard")])
def test_communication_that_takes_longer_than_computation_is_reduced_first(exposed_ns: int, first: str) -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=exposed_ns)
    report = trace(gpu_window=times, collectives=(collective(name="nccl:all_gather"),))
    assert found_in(report)["communication_exposed"].next_steps[0].startswith(first)


def test_a_collective_that_sometimes_waits_for_a_rank_says_so_first() -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=80 * MS)
    late = collective(max_ns=90 * MS)
    finding = found_in(trace(gpu_window=times, collectives=(late,)))["communication_exposed"]
    assert finding.numbers["late"] == "nccl:all_reduce"
    assert finding.next_steps[0].startswith("Find the late rank: all_reduce takes 10.0 ms or 90.0 ms.")
