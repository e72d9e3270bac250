from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest

from kineto import write_trace
from lightning_memprof.account.memory.allocations import window_allocations
from lightning_memprof.account.snapshot.replay import replay
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.snapshot.reader import parse_snapshot
from lightning_memprof.report.export.memory_viz import history_of_trace, viewable, write_snapshot
from snapshots import MODEL, block, event, segment, snapshot


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


# What the reader of pytorch.org/memory_viz knows (torch/utils/viz/MemoryViz.js); any other opcode is a blank page.
READABLE = {
    "PROTO", "FRAME", "MEMOIZE", "STOP", "MARK", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "SETITEM", "SETITEMS",
    "APPEND", "APPENDS", "BININT", "BININT1", "BININT2", "LONG1", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT",
    "SHORT_BINUNICODE", "BINUNICODE", "NEWTRUE", "NEWFALSE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "LIST", "DICT",
}  # fmt: skip


def test_a_snapshot_is_written_in_opcodes_that_the_page_reads() -> None:
    ring = [event("alloc", 0x7F0000000000, 1 << 33, MODEL), event("oom", 0, 5, device_free=1)]
    data = snapshot([segment(block(0x7F0000000000, 1 << 33, {**MODEL, "name": "f" * 300}))], ring)
    out = io.BytesIO()
    write_snapshot(viewable(data, "made"), out)
    written = out.getvalue()
    codes = [(code.name, argument) for code, argument, _ in pickletools.genops(written)]
    assert codes[0] == ("PROTO", 4)
    assert {name for name, _ in codes} <= READABLE
    read = pickle.loads(written)  # noqa: S301 written a line above
    assert read["device_traces"] == data["device_traces"]
    assert read["segments"][0]["blocks"] == data["segments"][0]["blocks"]


@pytest.mark.parametrize("form", ["list", "no ring", "2.0"])
def test_old_forms_get_what_the_page_looks_at(form: str) -> None:
    old: Any = {"size": 512, "state": "active_allocated", "history": [{"real_size": 500, "frames": [MODEL]}]}
    rest: Any = {"size": 1536, "state": "inactive"}
    raw = {
        "device": 1,
        "address": 4096,
        "total_size": 2048,
        "stream": 0,
        "segment_type": "small",
        "blocks": [old, rest],
    }
    data: Any = {"list": [raw], "no ring": {"segments": [raw]}, "2.0": {"segments": [raw], "device_traces": [[]]}}[form]
    found = viewable(data, "made")
    assert found["device_traces"] == [[], []]
    (made,) = found["segments"]
    first, second = made["blocks"]
    assert (first["address"], first["requested_size"], first["frames"]) == (4096, 500, [MODEL])
    assert (second["address"], second["requested_size"], second["frames"]) == (4608, 1536, [])
    assert "frames" not in raw


def test_what_is_no_snapshot_is_not_written() -> None:
    with pytest.raises(ArtifactError):
        viewable({"weights": []}, "made")
    with pytest.raises(ArtifactError, match="the first 1024"):
        viewable(snapshot([segment(block(4096, 512), device=10**9)], []), "made")
