"""Calls and operators that initialise something: in the first step, or before it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.device import DeviceEvents
from lightning_memprof.account.trace.spans import Step
from lightning_memprof.read.trace.columns import Kind, TraceColumns
from lightning_memprof.read.trace.intervals import Column, Intervals

# Work of torch's compiler: tracing, code generation, tuning, recording of CUDA graphs.
COMPILES: Final = "(dynamo_timed)"
# A first call this long, and this many times as long as the later ones, initialises something.
_COLD_NS: Final = 1_000_000
_COLD_FACTOR: Final = 10
# The first two steps may each compile a program of their own: sizes of tensors become variables in the second.
_FEW_STEPS: Final = 4

_BEGINS_CAPTURE: Final = re.compile(r"(?:cuda|hip|cu)(?:Thread)?StreamBeginCapture")
_ENDS_CAPTURE: Final = re.compile(r"(?:cuda|hip|cu)(?:StreamEndCapture|GraphInstantiate)")
_MAKES_GRAPH: Final = re.compile("GraphInstantiate")
_OF_HOST_MEMORY: Final = re.compile("Host|Managed")


def cold_calls(columns: TraceColumns, parts: NDArray[np.int8], device: DeviceEvents, ranges: Sequence[Step]) -> Column:
    """Return the rows of the calls and operators that initialise something.

    They begin in the first step or before it, and take much longer than later ones of their name; or they get memory,
    and later steps hardly do. A wait for the device is none. The compiler's work is one in any step, if not in most.
    """
    end = ranges[0].end
    called = np.isin(columns.kinds, (Kind.RUNTIME, Kind.OPERATOR)) & (parts != Part.IDLE_SYNCHRONIZATION.number)
    durations = columns.ends - columns.starts
    candidates = np.flatnonzero(called & (columns.starts < end) & (durations >= _COLD_NS))
    compiles = np.flatnonzero(columns.named(lambda name: name.endswith(COMPILES))[columns.names])
    found = [
        _first_allocations(columns, parts, ranges),
        compiles if _is_rare(columns, compiles, ranges) else compiles[:0],
    ]
    for name in np.unique(columns.names[candidates]).tolist():
        mine = np.flatnonzero(called & (columns.names == name))
        later = mine[columns.starts[mine] >= end]
        rows = candidates[columns.names[candidates] == name]
        if len(mine) > 1:
            usual = np.median(durations[later if len(later) else mine])
            cold = rows[durations[rows] >= _COLD_FACTOR * usual]
        else:
            cold = rows[(columns.kinds[rows] == Kind.RUNTIME) & (columns.starts[rows] < columns.starts[device.rows[0]])]
        # A kernel's first launch loads it; an operator starts its library once.
        of_call = columns.kinds[cold] == Kind.RUNTIME
        found += [cold[of_call], cold[~of_call & (columns.starts[cold] == np.min(columns.starts[mine]))]]
    return np.unique(np.concatenate(found))


def _is_rare(columns: TraceColumns, rows: Column, ranges: Sequence[Step]) -> bool:
    """Return whether at most half of the steps have one of these events, or there are too few steps to tell."""
    steps = np.unique(np.searchsorted([each.start for each in ranges], columns.starts[rows], side="right"))
    return len(ranges) < _FEW_STEPS or 2 * len(steps) <= len(ranges)


def _first_allocations(columns: TraceColumns, parts: NDArray[np.int8], ranges: Sequence[Step]) -> Column:
    rows = device_allocations(columns, parts)
    first = rows[columns.starts[rows] < ranges[0].end]
    later = np.count_nonzero(columns.starts[rows] < ranges[-1].end) - len(first)
    return first if len(ranges) > 1 and later * _COLD_FACTOR <= len(first) * (len(ranges) - 1) else first[:0]


def device_allocations(columns: TraceColumns, parts: NDArray[np.int8]) -> Column:
    """Return the rows of the calls that get or return device memory."""
    rows = np.flatnonzero(parts == Part.IDLE_ALLOCATOR.number)
    return rows[~columns.named(_OF_HOST_MEMORY.search)[columns.names[rows]]]


def graph_captures(columns: TraceColumns, gaps: Intervals, ranges: Sequence[Step]) -> list[tuple[int, int, int]]:
    """Return the recordings of graphs of kernels: the row of a call of each, its start, and when the graph is made.

    Calls that launch work are recorded meanwhile, and nothing runs. One without a recorded begin has the whole gap in
    the device's work before it. Recordings in most steps are part of the steps, and left out.
    """
    begins = columns.rows_named(_BEGINS_CAPTURE.search, Kind.RUNTIME)
    ends = capture_ends(columns)
    rows = np.append(begins, ends)
    if not _is_rare(columns, rows, ranges):
        return []
    rows = rows[np.argsort(columns.starts[rows], kind="stable")]
    found: list[tuple[int, int, int]] = []
    is_open = False
    for row, is_end in zip(rows.tolist(), np.isin(rows, ends).tolist(), strict=True):
        start, end, makes = int(columns.starts[row]), int(columns.ends[row]), _MAKES_GRAPH.search(columns.name(row))
        if not is_end:
            found.append((row, start, end))
        elif is_open:
            found[-1] = (*found[-1][:2], end)
        elif makes:
            at = int(np.searchsorted(gaps.starts, start, side="right")) - 1
            found.append((row, int(gaps.starts[at]) if at >= 0 else start, end))
        is_open = not is_end or (is_open and not makes)
    return found


def capture_ends(columns: TraceColumns) -> Column:
    """Return the rows of the calls that end the recording of a graph of kernels."""
    return columns.rows_named(_ENDS_CAPTURE.search, Kind.RUNTIME)
