"""What the devices of a trace did, over time: each of some hundred stretches, shared among what ran in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from lightning_memprof.analysis.trace.columns import Progress, read_columns
from lightning_memprof.analysis.trace.device import device_events
from lightning_memprof.analysis.trace.intervals import Intervals, difference, intersection, length_before, union
from lightning_memprof.analysis.trace.steps import loading_intervals, step_spans

__all__ = ["STATES", "DeviceTimeline", "device_timeline"]

# What is computed hides what else runs meanwhile; what the device waits for is a batch, or anything else.
STATES: Final = ("compute", "communication", "memory_copy", "idle_loading", "idle")


@dataclass(frozen=True)
class DeviceTimeline:
    """Stretches of one length from the first device event's start to the last one's end.

    Attributes:
        start_ns: Unix time of the first stretch's start.
        stretch_ns: how long each is.
        shares: by state (``STATES``) each stretch's part of its time, 0 to 1; they add up to 1.
        steps: number, start and end of the steps, as parts of stretches: 2.5 is in the middle of the third.
    """

    start_ns: int
    stretch_ns: float
    shares: dict[str, list[float]]
    steps: tuple[tuple[int, float, float], ...]


def device_timeline(path: Path, stretches: int = 400, progress: Progress | None = None) -> DeviceTimeline | None:
    """Read a trace once; None where nothing ran on a device.

    Args:
        path: a Kineto JSON file, plain or gzip-compressed.
        stretches: how many.
        progress: as of :func:`lightning_memprof.analysis.trace.columns.read_columns`.

    Raises:
        ArtifactError: the file is missing, damaged or cut off, or no trace.

    """
    columns = read_columns(path, progress)
    device = device_events(columns)
    if not len(device.busy.starts):
        return None
    start, end = int(device.busy.starts[0]), int(device.busy.ends[-1])
    edges = np.linspace(start, end, stretches + 1)
    whole = (end - start) / stretches
    window = Intervals(np.array([start], np.int64), np.array([end], np.int64))
    idle = difference(window, device.busy)
    loading = intersection(idle, loading_intervals(columns))
    moved = difference(device.communication, device.compute)
    either = _both(device.compute, device.communication)
    parts = {
        "compute": device.compute,
        "communication": moved,
        "memory_copy": difference(device.memory_copy, either),
        "idle_loading": loading,
        "idle": difference(idle, loading),
    }
    moments = np.rint(edges).astype(np.int64)
    widths = np.maximum(1, np.diff(moments))
    shares = {name: (np.diff(length_before(intervals, moments)) / widths).tolist() for name, intervals in parts.items()}
    steps = tuple(
        (step.number, (step.start - start) / whole, (step.end - start) / whole) for step in step_spans(columns)
    )  # fmt: skip
    return DeviceTimeline(columns.origin_ns + start, whole, shares, steps)


def _both(spans: Intervals, other: Intervals) -> Intervals:
    return union(np.concatenate([spans.starts, other.starts]), np.concatenate([spans.ends, other.ends]))
