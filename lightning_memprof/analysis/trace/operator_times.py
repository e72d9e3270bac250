"""Operators of a trace by the time of their own on the host: what a trace without a device has to say of its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lightning_memprof.analysis.trace.columns import Kind, TraceColumns
from lightning_memprof.analysis.trace.device import totals_by
from lightning_memprof.analysis.trace.model import Operator

if TYPE_CHECKING:
    from lightning_memprof.analysis.trace.intervals import Column

__all__ = ["operators"]


def operators(columns: TraceColumns) -> tuple[Operator, ...]:
    """Return the operators by name, the most time of their own first; all threads count, and may run at once."""
    rows = columns.rows(Kind.OPERATOR)
    durations = columns.ends[rows] - columns.starts[rows]
    own = durations.copy()
    lanes = columns.lanes[rows]
    for lane in np.unique(lanes):
        chosen = np.flatnonzero(lanes == lane)
        own[chosen] -= _within(columns.starts[rows[chosen]], columns.ends[rows[chosen]])
    np.maximum(own, 0, out=own)
    found, whole = totals_by(columns.names[rows], own), totals_by(columns.names[rows], durations)
    named = zip(found.keys, found.counts, found.sums, whole.sums, durations[whole.longest], strict=True)
    result = [
        Operator(name=columns.name_of[key], count=int(count), own_ns=int(own_ns), total_ns=int(total), max_ns=int(most))
        for key, count, own_ns, total, most in named
    ]
    return tuple(sorted(result, key=lambda operator: (-operator.own_ns, operator.name)))


def _within(starts: Column, ends: Column) -> Column:
    """Return how long the direct children of each event ran, the events being of one thread.

    An event's parent is the last one before it that is one level higher; level by level it is found for all at once.
    """
    order = np.lexsort((-ends, starts))
    begun = np.arange(len(order))
    over = np.searchsorted(np.sort(ends), starts[order], side="right")
    level = np.maximum(begun - over, 0)
    found = np.zeros(len(order), dtype=np.int64)
    above = np.flatnonzero(level == 0)
    for depth in range(1, int(level.max(initial=0)) + 1):
        here = np.flatnonzero(level == depth)
        at = np.searchsorted(above, here) - 1
        children = here[at >= 0]
        parents = above[at[at >= 0]]
        np.add.at(found, order[parents], ends[order[children]] - starts[order[children]])
        above = here
    return found
