"""Allocations of a window, from a trace or a snapshot: live bytes over time, the peak, and its allocation sites."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

CURVE_POINTS: Final = 400


class Site(msgspec.Struct, frozen=True):
    """Blocks live at the peak with the same allocation site.

    Attributes:
        operator: innermost operator.
        module: path of the innermost module; None outside modules.
        line: innermost frame of the user's code as `file.py(12): function`, with the first line of the function.
        stack: all Python frames, innermost first; empty if the trace has no stacks.
        step: step of the allocation; None outside steps.
        phase: phase of the allocation; None outside phases.
        bytes: size of all blocks.
        blocks: count of blocks.
    """

    operator: str
    module: str | None
    line: str | None
    stack: tuple[str, ...]
    step: int | None
    phase: str | None
    bytes: int
    blocks: int


class MarkBytes(msgspec.Struct, frozen=True):
    """Live bytes relative to the start of the window, at one point of a step (`schedule.Point`); time in Unix ns."""

    step: int | None
    point: str
    time_ns: int
    live_bytes: int


class StepBytes(msgspec.Struct, frozen=True):
    """Live bytes relative to the start of the window, at the start, peak and end of a step; time in Unix ns."""

    step: int
    start_bytes: int
    peak_bytes: int
    peak_time_ns: int
    end_bytes: int


class DeviceAllocations(msgspec.Struct, frozen=True):
    """Allocations of one device in one window.

    Attributes:
        device: `cpu`, `cuda:0`, ...
        start_bytes: allocated bytes at the start; None where torch does not count them (on the host).
        peak_bytes: maximum of the live bytes relative to the start; `start_bytes + peak_bytes` is absolute.
        peak_time_ns: Unix ns of the first time at the peak.
        peak_step: step of the peak; None outside steps.
        sites: allocation sites of the bytes live at the peak, largest first.
        unattributed_bytes: live at the peak, allocated in the window by no known operator.
        freed_outside_bytes: freed before the peak, allocated before the window:
            `sum(sites) + unattributed_bytes == peak_bytes + freed_outside_bytes`.
        curve: Unix ns and live bytes relative to the start; at most 400 points with every large maximum and minimum.
        steps: live bytes by step.
        marks: live bytes at the points of the steps, by time.
        allocations: count of blocks allocated in the window.
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


class WindowAllocations(msgspec.Struct, frozen=True):
    """Allocations of one window by device; `problem` is the reason why there are none.

    `trace` is the file they were read from: an operator trace or an allocator snapshot.
    """

    rank: int
    window: int | None
    devices: tuple[DeviceAllocations, ...]
    trace: Path | None = None
    problem: str | None = None


def curve_corners(live: Sequence[int]) -> Sequence[int]:
    """Return at most `CURVE_POINTS` positions of a curve: its ends, and the minimum and maximum of equal stretches."""
    count = len(live)
    if count <= CURVE_POINTS:
        return range(count)
    stretches = CURVE_POINTS // 2 - 1
    corners = {0, count - 1}
    for n in range(stretches):
        stretch = range(count * n // stretches, count * (n + 1) // stretches)
        corners |= {max(stretch, key=live.__getitem__), min(stretch, key=live.__getitem__)}
    return sorted(corners)
