from __future__ import annotations

from pathlib import Path

import pytest

from kineto import write_trace
from lightning_memprof.account.memory.allocations import window_allocations
from lightning_memprof.account.snapshot.replay import replay
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.snapshot.reader import parse_snapshot
from lightning_memprof.report.export.memory_viz import history_of_trace


def operator(name: str, ts: float, dur: float) -> dict[str, object]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": {}}


def memory(ts: float, address: int, size: int, device: int = 0) -> dict[str, object]:
    args = {"Device Type": device, "Device Id": -1 if not device else 0, "Addr": address, "Bytes": size}
    own = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": ts}
    return {**own, "args": {**args, "Total Allocated": 0}}


def test_a_trace_becomes_a_snapshot_with_the_trace_s_own_peak_and_holders(tmp_path: Path) -> None:
    events = [
        operator("aten::mm", 0, 100),
        memory(10, 4096, 1000),
        memory(20, 8192, 500),
        operator("aten::add", 200, 100),
        memory(210, 4096, -1000),
        memory(220, 4096, 300),
        memory(230, 9999, -5),
    ]
    path = write_trace(tmp_path / "a.pt.trace.json", events)
    (device,) = window_allocations(path)
    snapshot = parse_snapshot(history_of_trace(path), "made")
    ring = replay(snapshot)
    assert ring.peak_requested_bytes == device.peak_bytes == 1500
    assert ring.live_at(ring.events - 1).requested_bytes == 800
    assert {holder.stack or holder.site: holder.bytes for holder in ring.holders_at_peak}
    # The host's free of a block that is not the trace's is left out.
    assert [event.action for event in snapshot.devices[0].events] == [
        "alloc", "alloc", "free_requested", "free_completed", "alloc",
    ]  # fmt: skip


def test_a_block_whose_free_was_not_seen_is_freed_before_its_place_is_used_again(tmp_path: Path) -> None:
    events = [operator("aten::mm", 0, 100), memory(10, 4096, 1000), memory(20, 4096, 300)]
    ring = replay(parse_snapshot(history_of_trace(write_trace(tmp_path / "a.pt.trace.json", events)), "made"))
    assert (ring.peak_requested_bytes, ring.live_at(ring.events - 1).requested_bytes) == (1000, 300)


def test_devices_come_before_the_host_so_that_their_numbers_are_torch_s(tmp_path: Path) -> None:
    events = [operator("aten::mm", 0, 100), memory(10, 4096, 1000), memory(20, 8192, 500, device=1)]
    history = history_of_trace(write_trace(tmp_path / "a.pt.trace.json", events))
    assert [[event["size"] for event in ring] for ring in history["device_traces"]] == [[500], [1000]]
    assert [segment["device"] for segment in history["segments"]] == [0, 1]


def test_blocks_lie_in_segments_that_cover_them_and_no_more(tmp_path: Path) -> None:
    events = [
        operator("aten::mm", 0, 100),
        memory(1, 1000, 100),
        memory(2, 1100, 50),
        memory(3, 5000, 10),
        memory(4, 1000, -100),
    ]
    history = history_of_trace(write_trace(tmp_path / "a.pt.trace.json", events))
    laid = [
        (segment["address"], segment["total_size"], [b["state"] for b in segment["blocks"]])
        for segment in history["segments"]
    ]
    assert laid == [
        (1000, 100, ["inactive"]),
        (1100, 50, ["active_allocated"]),
        (5000, 10, ["active_allocated"]),
    ]


def test_a_trace_without_allocations_says_how_to_record_them(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.pt.trace.json", [operator("aten::mm", 0, 100)])
    with pytest.raises(ArtifactError, match="profile_memory=True"):
        history_of_trace(path)
