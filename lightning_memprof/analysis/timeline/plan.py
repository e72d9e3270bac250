"""The first reading of a source: what must change so that a viewer imports every event."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import msgspec

from lightning_memprof.analysis.timeline.nesting import LEFT_OUT, Track
from lightning_memprof.analysis.timeline.rows import Number, Reader, Row, canonical
from lightning_memprof.units import AT_ONCE_US, nanoseconds

__all__ = ["BEGINS", "Key", "Plan", "ProcessFacts", "make_plan"]

BEGINS: Final = 1 << 20
"""Lane of the slices that are written as a begin and an end, on a track that has whole slices too."""

Key = tuple[int | str, int | str]

_PYTHON: Final = msgspec.Raw(b'"python_function"')
_FOREVER: Final = (-(1 << 62), 1 << 62)
# 146 years: what is farther away is damage, and too much for a column.
_MOST_NS: Final = 1 << 62
_TOO_FAR: Final = "events with times that no clock has"
_COUNTED: Final = frozenset("XBEiIRCstfbn")


class ProcessFacts:
    """What the metadata events of a source say about one process."""

    def __init__(self) -> None:
        self.name = ""
        self.labels = ""
        self.sort: int | None = None
        self.threads: dict[int | str, str] = {}
        self.thread_sorts: dict[int | str, int] = {}


class Plan:
    """What the second reading of a source has to know."""

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
        """Arrows of the source that begin twice under one id."""
        self.left_out: Counter[str] = Counter()
        self.keys: dict[tuple[Number, Number], Key] = {}

    def key(self, pid: Number, tid: Number) -> Key:
        """The track of an event."""
        return self.keys.get((pid, tid)) or self._new_key(pid, tid)

    def _new_key(self, pid: Number, tid: Number) -> Key:
        # Kineto's own spans and marks come as three processes with names for numbers.
        key = (canonical(pid), canonical(tid))
        if self.reader.source.trace is not None and key[0] in {"", "Spans", "Traces"}:
            key = ("profiler", key[1])
        self.keys[pid, tid] = key
        return key


def make_plan(reader: Reader, after_batch: Callable[[], None]) -> Plan:
    """Read a source for the first time.

    Args:
        reader: of the source.
        after_batch: called after every some thousand events.

    Raises:
        ArtifactError: the trace is missing, cut off, or no trace.
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
                    self.edits[index] = LEFT_OUT
                    self.plan.left_out[_TOO_FAR] += 1
                    continue
                if not whole:
                    if end < low or start > high:
                        self.edits[index] = LEFT_OUT
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
                self.edits[index] = LEFT_OUT
                if reason:
                    self.plan.left_out[reason] += 1
        self.index = index

    def track(self, row: Row) -> Track:
        key = self.plan.key(row.pid, row.tid)
        track = self.tracks.get(key)
        if track is None:
            track = self.tracks[key] = Track()
        self.by_number[row.pid, row.tid] = track
        return track

    def other(self, row: Row, index: int, span: tuple[int, int]) -> str | None:
        """Take in an event that is no slice; the reason why it is left out, empty where it need not be told."""
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
            if edit == LEFT_OUT and index in arrows:
                plan.left_out["arrow ends outside of every slice"] += 1
            elif LEFT_OUT < edit < 0:
                lanes[-edit] = span
        if track.begins and not track.starts:
            # Nothing is known of slices that are written as a begin and an end: they keep what they had.
            for index in arrows:
                self.edits.pop(index, None)
        plan.lanes[key] = dict(sorted(lanes.items()))


def _undrawable(row: Row) -> str:
    """Why the importer would refuse an event; empty where it does not."""
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
