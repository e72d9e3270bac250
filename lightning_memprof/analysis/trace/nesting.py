"""Events that ran inside one another: from one thread's columns to rows, as torch's profiler counts them.

An event is the child of the innermost one that holds it wholly; one that overlaps its neighbour only in part is neither
its parent nor its child. An operator whose only child has its own name is one operator with it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

__all__ = ["Columns", "Memory", "OperatorRow", "nest", "nesting_order"]

_LATEST: Final = (1 << 62, 0, 0)
_BEHIND_ALL: Final = 1 << 40  # places of memory events: torch appends them to its list of events
_BEFORE_ALL: Final = (-(1 << 62), 0, 0)


@dataclass(slots=True, eq=False)
class OperatorRow:
    """One row of the table: all events of one name (and shapes). Times in ns, memory in bytes, both signed sums."""

    name: str
    on_device: bool = False
    is_annotation: bool = False
    input_shapes: str = ""
    count: int = 0
    cpu_ns: int = 0
    self_cpu_ns: int = 0
    device_ns: int = 0
    self_device_ns: int = 0
    cpu_bytes: int = 0
    self_cpu_bytes: int = 0
    device_bytes: int = 0
    self_device_bytes: int = 0
    is_nested: bool = False  # whether its first event ran inside another
    first: tuple[int, int, int] = _LATEST  # start, -end, place in the file of the first event: the order of rows

    @property
    def is_listed(self) -> bool:
        """Whether an earlier window already gave this row its place."""
        return self.first == _BEFORE_ALL

    def list_it(self) -> None:
        """Keep the row's place whatever a later window holds."""
        self.first = _BEFORE_ALL

    def see(self, first: tuple[int, int, int], *, is_nested: bool) -> None:
        """Count one event that begins at `first`."""
        self.count += 1
        if first < self.first:
            self.first = first
            self.is_nested = is_nested


def _longs() -> array[int]:
    return array("q")


@dataclass(slots=True)
class Columns:
    """The CPU events of one thread: times in ns, link to device work (0: none), row number, place in the file."""

    start: array[int] = field(default_factory=_longs)
    end: array[int] = field(default_factory=_longs)
    link: array[int] = field(default_factory=_longs)
    row: array[int] = field(default_factory=lambda: array("i"))
    place: array[int] = field(default_factory=lambda: array("I"))

    def extend(self, other: Columns) -> None:
        """Append all events of another thread."""
        self.start.extend(other.start)
        self.end.extend(other.end)
        self.link.extend(other.link)
        self.row.extend(other.row)
        self.place.extend(other.place)

    def in_order(self) -> Sequence[int]:
        """Positions by start, longest first; equal ones stay in the file's order."""
        return nesting_order(self.start, self.end)


def nesting_order(start: Sequence[int], end: Sequence[int]) -> Sequence[int]:
    """Positions of ranges by start, longest first, so that each comes behind what holds it; equal ones stay."""
    for i in range(1, len(start)):
        if start[i] < start[i - 1] or (start[i] == start[i - 1] and end[i] > end[i - 1]):
            break
    else:
        return range(len(start))
    order = sorted(range(len(start)), key=end.__getitem__, reverse=True)
    order.sort(key=start.__getitem__)
    return order


@dataclass(slots=True)
class Memory:
    """Allocations and frees of all threads: torch counts what happens while an operator runs, wherever it happens."""

    time: array[int] = field(default_factory=_longs)
    cpu: array[int] = field(default_factory=_longs)
    device: array[int] = field(default_factory=_longs)
    covered: array[int] = field(default_factory=_longs)

    def close(self) -> None:
        """Sort by time and turn bytes into running sums, one entry more than there are events."""
        order = sorted(range(len(self.time)), key=self.time.__getitem__)
        self.time = array("q", [self.time[i] for i in order])
        self.cpu = array("q", accumulate((self.cpu[i] for i in order), initial=0))
        self.device = array("q", accumulate((self.device[i] for i in order), initial=0))
        self.covered = array("q", bytes(8 * (len(order) + 1)))

    def between(self, start: int, end: int) -> tuple[int, int]:
        """The events from `start` to `end`, both inclusive, as a range of positions."""
        if not self.time:
            return 0, 0
        return bisect_left(self.time, start), bisect_right(self.time, end)

    def cover(self, first: int, last: int) -> None:
        """Note that an operator ran while the events of this range happened."""
        self.covered[first] += 1
        self.covered[last] -= 1

    def add_uncovered(self, row: OperatorRow) -> None:
        """Count in `row` what happened while no operator ran."""
        for i, running in enumerate(accumulate(self.covered[:-1])):
            if running:
                continue
            row.see((self.time[i], -self.time[i], _BEHIND_ALL + i), is_nested=False)
            cpu_bytes = self.cpu[i + 1] - self.cpu[i]
            device_bytes = self.device[i + 1] - self.device[i]
            row.cpu_bytes += cpu_bytes
            row.self_cpu_bytes += cpu_bytes
            row.device_bytes += device_bytes
            row.self_device_bytes += device_bytes


@dataclass(slots=True, eq=False)
class _Frame:
    """An operator on the stack, and the sums over its direct children so far."""

    row: OperatorRow
    start: int
    end: int
    place: int
    kernels_ns: int
    cpu_bytes: int
    device_bytes: int
    is_nested: bool
    children: int = 0
    twin: _Frame | None = None  # the only child so far, if it has the same name
    child_cpu_ns: int = 0
    child_device_ns: int = 0
    child_cpu_bytes: int = 0
    child_device_bytes: int = 0


def nest(columns: Columns, rows: Sequence[OperatorRow], memory: Memory, launched_ns: Mapping[int, int]) -> None:
    """Add every event of a thread to its row.

    Args:
        columns: the thread's events, in any order.
        rows: all rows, by number.
        memory: the closed memory events of all threads.
        launched_ns: ns of device work by link.
    """
    starts, ends, links = columns.start, columns.end, columns.link
    stack: list[_Frame] = []
    for i in columns.in_order():
        start, end = starts[i], ends[i]
        while stack and (start >= stack[-1].end or end > stack[-1].end):
            _close(stack)
        first, last = memory.between(start, end)
        if last > first and not stack:
            memory.cover(first, last)
        stack.append(
            _Frame(
                row=rows[columns.row[i]],
                start=start,
                end=end,
                place=columns.place[i],
                kernels_ns=launched_ns.get(links[i], 0) if links[i] else 0,
                cpu_bytes=memory.cpu[last] - memory.cpu[first],
                device_bytes=memory.device[last] - memory.device[first],
                is_nested=bool(stack),
            )
        )
    while stack:
        _close(stack)


def _close(stack: list[_Frame]) -> None:
    """Take the innermost operator off the stack: its children are complete."""
    frame = stack.pop()
    twin = frame.twin
    if twin is not None:
        frame.kernels_ns = twin.kernels_ns
        frame.child_cpu_ns, frame.child_device_ns = twin.child_cpu_ns, twin.child_device_ns
        frame.child_cpu_bytes, frame.child_device_bytes = twin.child_cpu_bytes, twin.child_device_bytes
        frame.twin = None
    if not stack:
        _count(frame)
        return
    parent = stack[-1]
    parent.children += 1
    parent.child_cpu_ns += frame.end - frame.start
    parent.child_device_ns += frame.kernels_ns + frame.child_device_ns
    parent.child_cpu_bytes += frame.cpu_bytes
    parent.child_device_bytes += frame.device_bytes
    if parent.children == 1 and parent.row.name == frame.row.name:
        parent.twin = frame
        return
    if parent.twin is not None:
        _count(parent.twin)
        parent.twin = None
    _count(frame)


def _count(frame: _Frame) -> None:
    row = frame.row
    row.see((frame.start, -frame.end, frame.place), is_nested=frame.is_nested)
    duration = frame.end - frame.start
    row.cpu_ns += duration
    row.self_cpu_ns += duration - frame.child_cpu_ns
    row.device_ns += frame.kernels_ns + frame.child_device_ns
    row.self_device_ns += frame.kernels_ns
    row.cpu_bytes += frame.cpu_bytes
    row.self_cpu_bytes += frame.cpu_bytes - frame.child_cpu_bytes
    row.device_bytes += frame.device_bytes
    row.self_device_bytes += frame.device_bytes - frame.child_device_bytes
