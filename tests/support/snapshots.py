"""Snapshots of the CUDA allocator as torch writes them, made by hand."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from lightning_memprof.account.snapshot.report import snapshot_report
from lightning_memprof.judge import Finding, examine_files

MODEL = {"filename": "/home/a/model.py", "line": 7, "name": "forward"}
TRAIN = {"filename": "/home/a/train.py", "line": 3, "name": "<module>"}
LINEAR = {"filename": "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", "line": 130, "name": "forward"}
EMPTY_CACHE = {"filename": "/venv/lib/python3.11/site-packages/torch/cuda/memory.py", "line": 2, "name": "empty_cache"}
MODEL_LINE = "/home/a/model.py(7): forward"
TRAIN_LINE = "/home/a/train.py(3): <module>"
START_US = 1_700_000_000_000_000


def event(action: str, addr: int, size: int, *frames: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """An entry of the ring."""
    return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": list(frames), **fields}


def freed(addr: int, size: int) -> list[dict[str, Any]]:
    """Both entries of a free that waits for no stream."""
    return [event("free_requested", addr, size), event("free_completed", addr, size)]


def failed(size: int, device_free: int) -> dict[str, Any]:
    """The entry of a request that could not be had."""
    return {"action": "oom", "size": size, "stream": 0, "device_free": device_free, "frames": [TRAIN]}


def block(address: int, size: int, *frames: dict[str, Any], state: str = "active_allocated") -> dict[str, Any]:
    """A block that got what it asked for."""
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": list(frames)}


def unused(address: int, size: int) -> dict[str, Any]:
    """A block in no use."""
    return block(address, size, state="inactive")


def segment(*blocks: dict[str, Any], device: int = 0, **fields: Any) -> dict[str, Any]:
    """A segment of the blocks that tile it."""
    size = sum(block["size"] for block in blocks)
    allocated = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    own = {"device": device, "address": blocks[0]["address"], "total_size": size, "allocated_size": allocated}
    return {**own, "stream": 0, "segment_type": "large", "blocks": list(blocks), **fields}


def snapshot(
    segments: list[Any], *rings: list[dict[str, Any]], is_timed: bool = True, conf: str = ""
) -> dict[str, Any]:
    """A snapshot with one ring for each device, an event each millisecond."""
    for ring in rings if is_timed else ():
        for number, entry in enumerate(ring):
            entry.setdefault("time_us", START_US + 1000 * number)
    return {
        "segments": segments,
        "device_traces": list(rings),
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": conf},
        "external_annotations": [],
    }


def write_snapshot(path: Path, data: Any) -> Path:
    """Write a snapshot as torch's own dump does."""
    path.write_bytes(pickle.dumps(data, 4))
    return path


def frame(filename: str, name: str, line: int = 1) -> dict[str, Any]:
    """A frame of a stack."""
    return {"filename": filename, "line": line, "name": name}


class History:
    """A recorded history, allocation by allocation; no address is used twice."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._blocks: dict[int, dict[str, Any]] = {}
        self._end = 0

    def allocate(self, size: int, *frames: dict[str, Any]) -> int:
        """Allocate bytes from a stack, innermost frame first; return the address."""
        address, self._end = self._end, self._end + size
        self.events.append(event("alloc", address, size, *frames))
        self._blocks[address] = block(address, size, *frames)
        return address

    def free(self, *addresses: int) -> None:
        """Free blocks."""
        for address in addresses:
            size = self._blocks[address]["size"]
            self.events += freed(address, size)
            self._blocks[address] = unused(address, size)

    def data(self, since: int = 0, conf: str = "") -> dict[str, Any]:
        """Return the snapshot of now, with the events from a number on."""
        return snapshot([segment(*self._blocks.values())], self.events[since:], conf=conf)


def found(directory: Path, data: Any) -> dict[str, Finding]:
    path = write_snapshot(directory / "cuda_alloc_rank_3.training_step.4.end.pickle", data)
    return {finding.rule: finding for finding in examine_files((), [snapshot_report(path)])}
