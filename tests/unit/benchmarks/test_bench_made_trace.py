"""The made-up trace that the growth of an analysis is measured on is a trace, however long it is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_a_made_trace_has_the_size_asked_for_and_every_stretch_is_later_than_the_one_before_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "made_trace.py"), str(path), "8000000"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    size, count = map(int, done.stdout.split())
    assert 8_000_000 <= path.stat().st_size == size < 12_000_000
    events = json.loads(path.read_text())["traceEvents"]
    assert len(events) == count
    kernels = [event for event in events if event["cat"] == "kernel"]
    assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in pairwise(kernels))
    launches = {event["args"]["correlation"] for event in events if event["cat"] == "cuda_runtime"}
    assert launches == {event["args"]["correlation"] for event in kernels}
    assert len(launches) == len(kernels)
    arrows = Counter(event["id"] for event in events if event["cat"] == "ac2g")
    assert set(arrows.values()) == {2}
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    assert all(before["ts"] + before["dur"] < after["ts"] for before, after in pairwise(steps))
