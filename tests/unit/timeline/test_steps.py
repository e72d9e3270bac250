from __future__ import annotations

import json

import pytest

from kineto import write_trace
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.trace.text import TraceText
from lightning_memprof.timeline.merge import merge_traces
from lightning_memprof.timeline.sources import file_sources
from lightning_memprof.timeline.steps import steps_of, steps_span

BASE = 1_750_000_000_000_000_000


def op(name, ts, dur, **more):
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": 8, "ts": ts, "dur": dur, **more}


def test_a_slice_holds_its_steps_and_clips_what_reaches_over(tmp_path):
    steps = [{**op(f"ProfilerStep#{n}", n * 100, 90), "cat": "user_annotation"} for n in range(5)]
    kernel = {**op("ProfilerStep#3", 320, 80, pid=0, tid=7), "cat": "gpu_user_annotation"}
    path = write_trace(
        tmp_path / "t.json.gz", [op("fit", 0, 500), *steps, kernel, op("in", 210, 5), op("out", 110, 5)],
        baseTimeNanoseconds=BASE,
    )  # fmt: skip
    assert steps_span(path, [3]) == (300_000, 400_000)
    out = tmp_path / "slice.json"
    merge_traces(file_sources([path], [0], [2, 3]), out)
    found = json.loads(out.read_text())
    assert {(event["name"], event["ts"], event["dur"]) for event in found["traceEvents"] if event["ph"] == "X"} == {
        ("fit", 0, 200), ("ProfilerStep#2", 0, 90), ("ProfilerStep#3", 100, 90), ("ProfilerStep#3", 120, 80),
        ("in", 10, 5),
    }  # fmt: skip
    assert found["baseTimeNanoseconds"] == BASE + 200_000
    with pytest.raises(ArtifactError, match="no step 9; its steps are 0 to 4"):
        steps_span(path, [9])


def test_a_step_at_a_time_that_no_clock_has_is_no_step(tmp_path):
    events = [op("ProfilerStep#2", 1, 2), op("ProfilerStep#3", 9.9e307, 1), op("ProfilerStep#" + "9" * 5000, 1, 1)]
    assert [step for step, *_ in steps_of(TraceText(write_trace(tmp_path / "a.json", events)))] == [2]
