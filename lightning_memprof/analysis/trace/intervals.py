"""Sets of time: sorted, disjoint intervals as two int64 columns, start and end; what touches is one interval."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Column", "Intervals", "clip", "difference", "intersection", "length", "length_before", "union"]

Column: TypeAlias = NDArray[np.int64]


class Intervals(NamedTuple):
    """Half-open intervals ``[starts[i], ends[i])``, sorted, disjoint and none of them empty."""

    starts: Column
    ends: Column


def union(starts: Column, ends: Column) -> Intervals:
    """Return the time that is in at least one of the intervals; they may come in any order, and overlap.

    Args:
        starts: any shape ``(n,)``.
        ends: the same shape; an interval that ends before it starts is empty.
    """
    kept = ends > starts
    starts, ends = starts[kept], ends[kept]
    if not len(starts):
        return Intervals(starts, ends)
    if np.any(starts[1:] < starts[:-1]):
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    begins = np.flatnonzero(starts[1:] > reach[:-1]) + 1
    return Intervals(starts[np.append(0, begins)], reach[np.append(begins - 1, len(reach) - 1)])


def length(of: Intervals) -> int:
    """Return how long the intervals are together."""
    return int(np.sum(of.ends - of.starts))


def length_before(of: Intervals, moments: Column) -> Column:
    """Return for each moment how much of the intervals lies before it; the moments may come in any order."""
    if not len(of.starts):
        return np.zeros(len(moments), np.int64)
    before = np.append(0, np.cumsum(of.ends - of.starts))
    at = np.searchsorted(of.starts, moments, side="right")
    inner = np.maximum(at - 1, 0)
    open_part = np.where(at > 0, np.maximum(of.ends[inner] - moments, 0), 0)
    return before[at] - open_part


def clip(of: Intervals, start: int, end: int) -> Intervals:
    """Return what of the intervals lies in ``[start, end)``."""
    return _not_empty(np.maximum(of.starts, start), np.minimum(of.ends, end))


def intersection(spans: Intervals, other: Intervals) -> Intervals:
    """Return the time that is in both."""
    if not len(spans.starts) or not len(other.starts):
        return Intervals(spans.starts[:0], spans.ends[:0])
    first = np.searchsorted(other.ends, spans.starts, side="right")
    behind = np.searchsorted(other.starts, spans.ends, side="left")
    counts = np.maximum(behind - first, 0)
    mine = np.repeat(np.arange(len(counts)), counts)
    begins = np.cumsum(counts) - counts
    theirs = first[mine] + np.arange(len(mine)) - begins[mine]
    return _not_empty(
        np.maximum(spans.starts[mine], other.starts[theirs]), np.minimum(spans.ends[mine], other.ends[theirs])
    )


def difference(spans: Intervals, other: Intervals) -> Intervals:
    """Return the time that is in the first and not in the other."""
    if not len(spans.starts) or not len(other.starts):
        return spans
    start, end = int(spans.starts[0]), int(spans.ends[-1])
    starts, ends = np.append(start, other.ends), np.append(other.starts, end)
    return intersection(spans, _not_empty(starts, ends))


def _not_empty(starts: Column, ends: Column) -> Intervals:
    kept = ends > starts
    return Intervals(starts[kept], ends[kept])
