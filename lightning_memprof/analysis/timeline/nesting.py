"""Slices of one track made to nest, because a viewer drops those that overlap in part."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import le
from typing import Final

__all__ = ["LEFT_OUT", "Track"]

LEFT_OUT: Final = -(1 << 62)
"""The edit of an event that cannot be drawn."""


class Track:
    """The slices and arrow ends of one track, as columns, until :meth:`edits` says what must change.

    Times are ns. An edit is a number: the duration to which a slice is cut where it is 0 or more, else minus the
    number of the spare lane that the event moves to, or ``LEFT_OUT``.
    """

    def __init__(self) -> None:
        self.starts = array("q")
        self.ends = array("q")
        self.indexes = array("q")
        self.yields = bytearray()  # 1: a Python frame, which may end before its time
        self.arrows: list[tuple[int, int]] = []
        self.begins = False

    def span(self) -> tuple[int, int] | None:
        """First start and last end of the slices in ns, None where there is none."""
        return (min(self.starts), max(self.ends)) if self.starts else None

    def edits(self) -> Iterator[tuple[int, int]]:
        """``(index, edit)`` of each event that must change, in no order."""
        if len(self.starts) or self.arrows:
            yield from _Sweep(self).edits()


class _Sweep:
    def __init__(self, track: Track) -> None:
        self.track = track
        self.lanes: list[list[tuple[int, int, int]]] = [[]]  # per lane a stack of (end, start, position)
        self.found: list[tuple[int, int]] = []

    def edits(self) -> Iterable[tuple[int, int]]:
        track, place, stack = self.track, self._place, self.lanes[0]
        starts, ends = track.starts, track.ends
        arrows = sorted(track.arrows, reverse=True)
        for at in _order(track):
            start, end = starts[at], ends[at]
            while arrows and arrows[-1][0] < start:
                self._arrow(*arrows.pop())
            while stack and stack[-1][0] <= start:
                stack.pop()
            if stack and end > stack[-1][0]:
                place(at, start, end)
            else:
                stack.append((end, start, at))
        while arrows:
            self._arrow(*arrows.pop())
        return self.found

    def _place(self, at: int, start: int, end: int) -> None:
        """Deal with a slice that outlasts what it began in."""
        track, stack = self.track, self.lanes[0]
        outlasted = 0
        while outlasted < len(stack) and stack[-1 - outlasted][0] < end:
            outlasted += 1
        # A frame around a function that opens a range ends after the range began, and the range goes on: the frame
        # yields. What else overlaps did run at the same time: it gets room beside.
        if all(track.yields[position] for _, _, position in stack[-outlasted:]):
            for _, begun, position in stack[-outlasted:]:
                self.found.append((track.indexes[position], start - begun))
            del stack[-outlasted:]
            stack.append((end, start, at))
            return
        for lane in range(1, len(self.lanes) + 1):
            if lane == len(self.lanes):
                self.lanes.append([])
            spare = self.lanes[lane]
            while spare and spare[-1][0] <= start:
                spare.pop()
            if not spare or end <= spare[-1][0]:
                spare.append((end, start, at))
                self.found.append((track.indexes[at], -lane))
                return

    def _arrow(self, at: int, index: int) -> None:
        """Put the end of an arrow into the lane of its slice; one that ends in none cannot be drawn."""
        reached = [lane for lane, stack in enumerate(self.lanes) if stack and stack[0][0] >= at]
        if not reached:
            self.found.append((index, LEFT_OUT))
            return
        begun = [lane for lane in reached if self.lanes[lane][-1][1] == at]
        lane = min(begun or reached)
        if lane:
            self.found.append((index, -lane))


def _order(track: Track) -> Iterator[int]:
    """Positions by start; of those with one start the longest first."""
    starts, ends = track.starts, track.ends
    count = len(starts)
    order: Iterable[int] = range(count)
    if not all(map(le, starts, islice(starts, 1, None))):
        order = sorted(order, key=starts.__getitem__)
    group: list[int] = []
    previous = None
    for at in order:
        start = starts[at]
        if start != previous:
            if len(group) > 1:
                group.sort(key=ends.__getitem__, reverse=True)
            yield from group
            group.clear()
            previous = start
        group.append(at)
    if len(group) > 1:
        group.sort(key=ends.__getitem__, reverse=True)
    yield from group
