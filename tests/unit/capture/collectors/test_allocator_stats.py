from __future__ import annotations

from pathlib import Path

from fake_devices import FakeCuda
from lightning_memprof.capture.collectors.allocator_stats import AllocatorStats
from lightning_memprof.schedule import Schedule
from recorded_rows import read_series
from sessions import context, drive, session


def test_a_cpu_has_no_statistics_and_says_so(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        assert AllocatorStats().unavailable(run) == "no accelerator"


def test_every_mark_has_all_statistics_and_the_device(tmp_path: Path) -> None:
    with FakeCuda().installed() as cuda, context(tmp_path, "cuda:0") as run:
        assert AllocatorStats().unavailable(run) is None
        with session(run, Schedule(), [AllocatorStats()]) as made:
            drive(made, range(6), lambda step: cuda.allocate(100 if step < 3 else -100))
    rows = read_series(tmp_path / "memprofiler/window000/rank00000.allocator.jsonl")
    ends = [row for row in rows if row["point"] == "step_end"]
    assert [row["allocated_bytes.all.current"] for row in ends] == [200, 300, 200]
    assert [row["allocated_bytes.all.peak"] for row in ends] == [200, 300, 300]
    assert len(rows) == 3 * 8
    assert all(row["device"] == "cuda:0" and row["num_ooms"] == 0 for row in rows)


def test_a_pluggable_allocator_has_no_statistics_and_says_so(tmp_path: Path) -> None:
    with FakeCuda().installed() as cuda, context(tmp_path, "cuda:0") as run:
        cuda.backend = "pluggable"
        assert AllocatorStats().unavailable(run) == "a CUDAPluggableAllocator has no statistics"
        cuda.backend = "cudaMallocAsync"
        assert AllocatorStats().unavailable(run) is None
