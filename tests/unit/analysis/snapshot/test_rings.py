from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_runs import make_run
from lightning_memprof.analysis.memory.allocations import run_allocations
from lightning_memprof.analysis.run.load import Artifact, Run, load_run
from lightning_memprof.analysis.snapshot.reader import parse_snapshot
from lightning_memprof.analysis.snapshot.replay import replay
from lightning_memprof.analysis.snapshot.rings import ring_of

MODEL = [{"filename": "/home/a/model.py", "line": 7, "name": "forward"}]
NODE = [{"filename": "??", "line": 0, "name": "torch::autograd::generated::MmBackward0::apply(int)"}]


def event(
    action: str, addr: int, size: int, time_us: int, frames: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": time_us, "frames": frames or []}


def ring(start_us: int = 0) -> dict[str, Any]:
    """1000 bytes are there before, and are freed; the peak comes with the third allocation, of 2100 bytes."""
    events = [
        event("alloc", 8192, 700, 10, MODEL),
        event("free_requested", 4096, 1000, 20),
        event("free_completed", 4096, 1000, 20),
        event("alloc", 4096, 1300, 30, NODE),
        event("alloc", 16384, 100, 40),
        event("free_requested", 4096, 1300, 50),
        event("free_completed", 4096, 1300, 50),
    ]
    blocks = [
        {"address": 8192, "size": 1024, "requested_size": 700, "state": "active_allocated", "frames": MODEL},
        {"address": 16384, "size": 512, "requested_size": 100, "state": "active_allocated", "frames": []},
    ]
    segment = {"device": 0, "address": 0, "total_size": 32768, "stream": 0, "blocks": blocks}
    timed = [{**event, "time_us": event["time_us"] + start_us} for event in events]
    return {"segments": [segment], "device_traces": [timed]}


def test_a_ring_says_what_was_allocated_in_it_above_what_was_there_before():
    found = ring_of(replay(parse_snapshot(ring(), "it")), [(5_000, 25_000, 2), (26_000, 45_000, 3)])
    assert (found.device, found.start_bytes, found.peak_bytes) == ("cuda:0", 1000, 1100)
    assert (found.peak_time_ns, found.peak_step, found.allocations) == (40_000, 3, 3)
    assert [(site.operator, site.line, site.step, site.bytes) for site in found.sites] == [
        ("MmBackward0", None, 3, 1300),
        ("alloc", "/home/a/model.py(7): forward", 2, 700),
    ]
    assert (found.unattributed_bytes, found.freed_outside_bytes) == (100, 1000)
    held = sum(site.bytes for site in found.sites) + found.unattributed_bytes
    assert held == found.peak_bytes + found.freed_outside_bytes
    assert [live for _, live in found.curve] == [700, 700, -300, 1000, 1100, 1100, -200]


def test_steps_that_the_ring_holds_whole_have_their_peaks():
    found = ring_of(
        replay(parse_snapshot(ring(), "it")), [(5_000, 25_000, 2), (26_000, 45_000, 3), (46_000, 99_000, 4)]
    )
    (step,) = found.steps
    assert (step.step, step.start_bytes, step.peak_bytes, step.peak_time_ns, step.end_bytes) == (
        3, -300, 1100, 40_000, 1100,
    )  # fmt: skip


def run_with(directory: Path, content: bytes) -> Run:
    run = load_run(make_run(directory))
    path = run.directory / "cuda_alloc_rank_0.training_step.3.end.pickle"
    path.write_bytes(content)
    artifact = Artifact(0, "allocator_history", "snapshot", path.name, path, 0, len(content))
    others = tuple(artifact for artifact in run.artifacts if artifact.type != "trace")
    return replace(run, artifacts=(*others, artifact))


def test_the_snapshot_of_a_window_stands_in_for_a_trace_that_says_nothing_of_cuda(tmp_path):
    directory = make_run(tmp_path)
    (rank,) = load_run(directory).ranks
    start_ns = rank.pulse[2]["start_ns"]
    assert start_ns is not None
    (window,) = run_allocations(run_with(tmp_path / "other", pickle.dumps(ring(start_ns // 1000), 4)))
    (device,) = window.devices
    assert (window.rank, window.window, window.problem) == (0, 0, None)
    assert (device.peak_bytes, device.peak_step) == (1100, 2)


@pytest.mark.parametrize(
    ("data", "words"),
    [([], "no events"), ({"segments": [], "device_traces": [[]]}, "no events"), (3, "the snapshot is 3")],
)
def test_a_snapshot_that_says_nothing_is_a_problem_of_its_window(tmp_path, data, words):
    (window,) = run_allocations(run_with(tmp_path, pickle.dumps(data, 4)))
    assert window.devices == ()
    assert words in (window.problem or "")
