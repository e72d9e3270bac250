"""The first reading of a source: the changes after which a viewer imports every event.

Slices of a track must nest, because a viewer drops those that overlap in part. The sweep over a track is in the order
of :func:`lightning_memprof.read.trace.intervals.in_order`; unlike `nest`, it moves an overlapping slice to a
spare lane of its own, and follows arrows to the lane of their slice.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, Final

import msgspec

from lightning_memprof.read.trace.intervals import in_order
from lightning_memprof.timeline.events import Number, Reader, Row, canonical
from lightning_memprof.units import AT_ONCE_US, nanoseconds

BEGINS: Final = 1 << 20
"""Lane of the slices that are written as a begin and an end, on a track that has whole slices too."""

SKIPPED: Final = -(1 << 62)
"""The edit of an event that a viewer cannot draw."""

Key = tuple[int | str, int | str]

_PYTHON: Final = msgspec.Raw(b'"python_function"')
_FOREVER: Final = (-(1 << 62), 1 << 62)
# 146 years: times beyond are damage, and do not fit into a column.
_MOST_NS: Final = 1 << 62
_TOO_FAR: Final = "events with impossible times"
_COUNTED: Final = frozenset("XBEiIRCstfbn")


class Track:
    """The slices and arrow ends of one track, as columns; times are ns.

    An edit is a number: 0 or more is the duration to which a slice is cut; below 0 it is minus the number of the spare
    lane to which the event moves, or ``SKIPPED``.
    """

    def __init__(self) -> None:
        self.starts = array("q")
        self.ends = array("q")
        self.indexes = array("q")
        self.yields = bytearray()  # 1: a Python frame, which may end before its time
        self.arrows: list[tuple[int, int]] = []
        self.begins = False

    def span(self) -> tuple[int, int] | None:
        """Return first start and last end of the slices in ns, None where there is none."""
        return (min(self.starts), max(self.ends)) if self.starts else None

    def edits(self) -> Iterator[tuple[int, int]]:
        """Yield ``(index, edit)`` of each event that must change, in no order."""
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
        for at in in_order(starts, ends):
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
        """Place a slice that outlasts the slice that it began in."""
        track, stack = self.track, self.lanes[0]
        outlasted = 0
        while outlasted < len(stack) and stack[-1 - outlasted][0] < end:
            outlasted += 1
        # A frame around a function that opens a range ends after the range began, and the range continues: the frame
        # is cut. Other overlapping slices did run at the same time: they get a lane of their own.
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
        """Put the end of an arrow into the lane of its slice; an arrow that ends in no slice cannot be drawn."""
        reached = [lane for lane, stack in enumerate(self.lanes) if stack and stack[0][0] >= at]
        if not reached:
            self.found.append((index, SKIPPED))
            return
        begun = [lane for lane in reached if self.lanes[lane][-1][1] == at]
        lane = min(begun or reached)
        if lane:
            self.found.append((index, -lane))


class ProcessFacts:
    """The metadata of one process of a source."""

    def __init__(self) -> None:
        self.name = ""
        self.labels = ""
        self.sort: int | None = None
        self.threads: dict[int | str, str] = {}
        self.thread_sorts: dict[int | str, int] = {}


class Plan:
    """The result of the first reading, for the second one."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.events = 0
        self.first_ns: int | None = None
        self.last_ns = 0
        self.lanes: dict[Key, dict[int, tuple[int, int] | None]] = {}
        """Per track its lanes, each with the first start and the last end of its slices."""
        self.processes: dict[int | str, ProcessFacts] = {}
        self.edit_indexes = array("q")
        self.edits = array("q")
        self.reused: set[tuple[bytes, bytes, int | str]] = set()
        """Arrows of the source that begin more than once under one id."""
        self.skipped: Counter[str] = Counter()
        self.keys: dict[tuple[Number, Number], Key] = {}

    def key(self, pid: Number, tid: Number) -> Key:
        """Return the track of an event."""
        return self.keys.get((pid, tid)) or self._new_key(pid, tid)

    def _new_key(self, pid: Number, tid: Number) -> Key:
        # Kineto's own spans and marks are three processes with names for numbers.
        key = (canonical(pid), canonical(tid))
        if self.reader.source.trace is not None and key[0] in {"", "Spans", "Traces"}:
            key = ("profiler", key[1])
        self.keys[pid, tid] = key
        return key


def make_plan(reader: Reader, after_batch: Callable[[], None]) -> Plan:
    """Read a source for the first time.

    Raises:
        ArtifactError: the trace is missing, truncated, or no trace.
    """
    scan = _Scan(Plan(reader))
    for rows in reader.batches():
        scan.read(rows)
        after_batch()
    return scan.finish()


class _Scan:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tracks: dict[Key, Track] = {}
        self.by_number: dict[tuple[Number, Number], Track] = {}
        self.index = -1
        self.arrow_starts: dict[tuple[bytes, bytes], tuple[array[int], set[int | str]]] = {}
        self.edits: dict[int, int] = {}
        span = plan.reader.source.span_ns
        self.span = span or _FOREVER

    def read(self, rows: list[Row]) -> None:
        offset = self.plan.reader.ts_offset_ns
        low, high = self.span[0] - offset, self.span[1] - offset
        whole = self.span is _FOREVER
        by_number, index = self.by_number, self.index
        for row in rows:
            index += 1
            ts = row.ts
            if row.ph == "X" and ts is not None:
                dur = row.dur
                try:
                    start = round(ts * 1000) if -AT_ONCE_US < ts < AT_ONCE_US else nanoseconds(ts)
                    end = start + round(dur * 1000) if dur and dur > 0 else start
                except OverflowError:
                    start = end = _MOST_NS
                if start <= -_MOST_NS or end >= _MOST_NS:
                    self.edits[index] = SKIPPED
                    self.plan.skipped[_TOO_FAR] += 1
                    continue
                if not whole:
                    if end < low or start > high:
                        self.edits[index] = SKIPPED
                        continue
                    start, end = max(start, low), min(end, high)
                track = by_number.get((row.pid, row.tid)) or self.track(row)
                track.starts.append(start)
                track.ends.append(end)
                track.indexes.append(index)
                track.yields.append(row.cat == _PYTHON)
                continue
            reason = self.other(row, index, (low, high))
            if reason is not None:
                self.edits[index] = SKIPPED
                if reason:
                    self.plan.skipped[reason] += 1
        self.index = index

    def track(self, row: Row) -> Track:
        key = self.plan.key(row.pid, row.tid)
        track = self.tracks.get(key)
        if track is None:
            track = self.tracks[key] = Track()
        self.by_number[row.pid, row.tid] = track
        return track

    def other(self, row: Row, index: int, span: tuple[int, int]) -> str | None:
        """Take an event that is not a slice; return the reason for skipping it, empty if there is none."""
        ph = row.ph
        if ph == "M":
            self.metadata(row)
            return ""
        reason = _undrawable(row)
        if reason or row.ts is None:
            return reason
        at = nanoseconds(row.ts) if -_MOST_NS < row.ts * 1000 < _MOST_NS else None
        if at is None:
            return _TOO_FAR
        if not span[0] <= at <= span[1]:
            return ""
        track = self.by_number.get((row.pid, row.tid)) or self.track(row)
        if ph in "BE":
            track.begins = True
        elif ph in "st" or (ph == "f" and bytes(row.bp) == b'"e"'):
            track.arrows.append((at, index))
        if ph == "s" and row.id is not None:
            self.arrow(row, row.id)
        if ph in _COUNTED:
            self.instants(at)
        return None

    def instants(self, at: int) -> None:
        plan = self.plan
        plan.first_ns = at if plan.first_ns is None else min(plan.first_ns, at)
        plan.last_ns = max(plan.last_ns, at)

    def arrow(self, row: Row, number: int | str) -> None:
        name = (bytes(row.cat), bytes(row.name))
        known = self.arrow_starts.get(name)
        if known is None:
            known = self.arrow_starts[name] = (array("q"), set())
        if isinstance(number, int) and -(1 << 63) <= number < 1 << 63:
            known[0].append(number)
        elif number in known[1]:
            self.plan.reused.add((*name, number))
        else:
            known[1].add(number)

    def metadata(self, row: Row) -> None:
        try:
            args: Any = msgspec.json.decode(row.args) if bytes(row.args) else {}
            what = msgspec.json.decode(row.name) if bytes(row.name) else ""
        except msgspec.DecodeError:
            return
        if not isinstance(args, dict):
            return
        pid, tid = self.plan.key(row.pid, row.tid)
        facts = self.plan.processes.setdefault(pid, ProcessFacts())
        sort = args.get("sort_index")
        if what == "process_name":
            facts.name = str(args.get("name", ""))
        elif what == "process_labels":
            facts.labels = str(args.get("labels", ""))
        elif what == "thread_name":
            facts.threads[tid] = str(args.get("name", ""))
        elif isinstance(sort, int) and what == "process_sort_index":
            facts.sort = sort
        elif isinstance(sort, int) and what == "thread_sort_index":
            facts.thread_sorts[tid] = sort

    def finish(self) -> Plan:
        plan = self.plan
        plan.events = self.index + 1
        for name, (numbers, _) in self.arrow_starts.items():
            ordered = sorted(numbers)
            plan.reused.update((*name, first) for first, two in pairwise(ordered) if first == two)
        self.arrow_starts.clear()
        for key in list(self.tracks):
            self.settle(key, self.tracks.pop(key))
            self.by_number.clear()
        indexes = sorted(self.edits)
        plan.edit_indexes = array("q", indexes)
        plan.edits = array("q", map(self.edits.__getitem__, indexes))
        return plan

    def settle(self, key: Key, track: Track) -> None:
        plan = self.plan
        span = track.span()
        if span is not None:
            self.instants(span[0])
            self.instants(span[1])
        lanes = {0: span}
        if track.begins and track.starts:
            lanes[BEGINS] = None
        arrows = {index for _, index in track.arrows}
        for index, edit in track.edits():
            self.edits[index] = edit
            if edit == SKIPPED and index in arrows:
                plan.skipped["arrow ends outside of every slice"] += 1
            elif SKIPPED < edit < 0:
                lanes[-edit] = span
        if track.begins and not track.starts:
            # Slices written as a begin and an end are not analysed: arrows to them stay as they were.
            for index in arrows:
                self.edits.pop(index, None)
        plan.lanes[key] = dict(sorted(lanes.items()))


def _undrawable(row: Row) -> str:
    """Return the reason why the importer would refuse an event; empty where it does not."""
    if not row.ph:
        return "events without a kind"
    if row.ts is None:
        return "events without a time"
    if row.id is None and row.ph in "stfbne" and not bytes(row.id2):
        return "arrows and asynchronous slices without an id"
    return "counters without a number" if row.ph == "C" and not _has_number(row) else ""


def _has_number(row: Row) -> bool:
    try:
        args: Any = msgspec.json.decode(row.args)
    except msgspec.DecodeError:
        return False
    return isinstance(args, dict) and any(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in args.values()
    )
