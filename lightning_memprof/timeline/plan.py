"""The first reading of a source: the changes after which a viewer imports every event.

Slices of a track must nest, because a viewer drops those that overlap in part. The sweep over a track moves an
overlapping slice to a spare lane of its own, and follows arrows to the lane of their slice.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Final

import msgspec

from lightning_memprof.read.trace.intervals import nesting_order
from lightning_memprof.timeline.events import Number, Reader, Row, Seen, canonical
from lightning_memprof.units import AT_ONCE_US, nanoseconds

SKIPPED: Final = -(1 << 62)
"""The edit of an event that a viewer cannot draw."""

Key = tuple[int | str, int | str]

_PYTHON: Final = msgspec.Raw(b'"python_function"')


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


class _Sweep:
    def __init__(self, track: Track) -> None:
        self.track = track
        self.lanes: list[list[tuple[int, int, int]]] = [[]]  # per lane a stack of (end, start, position)
        self.found: list[tuple[int, int]] = []

    def edits(self) -> list[tuple[int, int]]:
        """Return ``(index, edit)`` of each event that must change, in no order."""
        track, place, stack = self.track, self._place, self.lanes[0]
        starts, ends = track.starts, track.ends
        arrows = sorted(track.arrows, reverse=True)
        for at in nesting_order(starts, ends).tolist():
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


class _Metadata(msgspec.Struct):
    name: str = ""
    labels: str = ""
    sort_index: int | None = None


_metadata: Final = msgspec.json.Decoder(_Metadata).decode


class Plan:
    """The first reading of a source, and its result for the second one."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.first_ns: int | None = None
        self.lanes: dict[Key, list[int]] = {}
        """The lanes of each track."""
        self.processes: dict[int | str, ProcessFacts] = {}
        self.edit_indexes = array("q")
        """The places in the source of the events that must change; ``edits`` has the change of each."""
        self.edits = array("q")
        self.skipped: Counter[str] = Counter()
        self._keys: dict[tuple[Number, Number], Key] = {}
        self._tracks: dict[Key, Track] = {}
        self._by_number: dict[tuple[Number, Number], Track] = {}
        self._found: dict[int, int] = {}
        self._index = -1

    def read(self, seen: Seen) -> Plan:
        """Read the source.

        Raises:
            ArtifactError: the trace is missing, truncated, or no trace.
        """
        for rows in self.reader.batches(seen):
            self._read(rows)
        self._by_number.clear()
        for key in list(self._tracks):
            self._settle(key, self._tracks.pop(key))
        self.edit_indexes = array("q", sorted(self._found))
        self.edits = array("q", map(self._found.pop, self.edit_indexes))
        return self

    def key(self, pid: Number, tid: Number) -> Key:
        """Return the track of an event."""
        return self._keys.get((pid, tid)) or self._new_key(pid, tid)

    def _new_key(self, pid: Number, tid: Number) -> Key:
        # Kineto's own spans and marks are three processes with names for numbers.
        key = (canonical(pid), canonical(tid))
        if self.reader.source.trace is not None and key[0] in {"", "Spans", "Traces"}:
            key = ("profiler", key[1])
        self._keys[pid, tid] = key
        return key

    def _read(self, rows: list[Row]) -> None:
        low, high = self.reader.span_ns
        by_number = self._by_number
        for index, row in enumerate(rows, start=self._index + 1):
            ts = row.ts
            if row.ph == "X" and ts is not None:
                dur = row.dur
                start = round(ts * 1000) if -AT_ONCE_US < ts < AT_ONCE_US else nanoseconds(ts)
                end = start + round(dur * 1000) if dur and dur > 0 else start
                if start < low or end > high:
                    if end <= low or start >= high:
                        self._found[index] = SKIPPED
                        continue
                    start, end = max(start, low), min(end, high)
                track = by_number.get((row.pid, row.tid)) or self._track(row)
                track.starts.append(start)
                track.ends.append(end)
                track.indexes.append(index)
                track.yields.append(row.cat == _PYTHON)
                continue
            reason = self._other(row, index, (low, high))
            if reason is not None:
                self._found[index] = SKIPPED
                if reason:
                    self.skipped[reason] += 1
        self._index += len(rows)

    def _track(self, row: Row) -> Track:
        track = self._tracks.setdefault(self.key(row.pid, row.tid), Track())
        self._by_number[row.pid, row.tid] = track
        return track

    def _other(self, row: Row, index: int, span: tuple[int, int]) -> str | None:
        """Take an event that is not a slice; return why a viewer refuses it, empty if it is skipped without a word."""
        ph = row.ph
        if ph == "M":
            self._metadata(row)
            return ""
        if not ph:
            return "events without a kind"
        if row.ts is None:
            return "events without a time"
        if row.id is None and ph in "stfbne":
            return "arrows and asynchronous slices without an id"
        at = nanoseconds(row.ts)
        if not span[0] <= at <= span[1]:
            return ""
        track = self._by_number.get((row.pid, row.tid)) or self._track(row)
        if ph in "st" or (ph == "f" and bytes(row.bp) == b'"e"'):
            track.arrows.append((at, index))
        self._begin(at)
        return None

    def _begin(self, at: int) -> None:
        self.first_ns = at if self.first_ns is None else min(self.first_ns, at)

    def _metadata(self, row: Row) -> None:
        pid, tid = self.key(row.pid, row.tid)
        facts = self.processes.setdefault(pid, ProcessFacts())
        try:
            found = _metadata(row.args)
        except msgspec.MsgspecError:
            return
        match bytes(row.name):
            case b'"process_name"':
                facts.name = found.name
            case b'"process_labels"':
                facts.labels = found.labels
            case b'"thread_name"':
                facts.threads[tid] = found.name
            case b'"process_sort_index"':
                facts.sort = found.sort_index
            case b'"thread_sort_index"' if found.sort_index is not None:
                facts.thread_sorts[tid] = found.sort_index

    def _settle(self, key: Key, track: Track) -> None:
        if track.starts:
            self._begin(min(track.starts))
        lanes = {0}
        arrows = {index for _, index in track.arrows}
        for index, edit in _Sweep(track).edits():
            self._found[index] = edit
            if edit == SKIPPED and index in arrows:
                self.skipped["arrow ends outside of every slice"] += 1
            elif SKIPPED < edit < 0:
                lanes.add(-edit)
        self.lanes[key] = sorted(lanes)
