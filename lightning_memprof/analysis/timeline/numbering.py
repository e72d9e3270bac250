"""Small positive numbers for processes and tracks, their names and their order on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from lightning_memprof.analysis.timeline.plan import BEGINS, Key, Plan, ProcessFacts
from lightning_memprof.analysis.timeline.rows import Row

__all__ = ["Numbering", "Places"]

_LAST: Final = 1 << 40

Process = tuple[str, int | str]
Places = dict[tuple[Key, int], tuple[int, int]]


class Numbering:
    """Which process and track number each event of each source gets.

    Sources with one label share processes and tracks, but where their slices would overlap in time.

    Args:
        plans: of all sources, in their order.
        shifts: per source what is added to its times, in ns.
    """

    def __init__(self, plans: Sequence[Plan], shifts: Sequence[int]) -> None:
        self._places: list[Places] = [{} for _ in plans]
        self._rows: list[Row] = []
        self._processes: dict[Process, int] = {}
        self._thread = 0
        processes = _in_order(plans)
        self._thread = len(processes)
        for number, process in enumerate(processes, start=1):
            self._processes[process] = number
            self._name_process(number, process, plans)
        for process, number in self._processes.items():
            self._number_threads(number, process, plans, shifts)

    def places(self, source: int) -> Places:
        """The process and track number of each track and lane of a source."""
        return self._places[source]

    def metadata(self) -> list[Row]:
        """The metadata events: names and order of processes and tracks."""
        return self._rows

    def _name_process(self, number: int, process: Process, plans: Sequence[Plan]) -> None:
        label, pid = process
        facts = _facts(process, plans)
        if label:
            what = pid if isinstance(pid, str) else facts.labels or facts.name or str(pid)
            name = f"{label} · {what}" if what else label
        else:
            name = facts.name or str(pid)
            if facts.labels:
                self._tell("process_labels", number, None, labels=facts.labels)
        self._tell("process_name", number, None, name=name)
        self._tell("process_sort_index", number, None, sort_index=number)

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
                        self._tell("thread_name", number, self._thread, name=name + _suffix(lane, again))
                        self._tell("thread_sort_index", number, self._thread, sort_index=order)
                    track, spans = rows[lane, again]
                    if moved:
                        spans.append(moved)
                    self._places[at][(pid, tid), lane] = (number, track)

    def _tell(self, what: str, pid: int, tid: int | None, **args: Any) -> None:
        encode = msgspec.json.encode
        self._rows.append(Row(ph="M", name=msgspec.Raw(encode(what)), pid=pid, tid=tid, args=msgspec.Raw(encode(args))))


def _in_order(plans: Sequence[Plan]) -> list[Process]:
    """All processes that have events: by the source's place, by label, and as the source itself orders them."""
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
