"""A trace of any size, written as fast as a disk takes it: one stretch of events again and again, each time later.

``made_trace.py FILE BYTES`` writes one. The numbers that change have a fixed width, so that they are changed in place.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

BASE_NS: Final = 1_750_000_000_000_000_000
EVENTS: Final = 14_000
# Microseconds and numbers of launches by which a stretch is later than the one before it.
LATER_US: Final = EVENTS // 7 * 101
STEPS: Final = 20
# Wide enough for 10 GB; JSON allows no leading zeros, so both begin at a number of that width.
WIDTH: Final = 12
FIRST: Final = 10 ** (WIDTH - 1)
NUMBERS: Final = re.compile(rb'"(ts|correlation|id)": (\d{12})')
LATER: Final = {b"ts": LATER_US, b"correlation": EVENTS, b"id": EVENTS}


def stretch() -> tuple[bytearray, Any, Any, Any]:
    """Give a stretch's text, where its numbers stand, the numbers, and how much later each is the next time."""
    events = [*_steps(), *(_shifted(event) for event in islice(_launches(), EVENTS))]
    text = ",\n".join(json.dumps(event) for event in events).encode()
    found = list(NUMBERS.finditer(text))
    places = np.array([match.start(2) for match in found])
    numbers = np.array([int(match[2]) for match in found])
    later = np.array([LATER[match[1]] for match in found])
    return bytearray(text), places, numbers, later


def write(path: Path, size: int) -> tuple[int, int]:
    """Write a trace of at least ``size`` bytes; give its size and how many events it has."""
    text, places, numbers, later = stretch()
    digits = places[:, None] + np.arange(WIDTH)
    powers = 10 ** np.arange(WIDTH - 1, -1, -1)
    view = np.frombuffer(text, dtype=np.uint8)
    with path.open("wb") as stream:
        stream.write(b'{\n  "schemaVersion": 1,\n  "baseTimeNanoseconds": %d,\n  "traceEvents": [\n' % BASE_NS)
        again = 0
        while not again or stream.tell() < size:
            view[digits] = (numbers + again * later)[:, None] // powers % 10 + ord("0")
            stream.write(b",\n" * bool(again) + text)
            again += 1
        stream.write(b'\n  ],\n  "traceName": "bench"\n}\n')
        return stream.tell(), again * (EVENTS + STEPS)


def _launches() -> Iterator[dict[str, Any]]:
    """A GPU training as torch writes it, without an end: frames, operators with shapes, launches, kernels, arrows."""
    at = 0.0
    number = 0
    base = {"ph": "X", "pid": 4000, "tid": 4000}
    while True:
        number += 1
        shapes = {"External id": number, "Record function id": 0, "Ev Idx": number, "Concrete Inputs": ["", "", ""]}
        shapes |= {"Input Dims": [[64, 512], [512, 2048], []], "Input type": ["float", "float", "Scalar"]}
        frame = {"Python parent id": number - 1, "Python id": number, "Ev Idx": number}
        yield {**base, "cat": "python_function", "name": "torch/nn/modules/linear.py(124): forward", "ts": at,
               "dur": 91.127, "args": frame}  # fmt: skip
        yield {**base, "cat": "cpu_op", "name": "aten::linear", "ts": at + 2.25, "dur": 80.5, "args": shapes}
        yield {**base, "cat": "cpu_op", "name": "aten::addmm", "ts": at + 9.125, "dur": 70.031, "args": shapes}
        launch = {"External id": number, "cbid": 211, "correlation": number}
        yield {**base, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at + 40, "dur": 6.2, "args": launch}
        arrow = {"id": number, "cat": "ac2g", "name": "ac2g"}
        yield {"ph": "s", **arrow, "pid": 4000, "tid": 4000, "ts": at + 40}
        kernel = {"External id": number, "correlation": number, "stream": 7, "grid": [16, 32, 1], "block": [128, 1, 1],
                  "registers per thread": 128, "shared memory": 49152, "est. achieved occupancy %": 37}  # fmt: skip
        yield {"ph": "X", "cat": "kernel", "name": "ampere_sgemm_128x64_tn", "pid": 0, "tid": 7, "ts": at + 60,
               "dur": 95.008, "args": kernel}  # fmt: skip
        yield {"ph": "f", **arrow, "bp": "e", "pid": 0, "tid": 7, "ts": at + 60}
        at = round(at + 100.137, 3)


def _shifted(event: dict[str, Any]) -> dict[str, Any]:
    event = {**event, "ts": FIRST + round(event["ts"])}
    if "correlation" in event.get("args", {}):
        event["args"] = {**event["args"], "correlation": FIRST + event["args"]["correlation"]}
    if "id" in event:
        event["id"] += FIRST
    return event


def _steps() -> list[dict[str, Any]]:
    span = LATER_US // STEPS
    return [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 4000, "tid": 4000,
         "ts": FIRST + step * span, "dur": span - 20, "args": {}}
        for step in range(STEPS)
    ]  # fmt: skip


if __name__ == "__main__":
    print(*write(Path(sys.argv[1]), int(sys.argv[2])))
