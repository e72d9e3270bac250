"""What is known of a window's memory, whatever it is known from: live bytes over time, the peak, who holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["DeviceAllocations", "MarkBytes", "Site", "StepBytes", "WindowAllocations", "curve_corners"]

CURVE_POINTS: Final = 400


@dataclass(frozen=True)
class Site:
    """Blocks that are live at the peak and were allocated by the same code.

    `module` is the path of the innermost module; `line` the innermost frame of the user's own code as `file.py(12):
    function`, where the number is that of the function's first line; `stack` all Python frames, innermost first, empty
    where the trace has no stacks; `step` the step that allocated them and `phase` its phase, None outside of one.
    """

    operator: str
    module: str | None
    line: str | None
    stack: tuple[str, ...]
    step: int | None
    phase: str | None
    bytes: int
    blocks: int


@dataclass(frozen=True)
class MarkBytes:
    """Live bytes, above the trace's start, at one point of a step (a value of `schedule.Point`); time in Unix ns."""

    step: int | None
    point: str
    time_ns: int
    live_bytes: int


@dataclass(frozen=True)
class StepBytes:
    """Live bytes, above the trace's start, as a step starts and ends, and the most in between; time in Unix ns."""

    step: int
    start_bytes: int
    peak_bytes: int
    peak_time_ns: int
    end_bytes: int


@dataclass(frozen=True)
class DeviceAllocations:
    """What one trace says about one device's memory.

    Attributes:
        device: `cpu`, `cuda:0`, ...
        start_bytes: allocated as the trace starts, None where torch does not count it (on the host).
        peak_bytes: the most that was live, above the start; `start_bytes + peak_bytes` is the device's own figure.
        peak_time_ns: Unix ns of the first moment at which it was.
        peak_step: the step in which it was, None outside of one.
        sites: who holds blocks at the peak, largest first.
        unattributed_bytes: live at the peak from within the trace, but of no known operator.
        freed_outside_bytes: freed until the peak of what was there before the trace:
            `sum(sites) + unattributed_bytes == peak_bytes + freed_outside_bytes`.
        curve: Unix ns and live bytes above the start, at most 400 points that keep every large maximum and minimum.
        steps: the same by step.
        marks: the same at the points of the steps, in the order of time.
        allocations: blocks allocated in the trace.

    """

    device: str
    start_bytes: int | None
    peak_bytes: int
    peak_time_ns: int
    peak_step: int | None
    sites: tuple[Site, ...]
    unattributed_bytes: int
    freed_outside_bytes: int
    curve: tuple[tuple[int, int], ...]
    steps: tuple[StepBytes, ...]
    marks: tuple[MarkBytes, ...]
    allocations: int


@dataclass(frozen=True)
class WindowAllocations:
    """What a window's trace says about memory; `problem` is why it says nothing, None where it says something."""

    rank: int
    window: int | None
    devices: tuple[DeviceAllocations, ...]
    trace: Path | None = None
    problem: str | None = None


def curve_corners(live: Sequence[int]) -> Sequence[int]:
    """Positions of a curve of at most `CURVE_POINTS`: of as many stretches as fit the lowest and the highest."""
    count = len(live)
    if count <= CURVE_POINTS:
        return range(count)
    stretches = CURVE_POINTS // 2 - 1
    kept = {0, count - 1}
    for n in range(stretches):
        stretch = range(count * n // stretches, count * (n + 1) // stretches)
        kept |= {max(stretch, key=live.__getitem__), min(stretch, key=live.__getitem__)}
    return sorted(kept)
