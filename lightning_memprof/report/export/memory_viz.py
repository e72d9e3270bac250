"""Snapshots that https://pytorch.org/memory_viz opens: a plain pickle of protocol 4 with all keys that the page reads.

The page reads some thirty opcodes of protocols 2 to 4, wants a recorded history of each device, and looks for
``frames`` in every event and block. Formats: `torch/utils/viz/MemoryViz.js` and `torch/csrc/cuda/memory_snapshot.cpp`
of torch 2.13.

An operator trace has blocks but no segments: each contiguous range of addresses that its blocks cover becomes one.
Devices are numbered from 0; the host has the last number.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

from lightning_memprof.account.memory.columns import DeviceMemory, MemoryColumns, Origin, Origins, read_memory
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.snapshot.reader import completed, parse_snapshot

PROTOCOL: Final = 4
_MOST_DEVICES: Final = 1024
_ADDRESS_MASK: Final = (1 << 62) - 1
_NO_FILE: Final = ""
Fields = dict[str, Any]


def viewable(data: Any, source: str) -> Fields:
    """Return a snapshot with all keys that the page reads; existing ones are unchanged.

    Raises:
        ArtifactError: it is not a snapshot.
    """
    parse_snapshot(data, source)
    top: Fields = {"segments": data} if isinstance(data, list) else dict(data)
    top["segments"] = [_with_frames({"stream": 0, "device": 0, **completed(segment)}) for segment in top["segments"]]
    devices = max((segment.get("device", 0) for segment in top["segments"]), default=-1) + 1
    if devices > _MOST_DEVICES:
        raise ArtifactError(f"{source}: names a device {devices - 1}; the page shows the first {_MOST_DEVICES}")
    histories = [[_with_frames(event) for event in history or ()] for history in top.get("device_traces") or ()]
    top["device_traces"] = [*histories, *([] for _ in range(devices - len(histories)))]
    return top


def _with_frames(raw: Fields) -> Fields:
    return raw if raw.get("frames") is not None else {**raw, "frames": []}


def write_snapshot(data: Fields, out: IO[bytes]) -> None:
    """Write a snapshot as the page reads it."""
    pickle.dump(data, out, protocol=PROTOCOL)


def history_of_trace(path: Path) -> Fields:
    """Return the allocations of a trace in the form of ``torch.cuda.memory._snapshot()``.

    Raises:
        ArtifactError: the trace is missing, damaged or truncated, or has no allocations.
    """
    trace = read_memory(path)
    if not trace.devices:
        raise ArtifactError(f"{path}: has no allocations; record it with profile_memory=True")
    traces: list[list[Fields]] = []
    segments: list[Fields] = []
    ordered = sorted(trace.devices.items(), key=lambda pair: (pair[0].is_host, pair[0]))
    for number, (device, memory) in enumerate(ordered):
        events = list(_events(device, memory, trace.origins))
        traces.append(events)
        segments += _segments(number, events)
    return {"segments": segments, "device_traces": traces, "allocator_settings": {}}


def _events(device: DeviceMemory, memory: MemoryColumns, origins: Origins) -> Iterator[Fields]:
    live: dict[int, int] = {}
    frames: dict[Origin, list[Fields]] = {}
    for i, (address, size) in enumerate(zip(memory.address, memory.bytes, strict=True)):
        at = address & _ADDRESS_MASK
        # Host frees of unknown blocks are ignored.
        if not size or (size < 0 and device.is_host and at not in live):
            continue
        time_us = memory.time[i] // 1000
        origin = origins[memory.inner[i]]
        stack = frames.get(origin)
        if stack is None:
            stack = frames[origin] = _frames(origin)
        common: Fields = {"addr": at, "stream": 0, "time_us": time_us, "frames": stack}
        if at in live and size > 0:
            # The block at this address was freed by a thread that is not recorded.
            yield {**common, "action": "free_requested", "size": live[at]}
            yield {**common, "action": "free_completed", "size": live.pop(at)}
        if size > 0:
            live[at] = size
            yield {**common, "action": "alloc", "size": size}
        else:
            count = live.pop(at, -size)
            yield {**common, "action": "free_requested", "size": count}
            yield {**common, "action": "free_completed", "size": count}


def _frames(origin: Origin) -> list[Fields]:
    """Return a stack, innermost first: the operator and the module, which have no file, then the Python frames."""
    names = [name for name in (origin.operator, origin.module) if name]
    return [
        *({"name": name, "filename": _NO_FILE, "line": 0} for name in names),
        *({"name": frame.name, "filename": frame.filename, "line": frame.line} for frame in origin.stack),
    ]


def _segments(device: int, events: Sequence[Fields]) -> Iterator[Fields]:
    """Yield a segment for each contiguous range of addresses that blocks cover, with the blocks live at the end."""
    live: dict[int, Fields] = {}
    covered: dict[int, int] = {}
    for event in events:
        covered[event["addr"]] = max(covered.get(event["addr"], 0), event["size"])
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    start = end = 0
    inside: list[int] = []
    for address in sorted(covered):
        if inside and address >= end:
            yield _segment(device, start, end, inside, live)
            inside = []
        if not inside:
            start, end = address, address
        end = max(end, address + covered[address])
        inside.append(address)
    if inside:
        yield _segment(device, start, end, inside, live)


def _segment(device: int, start: int, end: int, addresses: Sequence[int], live: dict[int, Fields]) -> Fields:
    blocks: list[Fields] = []
    at = start
    allocated = 0
    for address in addresses:
        event = live.get(address)
        if event is None or address < at:
            continue
        if address > at:
            blocks.append(_block(at, address - at, [], is_free=True))
        blocks.append(_block(address, event["size"], event["frames"], is_free=False))
        allocated += event["size"]
        at = address + event["size"]
    if at < end:
        blocks.append(_block(at, end - at, [], is_free=True))
    return {
        "device": device,
        "address": start,
        "total_size": max(at, end) - start,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": allocated,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, size: int, frames: list[Fields], *, is_free: bool) -> Fields:
    return {
        "address": address,
        "size": size,
        "requested_size": 0 if is_free else size,
        "state": "inactive" if is_free else "active_allocated",
        "frames": frames,
    }
