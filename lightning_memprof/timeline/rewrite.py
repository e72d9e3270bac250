"""The second reading of a source: every event gets its time, process, track and ids in the merged trace.

Processes and tracks are numbered over all sources: small positive numbers, with their names and their order on screen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, Final

import msgspec

from lightning_memprof.timeline.events import Row
from lightning_memprof.timeline.plan import BEGINS, SKIPPED, Key, Plan, ProcessFacts
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

    Sources with one label share processes and tracks, except where their slices would overlap in time.

    Args:
        plans: of all sources, in their order.
        shifts: per source the ns added to its times.
    """

    def __init__(self, plans: Sequence[Plan], shifts: Sequence[int]) -> None:
        self.places: list[Places] = [{} for _ in plans]
        """Per source the process and track number of each track and lane."""
        self.metadata: list[Row] = []
        """The metadata events: names and order of processes and tracks."""
        processes = _in_order(plans)
        self._thread = len(processes)
        for number, process in enumerate(processes, start=1):
            self._name_process(number, process, plans)
        for number, process in enumerate(processes, start=1):
            self._number_threads(number, process, plans, shifts)

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

    def _number_threads(self, number: int, process: Process, plans: Sequence[Plan], shifts: Sequence[int]) -> None:
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
            rows: dict[tuple[int, int], tuple[int, list[tuple[int, int]]]] = {}
            for at, plan in mine:
                for lane, span in plan.lanes.get((pid, tid), {}).items():
                    moved = None if span is None else (span[0] + shifts[at], span[1] + shifts[at])
                    again = 0
                    while (lane, again) in rows and moved and any(_meet(moved, row) for row in rows[lane, again][1]):
                        again += 1
                    if (lane, again) not in rows:
                        self._thread += 1
                        rows[lane, again] = (self._thread, [])
                        order += 1
                        name = facts.threads.get(tid) or (tid or "marks" if isinstance(tid, str) else f"thread {tid}")
                        self._add("thread_name", number, self._thread, name=name + _suffix(lane, again))
                        self._add("thread_sort_index", number, self._thread, sort_index=order)
                    track, spans = rows[lane, again]
                    if moved:
                        spans.append(moved)
                    self.places[at][(pid, tid), lane] = (number, track)

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


def _meet(span: tuple[int, int], two: tuple[int, int]) -> bool:
    return span[0] < two[1] and two[0] < span[1]


def _suffix(lane: int, again: int) -> str:
    text = " (begin and end)" if lane == BEGINS else f" (beside {lane})" if lane else ""
    return text + (f" (source {again + 1})" if again else "")


class Rewrite:
    """Gives the rows of one source their place in the merged trace.

    Args:
        plan: of the source.
        places: process and track number of each of its tracks and lanes.
        ids: the source's number and the number of sources, which make its ids unique.
        shift: ns added to its times.
    """

    def __init__(self, plan: Plan, places: Places, ids: tuple[int, int], shift: int) -> None:
        self._plan = plan
        self._places = places
        self._source, self._sources = ids
        self._shift = shift
        self._odd: dict[Hashable, int] = {}
        self._index = -1
        self._edits = zip(plan.edit_indexes, plan.edits, strict=True)
        self._edit_at, self._edit = next(self._edits, (-1, 0))
        self._numbers: dict[tuple[Any, Any], tuple[int, int]] = {}
        span = plan.reader.source.span_ns
        self._clip = (
            None
            if span is None
            else (span[0] + shift - plan.reader.ts_offset_ns, span[1] + shift - plan.reader.ts_offset_ns)
        )
        self._begun: Counter[tuple[bytes, bytes, int | str]] = Counter()

    def rows(self, rows: list[Row]) -> list[Row]:
        """Change a batch in place, and return the rows to write; batches come in the order of the source."""
        shift, index, numbers, edit_at, clip = self._shift, self._index, self._numbers, self._edit_at, self._clip
        skipped = False
        for row in rows:
            index += 1
            where = numbers.get((row.pid, row.tid))
            if index == edit_at:
                edit = self._edit
                edit_at, self._edit = next(self._edits, (-1, 0))
                if edit == SKIPPED:
                    row.ph = ""
                    skipped = True
                    continue
                if edit < 0:
                    where = self._where(row, -edit)
                else:
                    row.dur = edit / 1000
            if where is None:
                where = numbers[row.pid, row.tid] = self._where(row, 0)
            ph = row.ph
            ts: Any = row.ts  # rows without a time are skipped
            start = round(ts * 1000) if -AT_ONCE_US < ts < AT_ONCE_US else nanoseconds(ts)
            row.ts = (start + shift) / 1000
            if ph == "X":
                dur = row.dur
                row.dur = round(dur * 1000) / 1000 if dur and dur > 0 else 0.0
                if clip:
                    _clip(row, clip)
            elif ph not in "iI":
                where = self._other(row, where)
            elif row.s == _EVERYWHERE:
                row.s = _ON_ITS_TRACK
            row.pid, row.tid = where
        self._index, self._edit_at = index, edit_at
        return [row for row in rows if row.ph] if skipped else rows

    def _where(self, row: Row, lane: int) -> tuple[int, int]:
        return self._places[self._plan.key(row.pid, row.tid), lane]

    def _other(self, row: Row, where: tuple[int, int]) -> tuple[int, int]:
        if row.ph in "BE" and BEGINS in self._plan.lanes[self._plan.key(row.pid, row.tid)]:
            return self._where(row, BEGINS)
        if row.ph == "C":
            _numbers_only(row)
        elif row.id is not None:
            row.id = self._id(row, row.id)
        return where

    def _id(self, row: Row, number: int | str) -> int:
        if self._plan.reused:
            key = (bytes(row.cat), bytes(row.name), number)
            if key in self._plan.reused:
                self._begun[key] += row.ph == "s"
                return self._own_id((*key, self._begun[key]))
        if isinstance(number, int) and 0 <= number < _LARGEST_ID // self._sources:
            return number * self._sources + self._source
        return self._own_id(number)

    def _own_id(self, key: Hashable) -> int:
        """Return a new number for an id that is not a small number, or begins more than once."""
        return _LARGEST_ID + self._odd.setdefault(key, len(self._odd)) * self._sources + self._source


def _clip(row: Row, span: tuple[int, int]) -> None:
    start = nanoseconds(row.ts or 0)
    end = min(start + round((row.dur or 0) * 1000), span[1])
    start = max(start, span[0])
    row.ts, row.dur = start / 1000, max(end - start, 0) / 1000


def _numbers_only(row: Row) -> None:
    args = msgspec.json.decode(row.args)
    kept = {
        key: value for key, value in args.items() if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    if len(kept) < len(args):
        row.args = msgspec.Raw(msgspec.json.encode(kept))
