"""The sides of a comparison of traces: their steps, the length of the recording, and the ranks of one program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kineto import write_trace
from known import known
from lightning_memprof.account.ledger.ranks import across_ranks
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.compare.comparison import check, compare, parse_limit
from lightning_memprof.compare.model import Side
from lightning_memprof.compare.sides import traces_side
from lightning_memprof.judge import examine_files
from lightning_memprof.units import MIB

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
STEP_US = 10_000


def event(cat: str, name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
    pid, tid = (0, 21 if name == NCCL else 7) if cat == "kernel" else (9, 9)
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args}


def ahead(path: Path, kernel_us: int, steps: int = 5) -> Side:
    """A host that launches a kernel in each step of 0.1 ms and does not wait for it."""
    events = []
    for at in range(steps):
        events += [
            event("user_annotation", f"ProfilerStep#{at}", 100 * at, 100 * at + 100),
            event("cuda_runtime", "cudaLaunchKernel", 100 * at, 100 * at + 1, correlation=at + 1),
            event("kernel", "gemm", kernel_us * at + 1, kernel_us * (at + 1) + 1, correlation=at + 1),
        ]
    return traces_side([write_trace(path, events)], path.name)


def test_steps_of_a_host_that_is_ahead_are_those_of_the_device(tmp_path: Path) -> None:
    found = known(compare(ahead(tmp_path / "a.json", 10_000), ahead(tmp_path / "b.json", 12_000)).difference("step_ns"))
    assert found.a is not None
    assert found.a.steps == (10_000_000,) * 5
    assert (found.is_above_noise, found.has_too_few_steps) == (True, False)


def test_a_longer_recording_of_one_program_is_no_difference(tmp_path: Path) -> None:
    few, many = ahead(tmp_path / "few.json", 10_000), ahead(tmp_path / "many.json", 10_000, steps=20)
    assert compare(few, many).is_same
    outcome = check(compare(few, many), parse_limit("duration_ns>5%"))
    assert outcome.status == "fail"
    assert "A first to last event of 5 steps, B first to last event of 20 steps" in outcome.title
    slow = known(compare(few, ahead(tmp_path / "slow.json", 12_000)).difference("duration_ns"))
    assert slow.is_above_noise


def ranks(directory: Path, late_us: int) -> list[Path]:
    """Traces of 2 ranks, 4 steps; rank 1 computes for that long while rank 0 waits for it in the collective."""

    def events(rank: int) -> Iterator[dict[str, Any]]:
        step_us = STEP_US + late_us
        for at in range(4):
            start = step_us * at
            yield event("user_annotation", f"ProfilerStep#{at}", start, start + step_us)
            arrives = start + 8_000 + late_us * rank
            yield event("kernel", "gemm", start, arrives)
            yield event("kernel", NCCL, arrives, start + step_us)

    directory.mkdir()
    return [
        write_trace(directory / f"r{rank}.json", list(events(rank)), distributedInfo={"rank": rank, "world_size": 2})
        for rank in range(2)
    ]


def test_a_late_rank_is_no_noise_of_the_others_times(tmp_path: Path) -> None:
    files = ranks(tmp_path / "late", 6_000)
    late = traces_side(files, "late")
    comparison = compare(traces_side(ranks(tmp_path / "even", 0), "even"), late)
    found = known(comparison.difference("gpu_communication_ns"))
    assert found.a is not None
    assert found.b is not None
    assert (found.a.value, found.b.value, found.is_above_noise) == (2_000_000, (8_000_000 + 2_000_000) / 2, True)
    assert late.named["collectives"] == {"all_reduce": found.b.value}
    assert late.named["kernels"][NCCL] == found.b.value
    assert late.measures["step_ns"].samples == 4  # not 8: the ranks take each step together
    shown = examine_files(across_ranks([trace_report(file) for file in files]), [])
    assert late.sentences == {finding.rule: finding.title for finding in shown if finding.rule in late.sentences}


def test_several_windows_of_a_rank_are_samples_and_their_spread_is_noise(tmp_path: Path) -> None:
    windows = [*ranks(tmp_path / "even", 0), *ranks(tmp_path / "late", 6_000)]
    side = traces_side(windows, "both")
    assert side.measures["gpu_communication_ns"].samples == 2
    assert side.measures["gpu_communication_ns"].noise == 5_000_000 - 2_000_000
    assert side.spreads["kernels"][NCCL] == 5_000_000 - 2_000_000
    assert side.measures["step_ns"].samples == 8


@pytest.mark.parametrize("without_rank", [False, True])
def test_the_peak_is_that_of_the_fullest_rank(tmp_path: Path, *, without_rank: bool) -> None:
    def side(name: str, *sizes: int) -> Side:
        files = []
        for rank, size in enumerate(sizes):
            args = {"Bytes": size, "Addr": 8, "Device Type": 0, "Device Id": -1, "Total Allocated": size}
            memory = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 9, "tid": 9, "ts": 5}
            events = [event("cpu_op", "aten::mm", 0, 10), {**memory, "args": args}]
            info: dict[str, Any] = {} if without_rank else {"distributedInfo": {"rank": rank, "world_size": 2}}
            files.append(write_trace(tmp_path / f"{name}{rank}.json", events, **info))
        return traces_side(files, name)

    found = compare(side("a", 64 * MIB, 64 * MIB), side("b", 64 * MIB, 96 * MIB)).difference("peak_allocated_bytes")
    assert found is not None
    assert found.change == 32 * MIB
    assert found.is_above_noise is not without_rank
