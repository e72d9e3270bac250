"""Snapshots that https://pytorch.org/memory_viz opens: a plain pickle of protocol 4 with all keys that the page reads.

The page reads some thirty opcodes of protocols 2 to 4, wants a recorded history of each device, and looks for
``frames`` in every event and block. Format: `torch/utils/viz/MemoryViz.js` of torch 2.13.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.snapshot.reader import parse_snapshot
from lightning_memprof.errors import ArtifactError

if TYPE_CHECKING:
    from typing import IO

__all__ = ["PROTOCOL", "viewable", "write_snapshot"]

PROTOCOL: Final = 4
_MOST_DEVICES: Final = 1024


def viewable(data: Any, source: str) -> dict[str, Any]:
    """Return a snapshot with all keys that the page reads; existing ones are unchanged.

    Args:
        data: the dictionary of ``torch.cuda.memory._snapshot()``, or the list of ``torch.cuda.memory_snapshot()``.
        source: where it is from, the first words of every error.

    Raises:
        ArtifactError: it is not a snapshot.

    """
    parse_snapshot(data, source)
    top: dict[str, Any] = {"segments": data} if isinstance(data, list) else dict(data)
    top["segments"] = [_segment(segment) for segment in top["segments"]]
    devices = max((segment.get("device", 0) for segment in top["segments"]), default=-1) + 1
    if devices > _MOST_DEVICES:
        raise ArtifactError(f"{source}: names a device {devices - 1}; the page shows the first {_MOST_DEVICES}")
    histories = [[_with_frames(event) for event in history or ()] for history in top.get("device_traces") or ()]
    top["device_traces"] = [*histories, *([] for _ in range(devices - len(histories)))]
    return top


def _segment(raw: dict[str, Any]) -> dict[str, Any]:
    blocks = []
    address = raw.get("address", 0)
    for entry in raw.get("blocks") or ():
        block = {"address": address, **entry}
        # Torch 2.0 wrote both into the history of a block.
        history = (entry.get("history") or [{}])[0]
        if block.get("frames") is None:
            block["frames"] = history.get("frames") or []
        if block.get("requested_size") is None:
            block["requested_size"] = history.get("real_size", block.get("size", 0))
        blocks.append(block)
        address += block.get("size", 0)
    return _with_frames({"stream": 0, "device": 0, **raw, "blocks": blocks})


def _with_frames(raw: dict[str, Any]) -> dict[str, Any]:
    return raw if raw.get("frames") is not None else {**raw, "frames": []}


def write_snapshot(data: dict[str, Any], out: IO[bytes]) -> None:
    """Write a snapshot as the page reads it."""
    pickle.dump(data, out, protocol=PROTOCOL)
