"""A trace of any size, written as fast as a disk takes it: one stretch of events again and again, each time later.

``made_trace.py FILE BYTES`` writes one. The numbers that change have a fixed width, so that they are changed in place.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any, Final

import merge
import numpy as np

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
    events = [*_steps(), *(_shifted(event) for event in islice(merge.events(0), EVENTS))]
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
        stream.write(b'{\n  "schemaVersion": 1,\n  "baseTimeNanoseconds": %d,\n  "traceEvents": [\n' % merge.BASE_NS)
        again = 0
        while not again or stream.tell() < size:
            view[digits] = (numbers + again * later)[:, None] // powers % 10 + ord("0")
            stream.write(b",\n" * bool(again) + text)
            again += 1
        stream.write(b'\n  ],\n  "traceName": "bench"\n}\n')
        return stream.tell(), again * (EVENTS + STEPS)


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
