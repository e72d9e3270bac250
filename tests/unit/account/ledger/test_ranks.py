"""Collectives of several ranks in a ledger: waiting for the last rank, then the transfer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fake_runs import HEALTHY, FakeRun, make_run
from kineto import write_trace
from ledger_lines import out_of_bounds
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.ledger.ranks import across_ranks, log_waits
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Facts, examine, examine_files
from lightning_memprof.read.run.load import load_run

BASE_NS = 1_700_000_000_000_000_000
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
GLOO = "gloo:all_reduce"


def event(cat: str, name: str, start: float, end: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    pid = 0 if cat == "kernel" else 9
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args}


def step(end: float) -> dict[str, Any]:
    return event("user_annotation", "ProfilerStep#3", 0, end)


def kernel(start: float, end: float, name: str = "gemm", stream: int = 7) -> dict[str, Any]:
    return event("kernel", name, start, end, stream)


def report(directory: Path, rank: int, *events: dict[str, Any], clock_us: int = 0) -> TraceReport:
    moved = [{**each, "ts": each["ts"] + clock_us} for each in events]
    info = {"rank": rank, "world_size": 4}
    return trace_report(
        write_trace(directory / f"rank{rank}.json", moved, distributedInfo=info, baseTimeNanoseconds=BASE_NS)
    )


def times(ledger: TimeLedger | None) -> tuple[float, float, float]:
    """Microseconds per step: waiting for other ranks, transfer, and the rank's own work."""
    assert ledger is not None
    assert total(ledger.lines) == pytest.approx(ledger.step_ns)
    waiting, transfer = ledger.communicates("rank_wait"), ledger.communicates("collective")
    return waiting / 1000, transfer / 1000, (ledger.step_ns - waiting - transfer) / 1000


def on_devices(directory: Path, starts: list[float], clock_us: int = 0) -> list[TraceReport]:
    """A step of 1 ms: each rank computes up to its collective, which ends at 600 us on all."""
    return [
        report(
            directory,
            rank,
            *(step(1000), kernel(0, start), kernel(start, 600, NCCL, 21), kernel(600, 1000)),
            clock_us=rank * clock_us,
        )
        for rank, start in enumerate(starts)
    ]


@pytest.mark.parametrize("clock_us", [0, 80_000])
def test_a_rank_waits_until_the_last_one_has_come_and_then_transfers(tmp_path: Path, clock_us: int) -> None:
    traces = across_ranks(on_devices(tmp_path, [100, 450, 300, 500], clock_us))
    assert [times(trace.device_ledger) for trace in traces] == [
        (400, 100, 500),
        (50, 100, 850),
        (200, 100, 700),
        (0, 100, 900),
    ]


def test_a_rank_alone_and_ranks_of_other_steps_have_no_wait(tmp_path: Path) -> None:
    mine, other = on_devices(tmp_path, [100, 500])
    assert across_ranks([mine]) == (mine,)
    later = report(tmp_path, 1, event("user_annotation", "ProfilerStep#4", 0, 1000), kernel(500, 600, NCCL, 21))
    assert across_ranks([mine, later]) == (mine, later)
    assert across_ranks([mine, other]) != (mine, other)


def test_waiting_that_computation_hides_is_computation(tmp_path: Path) -> None:
    hidden = report(tmp_path, 0, step(1000), kernel(0, 400), kernel(100, 600, NCCL, 21))
    late = report(tmp_path, 1, step(1000), kernel(0, 500), kernel(500, 600, NCCL, 21))
    first, _ = across_ranks([hidden, late])
    assert times(first.device_ledger) == (100, 100, 800)


def test_while_another_collective_transfers_nobody_waits(tmp_path: Path) -> None:
    gather = "ncclDevKernel_AllGather_RING_LL"
    both = kernel(0, 800, NCCL, 21), kernel(100, 400, gather, 22)
    first = report(tmp_path, 0, step(1000), *both)
    late = report(tmp_path, 1, step(1000), kernel(700, 800, NCCL, 21), kernel(200, 400, gather, 22))
    found, _ = across_ranks([first, late])
    waiting_us = 100 + 100 + 300  # alone, both, and alone again; from 200 to 400 the gather transfers
    assert times(found.device_ledger) == (waiting_us, 800 - waiting_us, 200)


def test_where_the_ends_do_not_agree_nobody_knows_who_waits(tmp_path: Path) -> None:
    first, other = (
        report(tmp_path, rank, step(90_000), *(kernel(at * apart, at * apart + 500, NCCL, 21) for at in range(5)))
        for rank, apart in enumerate((10_000, 20_000))
    )
    assert all(not times(trace.device_ledger)[0] for trace in across_ranks([first, other]))


def on_host(directory: Path, arrives: list[float]) -> list[TraceReport]:
    """A step of 1 ms: forward up to 100 us before the collective in backward, which ends at 800 us on all."""
    backward = "[pl][profile][Strategy]DDPStrategy.backward"
    return [
        report(
            directory,
            rank,
            step(1000),
            event("cpu_op", "[pl][profile][Strategy]DDPStrategy.training_step", 0, begins - 100),
            event("cpu_op", "aten::mm", 0, begins - 100),
            event("cpu_op", backward, begins - 100, 900),
            event("cpu_op", "c10d::allreduce_", begins, 800),
            event("user_annotation", GLOO, begins, 800, 5),
            event("user_annotation", "Optimizer.step#SGD.step", 900, 1000),
        )
        for rank, begins in enumerate(arrives)
    ]


def test_without_a_device_the_waiting_is_the_hosts(tmp_path: Path) -> None:
    waits, late = across_ranks(on_host(tmp_path, [200, 700]))
    assert times(waits.host_ledger) == (500, 100, 400)
    assert times(late.host_ledger) == (0, 100, 900)
    assert waits.host_ledger is not None
    assert [(line.part, line.name, line.count) for line in waits.host_ledger.communication] == [
        ("rank_wait", "all_reduce", 1),
        ("collective", "all_reduce", 1),
    ]


@pytest.mark.parametrize(("every", "is_found"), [(20_000, True), (29_000, False)])
def test_collectives_whose_ends_do_not_agree_are_not_the_same_and_nobody_waits(
    tmp_path: Path, every: int, is_found: bool
) -> None:
    files = []
    for rank, period in enumerate((20_000, every)):
        events = [step(200_000)]
        for at in range(5):
            begins = period * at + (16_000 if rank == 1 else 1_000)
            events.append(event("user_annotation", GLOO, begins, period * at + 17_000, 5))
        files.append(report(tmp_path, rank, *events))
    found = {finding.rule for finding in examine_files(across_ranks(files), [])}
    assert ("straggler" in found) == is_found


def test_the_straggler_of_bare_traces_recovers_what_the_others_wait_and_says_what_takes_it_longer(
    tmp_path: Path,
) -> None:
    files = []
    for rank in range(2):
        events = [step(100_000)]
        for at in range(5):
            begins = 20_000 * at + (16_000 if rank == 1 else 1_000)
            events += [
                event("cpu_op", "[pl][profile][LightningModule]Net.training_step", 20_000 * at, begins - 100),
                event("cpu_op", "aten::mm", 20_000 * at, begins - 100),
                event("user_annotation", GLOO, begins, 20_000 * at + 17_000, 5),
            ]
        files.append(report(tmp_path, rank, *events))
    traces = across_ranks(files)
    (finding,) = (found for found in examine_files(traces, []) if found.rule == "straggler")
    assert finding.title == "Rank 1 is the straggler: last at 5 of 5 collectives, the others wait 75.0 ms."
    assert "the work in forward" in finding.next_steps[0]
    assert finding.recovers is not None
    assert (finding.recovers.min, finding.recovers.max) == (75_000_000, 75_000_000)
    assert not out_of_bounds([finding], *(trace.host_ledger for trace in traces))


def test_of_a_late_rank_in_a_run_and_in_its_traces_the_finding_with_more_steps_counts(tmp_path: Path) -> None:
    def waits(rank: int, _: int) -> dict[str, int]:
        late = {"data_wait": 30_000_000} if rank else {"backward": HEALTHY["backward"] + 30_000_000}
        return {**HEALTHY, **late}

    files = []
    for rank in range(2):
        begins = [20_000 * at + (16_000 if rank else 1_000) for at in range(5)]
        meets = [event("user_annotation", GLOO, begin, 20_000 * at + 17_000, 5) for at, begin in enumerate(begins)]
        files.append(report(tmp_path, rank, step(100_000), *meets))
    traces = across_ranks(files)
    run = load_run(make_run(tmp_path / "run", FakeRun(world_size=2, phases=waits)))
    (finding,) = (found for found in examine(Facts.of(run, traces=traces)) if found.rule == "straggler")
    assert finding.numbers["pulse_steps"] > len(traces[0].steps)


def test_communication_is_told_apart_from_waiting(tmp_path: Path) -> None:
    alone, late = on_devices(tmp_path, [100, 500])
    (before,) = (found for found in examine_files([alone], []) if found.rule == "communication_exposed")
    assert before.numbers["share"] == pytest.approx(0.5)
    found = examine_files(across_ranks([alone, late]), [])
    (after,) = (finding for finding in found if finding.rule == "communication_exposed")
    assert after.numbers["share"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("meetings", "has_straggler", "waits"),
    [
        pytest.param(1, False, 63, id="one collective ends the lead of a rank"),
        pytest.param(9, False, 7, id="further ones wait because they are there"),
        pytest.param(9, True, 63, id="for a late rank all of them wait"),
    ],
)
def test_waits_in_several_collectives_of_self_log_are_the_cost_of_logging(
    tmp_path: Path, meetings: int, has_straggler: bool, waits: int
) -> None:
    directory = make_run(tmp_path, FakeRun(world_size=2))
    row = {"kind": "total", "action": "[LightningModule]Net.log", "phase": "other", "in_window": False}
    row |= {"steps": 10, "count": 10 * meetings, "total_ns": 900, "max_ns": 90, "max_step": 3}
    for rank in range(2):
        (directory / f"actions.rank{rank:05d}.jsonl").write_text(json.dumps(row) + "\n")
    lines = (
        TimeLine(part=Part.RANK_WAIT, name="Net.log", ns=63, count=meetings),
        TimeLine(part=Part.SELF_LOG, name="Net.log", ns=27, count=meetings),
    )
    recorded = TimeLedger(step_ns=90, median_ns=90, steps=2, basis="recorded", lines=lines)
    found = log_waits(load_run(directory).ranks, {0: recorded}, has_straggler=has_straggler)
    assert found == {0: pytest.approx(waits), 1: pytest.approx(waits)}
