from __future__ import annotations

from pathlib import Path

import pytest

from device_traces import NCCL, Recording, paired_ranks
from fake_runs import FakeRun, make_run
from findings import found_in_run, recovery
from lightning_memprof.account.ledger.ranks import across_ranks
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Finding, Severity, examine_files
from lightning_memprof.units import GIB, MIB


def ranks(directory: Path, late: int | None, offset_us: int = 0) -> list[Path]:
    """Traces of 8 ranks with 8 all-reduces; before 5 of them rank ``late`` computes for 1.5 ms longer."""
    paths = []
    for rank in range(8):
        made = Recording()
        made.now += rank * offset_us
        with made.inside("ProfilerStep#3"):
            for index in range(8):
                arrives = index * 4_000 + 2_000 + rank * offset_us + 10 * (rank == index)
                ends = index * 4_000 + 2_100 + rank * offset_us
                if late is not None and index < 5:
                    arrives, ends = arrives + 1_500 * (rank == late), ends + 1_500
                made.launch(arrives - 500 - index * 4_000 - rank * offset_us, at=index * 4_000 + 500 + rank * offset_us)
                made.launch(ends - arrives, NCCL, 21, arrives)
            made.now += 33_000
        info = {"backend": "nccl", "rank": rank, "world_size": 8}
        paths.append(made.write(directory / f"rank{rank}.pt.trace.json", distributedInfo=info))
    return paths


@pytest.mark.parametrize("offset_us", [0, 700_000])
def test_the_rank_that_arrives_last_in_bare_traces_is_the_straggler(tmp_path: Path, offset_us: int) -> None:
    reports = [trace_report(path) for path in ranks(tmp_path, late=3, offset_us=offset_us)]
    finding = examine_files(reports, [])[0]
    assert finding.rule == "straggler"
    assert finding.title.startswith("Rank 3 is the straggler: last at 5 of 8 collectives, the others wait 7.5")
    assert finding.numbers["own_wait_ns"] < 100_000
    assert "clock rate" in finding.next_steps[0]
    assert "lightning-memprof merge -o merged.json.gz " in finding.next_steps[1]


def test_a_rank_that_makes_its_partner_in_tensor_parallelism_late_is_the_straggler(tmp_path: Path) -> None:
    reports = []
    for rank, calls in paired_ranks(lambda rank, step: 20.0 if rank == 5 else 10.0).items():
        made = Recording()
        for before, call in zip([made.now, *(call.end_us for call in calls)], calls, strict=False):
            if call.start_us > before:
                made.launch(call.start_us - before, at=before)
            made.launch(call.end_us - call.start_us, NCCL, 21, call.start_us)
            made.events[-1]["args"] |= {"Collective name": "allreduce", "Process Group Name": call.group}
        info = {"backend": "nccl", "rank": rank, "world_size": 8}
        path = made.write(tmp_path / f"rank{rank}.pt.trace.json", distributedInfo=info)
        reports.append(trace_report(path))
    finding = next(finding for finding in across(reports) if finding.rule == "straggler")
    # At six of its own pair; its partner and it are last at the six of each half.
    assert finding.title.startswith("Rank 5 is the straggler: last at 12 of 36 collectives")


@pytest.mark.parametrize(
    ("late_us", "is_found"),
    [
        ([(0, 5_000)] * 6, True),  # rank 1 in each step
        ([(0, 6_000), (5_000, 0)] * 3, False),  # one after the other
        ([(0, 0), (0, 30_000), *[(0, 0)] * 4], False),  # once
    ],
)
def test_equal_ranks_that_take_turns_and_a_hiccup_have_no_straggler(
    tmp_path: Path, late_us: list[tuple[int, int]], *, is_found: bool
) -> None:
    reports = []
    for rank in range(2):
        made = Recording()
        for step, late in enumerate(late_us):
            with made.inside(f"ProfilerStep#{step}"):
                made.launch(5_000 + late[rank])
                made.launch(max(late) - late[rank] + 1_000, NCCL, 21, made.free)
                made.free = made.now = made.free + max(late) - late[rank] + 1_000
        info = {"backend": "nccl", "rank": rank, "world_size": 2}
        path = made.write(tmp_path / f"rank{rank}.pt.trace.json", distributedInfo=info)
        reports.append(trace_report(path))
    found = {finding.rule: finding for finding in across(reports)}
    assert ("straggler" in found) == is_found
    if is_found:
        worth = recovery(found["straggler"])
        assert (worth.min, worth.max) == (5_000_000, 5_000_000)


def across(reports: list[TraceReport]) -> tuple[Finding, ...]:
    return examine_files(across_ranks(reports), [])


def set_peak(directory: Path, rank: int, size: int, column: str = "device_peak_bytes") -> None:
    pulse = directory / f"pulse.rank{rank:05d}.csv"
    header, *lines = pulse.read_text().splitlines()
    index = header.split(",").index(column)
    rows = [line.split(",") for line in lines]
    for row in rows:
        row[index] = str(size)
    pulse.write_text("\n".join([header, *map(",".join, rows)]) + "\n")


@pytest.mark.parametrize(
    ("size", "severity"), [(GIB + 400 * MIB, Severity.WARNING), (3 * GIB, Severity.CRITICAL), (GIB + 100 * MIB, None)]
)
def test_a_device_that_is_fuller_than_the_others_is_named(tmp_path: Path, size: int, severity: Severity | None) -> None:
    directory = make_run(tmp_path, FakeRun(world_size=4, device_bytes=lambda _: GIB))
    set_peak(directory, 2, size)
    finding = found_in_run(directory).get("memory_imbalance")
    assert (finding.severity if finding else None) is severity
    if finding is not None:
        assert finding.numbers["rank"] == 2
        assert "on its device" in finding.title


@pytest.mark.parametrize(("more", "is_found"), [(0.31, True), (0.2, False)])
def test_without_a_device_a_rank_that_needs_more_of_the_host_is_named(
    tmp_path: Path, more: float, is_found: bool
) -> None:
    directory = make_run(tmp_path, FakeRun(world_size=2, rss_bytes=lambda _: 2 * GIB))
    set_peak(directory, 0, round((1 + more) * 2 * GIB), "rss_bytes")
    finding = found_in_run(directory).get("memory_imbalance")
    assert (finding is not None and "Rank 0 peaks at 2.62 GiB on the host" in finding.title) == is_found
