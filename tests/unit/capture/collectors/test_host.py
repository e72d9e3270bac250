from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from lightning_memprof import Collector, RunContext
from lightning_memprof.artifacts.series import read_series
from lightning_memprof.capture.collectors.host import HostMemory
from lightning_memprof.collectors import Window
from lightning_memprof.schedule import Point, Schedule
from lightning_memprof.units import MIB
from sessions import POINTS, context, drive, session
from training import manifest

PEAK = "from lightning_memprof.capture.collectors.host import peak_rss_bytes; print(peak_rss_bytes(0))"


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
