"""What a program may call while it is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_memprof import MemProfilerCallback, record
from lightning_memprof.artifacts.naming import regions_name
from lightning_memprof.collectors import Pulse
from plain_loops import QUIET, batches, seeded


def test_snapshots_and_regions_have_the_step_in_which_they_are(tmp_path: Path) -> None:
    model = seeded()
    with record(model, dirpath=tmp_path, collectors=[Pulse()], output=QUIET) as recording:
        recording.snapshot("before")
        for batch in recording.steps(batches()):
            with recording.region("rollout"):
                model(batch)
    rows = [json.loads(line) for line in (tmp_path / "memprofiler" / regions_name(0)).read_text().splitlines()]
    assert [(row["name"], row["point"], row["step"]) for row in rows[:3]] == [
        ("before", "snapshot", None), ("rollout", "start", 0), ("rollout", "end", 0),
    ]  # fmt: skip
    assert all(row["rss_bytes"] > 0 for row in rows)


def test_a_trigger_opens_a_window_at_the_next_step(tmp_path: Path) -> None:
    model = seeded()
    with record(model, dirpath=tmp_path, output=QUIET, schedule={"wait": 90}) as recording:
        for number, batch in enumerate(recording.steps(batches())):
            model(batch)
            if number == 1:
                recording.trigger(active=2)
    rows = [json.loads(line) for line in (tmp_path / "memprofiler/manifest.rank00000.jsonl").read_text().splitlines()]
    assert [row["steps"] for row in rows if row["kind"] == "window" and row["event"] == "close"] == [[3, 4]]


def test_without_a_run_a_trigger_says_so(caplog: pytest.LogCaptureFixture) -> None:
    MemProfilerCallback().trigger()
    assert "no run is being recorded" in caplog.text


def test_who_holds_an_object_is_found(tmp_path: Path) -> None:
    model = seeded()
    batch = torch.ones(3)
    model.register_buffer("kept", batch)
    with record(model, dirpath=tmp_path, collectors=[Pulse()], output=QUIET) as recording:
        assert any("kept" in holder for holder in recording.holders(batch))
