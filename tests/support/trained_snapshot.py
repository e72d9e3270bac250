"""A snapshot of a small transformer's training, as torch's allocator would have recorded it on a GPU:
``python trained_snapshot.py OUT.pickle``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshots import LINEAR, START_US, block, event, freed, segment, snapshot, unused, write_snapshot

MIB = 1024**2
LAYERS, STEPS = 6, 3
TRAIN = {"filename": "/home/a/train.py", "line": 31, "name": "training_step"}
MAIN = {"filename": "/home/a/train.py", "line": 52, "name": "<module>"}
ATTENTION = {"filename": "/home/a/model.py", "line": 18, "name": "attend"}
FEED_FORWARD = {"filename": "/home/a/model.py", "line": 27, "name": "feed_forward"}
FORWARD = {"filename": "/home/a/model.py", "line": 40, "name": "forward"}
LOSS = {"filename": "/home/a/train.py", "line": 33, "name": "loss"}
NODE = {"filename": "??", "line": 0, "name": "torch::autograd::generated::AddmmBackward0::apply()"}
ADAM = {"filename": "/venv/lib/python3.11/site-packages/torch/optim/adam.py", "line": 168, "name": "_init_group"}
BUILD = {"filename": "/home/a/model.py", "line": 9, "name": "__init__"}


@dataclass
class Device:
    """Blocks beside each other, a freed one's place given out again where the same size is asked for."""

    ring: list[dict[str, Any]] = field(default_factory=list)
    live: dict[int, tuple[int, list[dict[str, Any]]]] = field(default_factory=dict)
    free: dict[int, list[int]] = field(default_factory=dict)
    end: int = 0x7F0000000000

    def alloc(self, size: int, *frames: dict[str, Any]) -> int:
        places = self.free.get(size)
        if places:
            address = places.pop()
        else:
            address, self.end = self.end, self.end + size
        self.live[address] = (size, list(frames))
        self.ring.append(event("alloc", address, size, *frames))
        return address

    def release(self, address: int) -> None:
        size, _ = self.live.pop(address)
        self.free.setdefault(size, []).append(address)
        self.ring += freed(address, size)

    def blocks(self) -> Iterator[dict[str, Any]]:
        """All of them by address; what is free stays reserved."""
        idle = {address: size for size, places in self.free.items() for address in places}
        for address in sorted(self.live.keys() | idle.keys()):
            if address in self.live:
                size, frames = self.live[address]
                yield block(address, size, *frames)
            else:
                yield unused(address, idle[address])


def trained() -> dict[str, Any]:
    """Three steps of six layers under Adam: its state comes with the first step, gradients go at the end of each."""
    device = Device()
    for _ in range(LAYERS):
        device.alloc(12 * MIB, BUILD, MAIN)
    for step in range(STEPS):
        _step(device, first=step == 0)
    for number, entry in enumerate(device.ring):
        entry["time_us"] = START_US + 700 * number
    return snapshot([segment(*device.blocks())], device.ring)


def _step(device: Device, *, first: bool) -> None:
    saved = []
    for _ in range(LAYERS):
        saved.append([device.alloc(size * MIB, ATTENTION, FORWARD, TRAIN, MAIN) for size in (16, 6)])
        work = device.alloc(10 * MIB, LINEAR, FEED_FORWARD, FORWARD, TRAIN, MAIN)
        saved[-1].append(device.alloc(24 * MIB, LINEAR, FEED_FORWARD, FORWARD, TRAIN, MAIN))
        device.release(work)
    logits = device.alloc(40 * MIB, LOSS, FORWARD, TRAIN, MAIN)
    gradients = []
    for kept in reversed(saved):
        work = device.alloc(24 * MIB, NODE)
        gradients.append(device.alloc(12 * MIB, NODE))
        for address in kept:
            device.release(address)
        device.release(work)
    device.release(logits)
    for _ in range(LAYERS if first else 0):
        for _ in ("exp_avg", "exp_avg_sq"):
            device.alloc(12 * MIB, ADAM, MAIN)
    for address in gradients:
        device.release(address)


if __name__ == "__main__":
    write_snapshot(Path(sys.argv[1]), trained())
