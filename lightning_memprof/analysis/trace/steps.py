"""The steps of a trace, and when its batches were loaded."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np

from lightning_memprof.analysis.trace.columns import Kind, TraceColumns
from lightning_memprof.analysis.trace.device import DeviceEvents
from lightning_memprof.analysis.trace.intervals import Column, Intervals, clip, length, union
from lightning_memprof.analysis.trace.model import TraceStep

__all__ = ["STEP_NAME", "Step", "is_loading", "launches", "loading_intervals", "step_spans", "trace_steps"]

STEP_NAME: Final = re.compile(r"ProfilerStep#(\d{1,18})\Z")
# torch's own range around a loader's `__next__`, and Lightning's around fetching a batch.
_LOADING: Final = re.compile(r"enumerate\(DataLoader\)|\[pl\]\[profile\].*dataloader_next\Z")


class Step(NamedTuple):
    """A step as the host saw it, in ns after the trace's origin."""

    start: int
    end: int
    number: int


def is_loading(name: str) -> bool:
    """Whether a range waits for a batch, or makes one."""
    return _LOADING.match(name) is not None


def step_spans(columns: TraceColumns) -> list[Step]:
    """Return each step once, in the order of their starts: the same range on a device's lane is not another step."""
    numbers = {i: int(match[1]) for i, name in enumerate(columns.name_of) if (match := STEP_NAME.match(name))}
    rows = columns.rows(Kind.ANNOTATION)
    rows = rows[np.isin(columns.names[rows], list(numbers))]
    return sorted(
        {Step(int(columns.starts[row]), int(columns.ends[row]), numbers[int(columns.names[row])]) for row in rows}
    )


def loading_intervals(columns: TraceColumns) -> Intervals:
    """Return when a batch was waited for, or made, in the training process."""
    named = [i for i, name in enumerate(columns.name_of) if is_loading(name)]
    rows = columns.rows(Kind.ANNOTATION)
    rows = rows[np.isin(columns.names[rows], named)]
    return union(columns.starts[rows], columns.ends[rows])


def launches(columns: TraceColumns, rows: Column) -> Column:
    """Return for each device event the row of the call that launched it, -1 where the trace does not have it."""
    calls = columns.rows(Kind.RUNTIME)
    calls = calls[columns.correlations[calls] != 0]
    calls = calls[np.argsort(columns.correlations[calls], kind="stable")]
    wanted = columns.correlations[rows]
    if not len(calls):
        return np.full(len(rows), -1, np.int64)
    at = np.minimum(np.searchsorted(columns.correlations[calls], wanted), len(calls) - 1)
    return np.where(columns.correlations[calls[at]] == wanted, calls[at], -1)


def trace_steps(
    columns: TraceColumns, device: DeviceEvents, steps: list[Step], loading: Intervals
) -> tuple[TraceStep, ...]:
    """Return the steps, each with the device's work that it launched.

    Work whose launch is not known belongs to the step in which it ran, and behind the last one to the last.
    """
    starts = np.array([step.start for step in steps], np.int64)
    launched = launches(columns, device.rows)
    moments = np.where(launched >= 0, columns.starts[np.maximum(launched, 0)], columns.starts[device.rows])
    owners = np.searchsorted(starts, moments, side="right") - 1
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(len(steps) + 1))
    found = []
    for step, begin, end in zip(steps, bounds[:-1], bounds[1:], strict=True):
        rows = device.rows[order[begin:end]]
        busy = length(union(columns.starts[rows], columns.ends[rows])) if len(device.rows) else None
        found.append(
            TraceStep(
                number=step.number,
                start_ns=columns.origin_ns + step.start,
                duration_ns=step.end - step.start,
                busy_ns=busy,
                data_loading_ns=length(clip(loading, step.start, step.end)),
            )
        )
    return tuple(sorted(found, key=lambda step: (step.number, step.start_ns)))
