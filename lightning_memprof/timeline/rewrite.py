"""The second reading of a source: every event gets its time, process, track and ids in the merged trace.

Processes and tracks are numbered over all sources: small positive numbers, with their names and their order on screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lightning_memprof.timeline.events import Number, Row, Seen
from lightning_memprof.timeline.plan import SKIPPED, Key, Plan, ProcessFacts
from lightning_memprof.timeline.writer import write_part
from lightning_memprof.units import AT_ONCE_US, nanoseconds

_LAST: Final = 1 << 40
_LARGEST_ID: Final = 1 << 52
# The importer gives an instant across all tracks a track without a name.
_EVERYWHERE: Final = msgspec.Raw(b'"g"')
_ON_ITS_TRACK: Final = msgspec.Raw(b'"t"')

Process = tuple[str, int | str]
Places = dict[tuple[Key, int], tuple[int, int]]


class Numbering:
    """The process and track number of each event of each source.

    Sources with one label share processes and tracks.

    Args:
        plans: of all sources, in their order.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.places: list[Places] = [{} for _ in plans]
        """Per source the process and track number of each track and lane."""
        self.metadata: list[Row] = []
        """The metadata events: names and order of processes and tracks."""
        processes = _in_order(plans)
        self._thread = len(processes)
        for number, process in enumerate(processes, start=1):
            self._name_process(number, process, plans)
        for number, process in enumerate(processes, start=1):
            self._number_threads(number, process, plans)

    def _name_process(self, number: int, process: Process, plans: Sequence[Plan]) -> None:
        label, pid = process
        facts = _facts(process, plans)
        if label:
            what = pid if isinstance(pid, str) else facts.labels or facts.name or str(pid)
            name = f"{label} · {what}" if what else label
        else:
            name = facts.name or str(pid)
            if facts.labels:
                self._add("process_labels", number, None, labels=facts.labels)
        self._add("process_name", number, None, name=name)
        self._add("process_sort_index", number, None, sort_index=number)

    def _number_threads(self, number: int, process: Process, plans: Sequence[Plan]) -> None:
        label, pid = process
        facts = _facts(process, plans)
        mine = [(at, plan) for at, plan in enumerate(plans) if plan.reader.source.label == label]
        threads: dict[int | str, int] = {}
        for _, plan in mine:
            for of, tid in plan.lanes:
                if of == pid:
                    threads.setdefault(tid, facts.thread_sorts.get(tid, _LAST))
        order = 0
        for tid in sorted(threads, key=threads.__getitem__):
            tracks: dict[int, int] = {}
            for at, plan in mine:
                for lane in plan.lanes.get((pid, tid), ()):
                    if lane not in tracks:
                        self._thread += 1
                        tracks[lane] = self._thread
                        order += 1
                        name = facts.threads.get(tid) or (tid or "marks" if isinstance(tid, str) else f"thread {tid}")
                        self._add("thread_name", number, self._thread, name=name + f" (beside {lane})" * (lane > 0))
                        self._add("thread_sort_index", number, self._thread, sort_index=order)
                    self.places[at][(pid, tid), lane] = (number, tracks[lane])

    def _add(self, what: str, pid: int, tid: int | None, **args: Any) -> None:
        encode = msgspec.json.encode
        self.metadata.append(
            Row(ph="M", name=msgspec.Raw(encode(what)), pid=pid, tid=tid, args=msgspec.Raw(encode(args)))
        )


def _in_order(plans: Sequence[Plan]) -> list[Process]:
    """Return all processes with events: by the source's place, by label, and in the source's own order."""
    labels: dict[str, tuple[int, int]] = {}
    for at, plan in enumerate(plans):
        labels.setdefault(plan.reader.source.label, (plan.reader.source.sort, at))
    found: dict[Process, tuple[int, int, int]] = {}
    for at, plan in enumerate(plans):
        label = plan.reader.source.label
        for pid, _ in plan.lanes:
            facts = plan.processes.get(pid)
            sort = _LAST if pid == "profiler" else facts.sort if facts and facts.sort is not None else at
            found.setdefault((label, pid), (*labels[label], sort))
    return sorted(found, key=found.__getitem__)


def _facts(process: Process, plans: Sequence[Plan]) -> ProcessFacts:
    label, pid = process
    found = [plan.processes[pid] for plan in plans if plan.reader.source.label == label and pid in plan.processes]
    return found[0] if found else ProcessFacts()


class Rewriting(msgspec.Struct, kw_only=True):
    """The second reading of one source, into a part of the merged trace.

    Attributes:
        plan: of the source.
        places: process and track number of each of its tracks and lanes.
        ids: the source's number and the number of sources, which make its ids unique.
        shift: ns added to its times.
        part: the file to write.
        compressed: whether the merged trace will be.
    """

    plan: Plan
    places: Places
    ids: tuple[int, int]
    shift: int
    part: Path
    compressed: bool
    _index: int = -1
    _next_edit: int = 0
    _odd: dict[int | str, int] = {}
    _numbers: dict[tuple[Number, Number], tuple[int, int]] = {}

    def write(self, seen: Seen) -> int:
        """Write the part, and return its number of events.

        Raises:
            ArtifactError: it cannot be written.
        """
        batches = self.plan.reader.batches(seen)
        return write_part(self.part, map(self._rewritten, batches), compressed=self.compressed)

    def _rewritten(self, rows: list[Row]) -> list[Row]:
        """Change a batch in place, and return the rows to write; batches come in the order of the source."""
        shift, numbers, at = self.shift, self._numbers, self._next_edit
        edit_indexes, edits = self.plan.edit_indexes, self.plan.edits
        low, high = self.plan.reader.span_ns
        is_whole = True
        for index, row in enumerate(rows, start=self._index + 1):
            where = numbers.get((row.pid, row.tid))
            edit = None
            if at < len(edits) and index == edit_indexes[at]:
                edit = edits[at]
                at += 1
                if edit == SKIPPED:
                    row.ph = ""
                    is_whole = False
                    continue
                if edit < 0:
                    where = self._where(row, -edit)
            if where is None:
                where = numbers[row.pid, row.tid] = self._where(row, 0)
            ts: Any = row.ts  # rows without a time are skipped
            start = round(ts * 1000) if -AT_ONCE_US < ts < AT_ONCE_US else nanoseconds(ts)
            if row.ph == "X":
                dur = row.dur
                end = start + round(dur * 1000) if dur and dur > 0 else start
                start = max(start, low)
                row.dur = (min(end, high) - start if edit is None or edit < 0 else edit) / 1000
            else:
                self._own(row)
            row.ts = (start + shift) / 1000
            row.pid, row.tid = where
        self._index, self._next_edit = self._index + len(rows), at
        return rows if is_whole else [row for row in rows if row.ph]

    def _where(self, row: Row, lane: int) -> tuple[int, int]:
        return self.places[self.plan.key(row.pid, row.tid), lane]

    def _own(self, row: Row) -> None:
        """Keep an instant on its track, and give an arrow or an asynchronous slice an id of this source."""
        if row.ph in "iI":
            if row.s == _EVERYWHERE:
                row.s = _ON_ITS_TRACK
        elif row.id is not None:
            source, sources = self.ids
            number = row.id
            if not (isinstance(number, int) and 0 <= number < _LARGEST_ID // sources):
                # Not a small number: a number of its own.
                number = _LARGEST_ID // sources + self._odd.setdefault(number, len(self._odd))
            row.id = number * sources + source
