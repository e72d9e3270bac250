from __future__ import annotations

import json
from pathlib import Path

import pytest

from fake_devices import FakeCuda
from lightning_memprof.artifacts.naming import regions_name
from lightning_memprof.capture.base import Position
from lightning_memprof.capture.named_snapshots import NamedSnapshots


def test_rows_taken_before_a_directory_is_known_are_written_when_it_is(tmp_path: Path) -> None:
    named = NamedSnapshots()
    named.take("model built", "snapshot", None)
    named.take("epoch", "start", Position(7, 3, 0, 7))
    assert list(tmp_path.iterdir()) == []
    named.place(tmp_path, 2)
    named.take("epoch", "end", Position(9, 4, 0, 9))
    rows = [json.loads(line) for line in (tmp_path / regions_name(2)).read_text().splitlines()]
    assert [(row["name"], row["point"], row["step"], row["global_step"]) for row in rows] == [
        ("model built", "snapshot", None, None),
        ("epoch", "start", 7, 3),
        ("epoch", "end", 9, 4),
    ]
    assert [row["time_ns"] for row in rows] == sorted(row["time_ns"] for row in rows)
    for row in rows:
        assert row["peak_rss_bytes"] > 0
        assert row["rss_bytes"] > 2**20
        assert "allocated_bytes.all.current" not in row


def test_where_there_is_cuda_a_row_has_the_allocators_statistics(tmp_path: Path) -> None:
    with FakeCuda().installed() as cuda:
        cuda.allocate(512)
        named = NamedSnapshots()
        named.place(tmp_path, 0)
        named.take("x", "snapshot", None)
    (row,) = [json.loads(line) for line in (tmp_path / regions_name(0)).read_text().splitlines()]
    assert row["allocated_bytes.all.current"] == 512


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = NamedSnapshots()
    named.place(tmp_path / "gone", 0)
    named.take("x", "snapshot", None)
    assert "named snapshots cannot be written" in caplog.text


def test_each_run_gets_the_rows_of_its_own_time(tmp_path: Path) -> None:
    named = NamedSnapshots()
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        named.place(tmp_path / run, 0)
        named.take(run, "snapshot", None)
        (line,) = (tmp_path / run / regions_name(0)).read_text().splitlines()
        assert json.loads(line)["name"] == run
