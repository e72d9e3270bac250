"""Spans of a trace: its steps, and the launches of its device events."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

import numpy as np

from lightning_memprof.read.trace.columns import DEVICE_KINDS, STEP_NAME, Kind, TraceColumns
from lightning_memprof.read.trace.intervals import Column, Intervals, length, length_within, lookup

_MIN_GAPS: Final = 100
_SKIPPED: Final = 20
_FOLLOWING: Final = 0.01
# Distances in a random choice: 3 of 4 are below 1.39 times their mean, 1 of 4 below 0.29 times.
_SCATTERED: Final = 3


class Step(NamedTuple):
    """A step on the host, in ns after the trace's origin."""

    start: int
    end: int
    number: int


def step_spans(columns: TraceColumns, loading: Intervals) -> list[Step]:
    """Return each step once, by start: the same range on a device's lane is not another step.

    ``loading`` is the time in which batches are loaded.

    The steps of several processes in one file overlap: those of the process with the highest number of them count.

    The last call of the profiler's ``step()`` begins a step that ends with the recording: if nothing is computed in it,
    it is none. If most of the steps' time is after every other event, the recording ended in the last one.
    """
    numbers = {i: int(match[1]) for i, name in enumerate(columns.name_of) if (match := STEP_NAME.match(name))}
    rows = columns.rows(Kind.ANNOTATION)
    rows = rows[np.isin(columns.names[rows], list(numbers))]
    processes = np.array([str(columns.lane_of[lane][0]) for lane in columns.lanes[rows]])
    rows = rows[processes == Counter(processes).most_common(1)[0][0]] if len(rows) else rows
    steps = sorted(
        {Step(int(columns.starts[row]), int(columns.ends[row]), numbers[int(columns.names[row])]) for row in rows}
    )
    if not steps:
        return steps
    last, on_device = steps[-1], columns.rows(*DEVICE_KINDS)
    # What began before it on the host, such as the range of the whole recording, ends with the recording, too.
    others = columns.starts >= last.start
    others[on_device] = True
    others[np.isin(columns.names, list(numbers))] = False
    reach = int(np.max(columns.ends[others], initial=last.start))
    if len(on_device) and last.end - reach > reach - steps[0].start:
        steps[-1] = last._replace(end=reach)
    if len(steps) < 2:
        return steps
    last, worked = steps[-1], columns.starts[_work_calls(columns, loading)]
    is_empty = np.any(worked < last.start) and not np.any((worked >= last.start) & (worked < last.end))
    return steps[:-1] if is_empty else steps


def _work_calls(columns: TraceColumns, loading: Intervals) -> Column:
    """Return the rows of the calls that launched device work; without any, of operators that make no batch."""
    calls = columns.rows(Kind.RUNTIME)
    linked = columns.correlations[columns.rows(*DEVICE_KINDS)]
    calls = calls[np.isin(columns.correlations[calls], linked[linked != 0])]
    if len(calls):
        return calls
    operators = columns.rows(Kind.OPERATOR)
    starts = columns.starts[operators]
    makes_batch = length_within(loading, starts, starts + 1) > 0
    return operators[~makes_batch]


def skips_calls(columns: TraceColumns, computing: Intervals) -> bool:
    """Return whether most calls of the runtime are missing, as in a file with a sample of the events.

    The runtime numbers its calls, some in steps of a fixed size. In complete recordings 4 to 12 numbers pass from one
    recorded call to the next, and a tenth or more of the calls follow each other, or the distances are alike; of one
    call in a hundred hardly any follow each other, the distances are scattered, and kernels do not fill half of the
    time (``computing``).
    """
    numbers = np.unique(columns.correlations[columns.rows(Kind.RUNTIME)])
    gaps = np.diff(numbers[numbers != 0])
    is_full = len(computing.starts) and 2 * length(computing) > computing.ends[-1] - computing.starts[0]
    if len(gaps) < _MIN_GAPS or is_full:
        return False
    gaps //= np.gcd.reduce(gaps)
    low, middle, high = np.percentile(gaps, (25, 50, 75))
    return bool(middle >= _SKIPPED and np.mean(gaps == 1) < _FOLLOWING and high >= _SCATTERED * low)


def launches(columns: TraceColumns, rows: Column) -> Column:
    """Return for each device event the row of the call that launched it, -1 where the trace does not have it."""
    calls = columns.rows(Kind.RUNTIME)
    calls = calls[columns.correlations[calls] != 0]
    calls = calls[np.argsort(columns.correlations[calls], kind="stable")]
    return lookup(columns.correlations[calls], calls, columns.correlations[rows])
