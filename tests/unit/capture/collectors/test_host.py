from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from lightning_memprof import Collector, RunContext
from lightning_memprof.artifacts.series import read_series
from lightning_memprof.capture.collectors.host import HostMemory, ResidentSize, peak_rss_bytes
from lightning_memprof.collectors import Window
from lightning_memprof.schedule import Point, Schedule
from lightning_memprof.units import MIB
from sessions import POINTS, context, drive, session
from training import manifest

PEAK = "from lightning_memprof.capture.collectors.host import peak_rss_bytes; print(peak_rss_bytes(0))"


def test_the_resident_size_is_psutils() -> None:
    resident = ResidentSize()
    try:
        # Other threads of this process may allocate between the two readings.
        assert any(
            abs(resident.read() - psutil.Process().memory_info().rss) <= 2 * os.sysconf("SC_PAGE_SIZE")
            for _ in range(20)
        )
    finally:
        resident.close()


def test_the_resident_size_follows_what_is_allocated() -> None:
    resident = ResidentSize()
    before = resident.read()
    # Not from the heap, which may have room.
    with mmap.mmap(-1, 64 * MIB) as held:
        held.write(b"x" * (64 * MIB))
        after = resident.read()
    resident.close()
    assert after - before >= 60 * MIB


def test_without_proc_the_resident_size_is_asked_of_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr("lightning_memprof.capture.collectors.host.os.open", refuse)
    resident = ResidentSize()
    assert resident.read() > MIB
    resident.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not list open files")
def test_closing_releases_the_file_and_twice_is_harmless() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    resident = ResidentSize()
    resident.close()
    resident.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system has no /proc")
def test_the_peak_is_not_that_of_the_process_that_started_this_one() -> None:
    with mmap.mmap(-1, 512 * MIB) as held:
        held.write(b"x" * (512 * MIB))
        told = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout
    assert 0 < int(told) < 256 * MIB


def test_the_peak_never_falls() -> None:
    first = peak_rss_bytes(0)
    held = bytearray(8 * MIB)
    del held
    second = peak_rss_bytes(0)
    assert first is not None
    assert second is not None
    assert second >= first > MIB


def test_every_mark_has_sizes_and_only_the_end_of_the_window_the_unique_one(tmp_path: Path) -> None:
    with context(tmp_path) as run, session(run, Schedule(), [HostMemory()]) as made:
        drive(made, range(6))
    rows = read_series(tmp_path / "memprofiler/window000/rank00000.host.jsonl")
    points = [Point.STEP_START, *POINTS, Point.STEP_END]
    assert [(row["step"], row["point"]) for row in rows] == [(step, point) for step in (1, 2, 3) for point in points]
    for row in rows:
        assert row["peak_rss_bytes"] >= row["rss_bytes"] > MIB
        assert row["vms_bytes"] >= row["rss_bytes"]
        assert (row["uss_bytes"] is not None) == ((row["step"], row["point"]) == (3, "step_end"))
        assert row["recorded"] == (row["step"] > 1)
    assert [row["time_ns"] for row in rows] == sorted(row["time_ns"] for row in rows)


def test_the_unique_size_is_read_while_the_others_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = threading.Event()
    others: list[bool] = []

    class Saving(Collector):
        name: ClassVar[str] = "saving"

        @contextmanager
        def record(self, run: RunContext, window: Window) -> Iterator[None]:
            yield
            saved.set()

    read = psutil.Process.memory_full_info

    def slow(process: psutil.Process) -> Any:
        others.append(saved.wait(5))
        return read(process)

    monkeypatch.setattr(psutil.Process, "memory_full_info", slow)
    with context(tmp_path) as run, session(run, Schedule(), [HostMemory(), Saving()]) as made:
        drive(made, range(6))
    assert others == [True]
    assert read_series(tmp_path / "memprofiler/window000/rank00000.host.jsonl")[-1]["uss_bytes"] > MIB


def test_a_unique_size_that_cannot_be_read_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: psutil.Process) -> Any:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "memory_full_info", refuse)
    with context(tmp_path) as run, session(run, Schedule(), [HostMemory()]) as made:
        drive(made, range(6))
    last = read_series(tmp_path / "memprofiler/window000/rank00000.host.jsonl")[-1]
    assert (last["step"], last["point"], last["uss_bytes"]) == (3, "step_end", None)
    assert last["rss_bytes"] > MIB
    assert [row["collector"] for row in manifest(run.sink.place.directory) if row["kind"] == "error"] == ["host"]
