"""Intervals of time: sets of them, and which event runs inside which.

Columns are int64, one entry per interval, ``[start, end)``. The functions on sets take and return sorted, disjoint
intervals; those on events take columns in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = NDArray[np.int64]

_BLOCK: Final = 1 << 14

_MOST: Final = 20_000

ROUNDING_NS: Final = 1_000
"""Kineto rounds starts and durations separately: a child may seem to outlast its parent by this much."""


class Intervals(NamedTuple):
    """A set of time: half-open intervals ``[starts[i], ends[i])``, sorted, disjoint and none of them empty."""

    starts: Column
    ends: Column


def union(starts: Column, ends: Column) -> Intervals:
    """Return the time inside at least one of the intervals; they may overlap, and come in any order.

    Args:
        starts: ``(n,)``.
        ends: ``(n,)``; an interval that ends before it starts is empty.
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
    """Return the total length of a set."""
    return int(np.sum(of.ends - of.starts))


def length_before(of: Intervals, moments: Column) -> Column:
    """Return the length of a set before each moment; the moments may come in any order."""
    if not len(of.starts):
        return np.zeros(len(moments), np.int64)
    before = np.append(0, np.cumsum(of.ends - of.starts))
    at = np.searchsorted(of.starts, moments, side="right")
    inner = np.maximum(at - 1, 0)
    open_part = np.where(at > 0, np.maximum(of.ends[inner] - moments, 0), 0)
    return before[at] - open_part


def length_within(of: Intervals, starts: Column, ends: Column) -> Column:
    """Return the length of a set from each start to each end."""
    return length_before(of, ends) - length_before(of, starts)


def clip(of: Intervals, start: int, end: int) -> Intervals:
    """Return the part of a set in ``[start, end)``."""
    return _not_empty(np.maximum(of.starts, start), np.minimum(of.ends, end))


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """Return the time in both sets."""
    return overlaps(first, second)[1]


def overlaps(first: Intervals, second: Intervals) -> tuple[Column, Intervals]:
    """Return the time in both sets, and for each interval of it the position of the one in the first set."""
    if not len(first.starts) or not len(second.starts):
        return np.empty(0, np.int64), Intervals(first.starts[:0], first.ends[:0])
    begin = np.searchsorted(second.ends, first.starts, side="right")
    behind = np.searchsorted(second.starts, first.ends, side="left")
    counts = np.maximum(behind - begin, 0)
    mine = np.repeat(np.arange(len(counts)), counts)
    begins = np.cumsum(counts) - counts
    theirs = begin[mine] + np.arange(len(mine)) - begins[mine]
    starts = np.maximum(first.starts[mine], second.starts[theirs])
    ends = np.minimum(first.ends[mine], second.ends[theirs])
    kept = ends > starts
    return mine[kept], Intervals(starts[kept], ends[kept])


def difference(first: Intervals, second: Intervals) -> Intervals:
    """Return the time in the first set and not in the second."""
    if not len(first.starts) or not len(second.starts):
        return first
    start, end = int(first.starts[0]), int(first.ends[-1])
    starts, ends = np.append(start, second.ends), np.append(second.starts, end)
    return intersection(first, _not_empty(starts, ends))


def stretches(of: Intervals, origin_ns: int) -> tuple[tuple[int, int], ...]:
    """Return start and end of the intervals in Unix ns, at most 20,000 of them."""
    return tuple(zip((origin_ns + of.starts[:_MOST]).tolist(), (origin_ns + of.ends[:_MOST]).tolist(), strict=True))


def _not_empty(starts: Column, ends: Column) -> Intervals:
    kept = ends > starts
    return Intervals(starts[kept], ends[kept])


def lookup(keys: Column, values: NDArray[Any], wanted: Column) -> Column:
    """Return the value of each wanted key, -1 where it is not among the sorted ``keys``."""
    if not len(keys):
        return np.full(len(wanted), -1, np.int64)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], -1)


class Nesting(NamedTuple):
    """The events of one thread as trees, by position in the given columns.

    Attributes:
        order: ``(n,)`` all positions by start; an event comes after the event around it.
        parents: ``(n,)`` position of the innermost event around each, -1 for none.
        ends: ``(n,)`` end of each, cut to the end of its parent where overlaps are cut.
    """

    order: Column
    parents: Column
    ends: Column


def nesting_order(starts: Sequence[int] | Column, ends: Sequence[int] | Column) -> Column:
    """Return positions by start, longest first, so that each event follows those that contain it; equal ones stay."""
    begin, end = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
    later, equal = begin[1:] > begin[:-1], begin[1:] == begin[:-1]
    if np.all(later | (equal & (end[1:] <= end[:-1]))):
        return np.arange(len(begin))
    return np.lexsort((-end, begin))


def nest(starts: Sequence[int] | Column, ends: Sequence[int] | Column, *, slack: int | None = 0) -> Nesting:
    """Find the innermost event around each event of one thread.

    Args:
        starts: ``(n,)``, in any order.
        ends: ``(n,)``.
        slack: how far an event may outlast the event that it started in and still be inside it; one that outlasts it
            by more is beside it. None cuts it to the end of the other: everything that starts inside is inside.
    """
    begin, end = np.asarray(starts, np.int64), np.array(ends, np.int64)
    order = nesting_order(begin, end)
    proper = _proper_parents(begin, end, order)
    if proper is not None:
        return Nesting(order, proper, end)
    parents = np.full(len(order), -1, np.int64)
    open_ends: list[int] = []
    open_events: list[int] = []
    for first in range(0, len(order), _BLOCK):  # as Python numbers they take 30 bytes each
        block = order[first : first + _BLOCK]
        found = []
        for event, start, stop in zip(block.tolist(), begin[block].tolist(), end[block].tolist(), strict=True):
            while open_ends and (open_ends[-1] <= start or (slack is not None and open_ends[-1] < stop - slack)):
                open_ends.pop()
                open_events.pop()
            found.append(open_events[-1] if open_events else -1)
            open_ends.append(min(stop, open_ends[-1]) if slack is None and open_ends else stop)
            open_events.append(event)
            if slack is None:
                end[event] = open_ends[-1]
        parents[block] = found
    return Nesting(order, parents, end)


def _proper_parents(begin: Column, end: Column, order: Column) -> Column | None:
    """Return the parents where no event outlasts the one it started in, else None.

    An event's depth is the number of events that run when it starts; its parent is then the latest one that is less
    deep by one. A tenth of the time of a loop.
    """
    lasting = order[end[order] > begin[order]]
    first, last = begin[lasting], end[lasting]
    depth = np.arange(len(lasting)) - np.searchsorted(np.sort(last), first, side="right")
    levels = np.argsort(depth, kind="stable")
    keys = depth[levels] * len(lasting) + levels
    at = np.searchsorted(keys, (depth - 1) * len(lasting) + np.arange(len(lasting))) - 1
    above = np.where(depth > 0, levels[np.maximum(at, 0)], -1)
    inner = above >= 0
    if np.any(depth[above[inner]] != depth[inner] - 1) or np.any(last[above[inner]] < last[inner]):
        return None
    parents = np.full(len(order), -1, np.int64)
    parents[lasting[inner]] = lasting[above[inner]]
    if len(lasting) < len(order):  # no event is inside one without length
        empty = order[end[order] <= begin[order]]
        parents[empty] = innermost_at(Nesting(lasting, parents, end), begin, begin[empty])
    return parents


def innermost_at(nesting: Nesting, starts: Sequence[int] | Column, moments: Sequence[int] | Column) -> Column:
    """Return the innermost event that runs at each moment, -1 for none.

    Args:
        nesting: of the events; the events end at its ``ends``.
        starts: ``(n,)`` starts of the events.
        moments: ``(m,)`` in any order.
    """
    begin, asked = np.asarray(starts, np.int64), np.asarray(moments, np.int64)
    if not len(nesting.order):
        return np.full(len(asked), -1, np.int64)
    latest = np.searchsorted(begin[nesting.order], asked, side="right") - 1
    found = np.where(latest >= 0, nesting.order[np.maximum(latest, 0)], -1)
    over = np.flatnonzero((found >= 0) & (nesting.ends[found] <= asked))
    while len(over):
        found[over] = nesting.parents[found[over]]
        over = over[(found[over] >= 0) & (nesting.ends[found[over]] <= asked[over])]
    return found


def exclusive_ends(nesting: Nesting, starts: Column) -> Column:
    """Return ends at which each moment has one innermost event: cut to the parent's end and the next sibling's start.

    An event's self time is then its length without its children's, and these add up to the union. Time by which an
    event outlasts its parent is not in it.
    """
    order = nesting.order
    by_parent = order[np.argsort(nesting.parents[order], kind="stable")]
    same = nesting.parents[by_parent[1:]] == nesting.parents[by_parent[:-1]]
    ends = np.maximum(nesting.ends, starts)
    earlier = by_parent[:-1][same]
    ends[earlier] = np.minimum(ends[earlier], starts[by_parent[1:][same]])
    inner = np.flatnonzero(nesting.parents >= 0)
    parents = nesting.parents[inner]
    while True:
        cut = np.minimum(ends[inner], np.maximum(ends[parents], starts[inner]))
        if np.array_equal(cut, ends[inner]):
            return ends
        ends[inner] = cut


def innermost_stretches(
    starts: Column, ends: Column, parents: Column, chosen: NDArray[np.bool_]
) -> tuple[Column, Intervals]:
    """Return the stretches of time with one innermost event each, and the position of that event.

    Args:
        starts: ``(n,)``.
        ends: ``(n,)`` of :func:`exclusive_ends`.
        parents: ``(n,)`` position of the event around each, -1 for none.
        chosen: ``(n,)`` the events that count; the events around each of them are among them.
    """
    rows = np.flatnonzero(chosen & (ends > starts))
    rows = rows[nesting_order(starts[rows], ends[rows])]
    places = np.arange(len(rows))
    # At one moment, events end from the inside out; then others begin.
    moments = np.concatenate((ends[rows[::-1]], starts[rows]))
    current = np.concatenate((parents[rows[::-1]], rows))
    order = np.lexsort((np.concatenate((places - len(rows), places)), moments))
    moments, current = moments[order], current[order]
    found = Intervals(moments[:-1], moments[1:])
    kept = (found.ends > found.starts) & (current[:-1] >= 0)
    return current[:-1][kept], Intervals(found.starts[kept], found.ends[kept])


def nearest(parents: Column, marked: NDArray[np.bool_]) -> Column:
    """Return the position of each event if it is marked, else of the nearest marked event around it, -1 for none."""
    if not np.any(marked):
        return np.full(len(parents), -1, np.int64)
    # Each round doubles the number of generations; the last entry is where those without a marked ancestor end.
    found = np.append(np.where(marked, np.arange(len(parents)), parents), -1)
    while True:
        further = found[found]
        if np.array_equal(further, found):
            return found[:-1]
        found = further
