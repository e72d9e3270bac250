"""The ledger of a device: each ns of the steps has one owner, at work or by what the host did meanwhile.

A device at work belongs to computation, else to a collective, else to a copy. An idle device belongs to the activity of
the thread that launches the next work, up to the launch; then to the launch, and to the queue. Sums are whole ns.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.ledger.table import NODE, Table, joined, summed, time_lines
from lightning_memprof.account.ledger.work import operator_work, shaped
from lightning_memprof.account.parts import BUSY, PARTS, Part
from lightning_memprof.account.trace.cold import graph_captures
from lightning_memprof.account.trace.device import LATENCY_NS, copy_kind, totals_by
from lightning_memprof.account.trace.events import HostEvents, Thread, is_own_work
from lightning_memprof.account.trace.model import IdleCause
from lightning_memprof.account.trace.table import EventTable
from lightning_memprof.read.trace.columns import Kind, TraceColumns
from lightning_memprof.read.trace.intervals import (
    Column,
    Intervals,
    difference,
    innermost_stretches,
    intersection,
    length,
    length_before,
    length_within,
    nearest,
    overlaps,
    stretches,
    union,
)

_Numbers: TypeAlias = NDArray[np.signedinteger[Any]] | int

# Time inside an event of these parts is theirs, whatever runs in it; of several the last one.
_ENCLOSING: Final = (Part.COLD_START, Part.IDLE_SYNCHRONIZATION, Part.IDLE_DATA, Part.IDLE_GC_PAUSES)
# The action around the kernels of forward.
_FORWARD: Final = re.compile(r"\[pl\]\[profile\]\[Strategy\]\w+\.training_step\Z")
_NONE: Final = -1
# The recording does not have the launch.
_UNKNOWN: Final = -2


def device_account(table: EventTable) -> tuple[TimeLedger | None, tuple[IdleCause, ...]]:
    """Return the owners of the device's time in the steps, None where nothing ran on a device, and the causes of gaps.

    Without steps, the time from the first device event to the last one is the step. Where the host is ahead, the
    device's time for the steps counts.
    """
    columns, device, count = table.columns, table.device, len(table.ranges)
    if not len(device.busy.starts):
        return None, ()
    basis = "the time from the first device event to the last one: the trace has no steps"
    if table.steps:
        basis = "1 recorded step" if count == 1 else f"{count} recorded steps"
    if table.ahead:
        basis += ", as long as the device works for them: the host is ahead"
    owned = table.ahead or table.ranges
    if len(device.unrecorded.starts):
        basis += ", without the time in which work may run that is not in the trace"
    ends = np.array([[owned[0].start], [max(step.end for step in owned)]], np.int64)
    spans = difference(union(*ends), device.unrecorded)
    if not len(spans.starts):
        return None, ()
    host = _Host(table)
    lines, passes = _Lines(columns, table.host), _Lines(columns, table.host)
    computed = _add_busy(lines, passes, host, table, spans)
    idle = _add_idle(lines, host, table, spans)
    owners = lines.lines(count)
    ledger = TimeLedger(
        step_ns=length(spans) / count,
        median_ns=float(np.median([step.end - step.start for step in owned])),
        steps=count,
        basis=basis,
        lines=owners,
        communication=tuple(line for line in owners if line.part == Part.COLLECTIVE),
        work=operator_work(columns, [computed], table.host.path, count),
        exposed=stretches(difference(intersection(device.communication, spans), device.compute), columns.origin_ns),
        passes=_of_all_kernels(passes.lines(count), owners),
    )
    return ledger, idle


class _Lines:
    """Owners while they are gathered: columns of numbers, and the texts behind them."""

    def __init__(self, columns: TraceColumns, events: HostEvents) -> None:
        self._texts = list(columns.name_of)
        self._numbers: dict[str, int] = {}
        self._tables: list[Table] = []
        self._events = events

    def text(self, text: str) -> int:
        """Return the number of a text that need not be the name of an event."""
        if text not in self._numbers:
            self._numbers[text] = len(self._texts)
            self._texts.append(text)
        return self._numbers[text]

    def add(self, *key: _Numbers, ns: Column | int, longest: Column | int) -> None:
        """Add times.

        Args:
            key: number of the part, and of the label's, the module's and the operator's texts; each ``(m,)`` or one.
            ns: ``(m,)``; owners without time are left out.
            longest: ``(m,)`` duration of the calls.
        """
        rows = np.broadcast_arrays(*key, ns, np.int8(1), longest)
        self._tables.append(summed(*(column.reshape(-1) for column in rows)))

    def lines(self, steps: int) -> tuple[TimeLine, ...]:
        """Return the owners, the longest first."""
        table = joined(self._tables)
        table = table[:, table[4] != 0]
        found = time_lines(table, steps, self._texts, lambda at: None if at == _UNKNOWN else self._events.path(at))
        return tuple(sorted(found, key=lambda line: (-line.ns, line.part, line.name, line.operator or "")))


class _Host:
    """What the threads that launch work do, by row of the trace; -1 for events of others.

    Attributes:
        part: ``(n,)`` ``Part.number`` of the time in which the event is the innermost one.
        label: ``(n,)`` number of the name that says more than the part; ``module`` likewise.
        outer: ``(n,)`` row of the event that names the activity: in Python the place around it, else the outermost one
            of the same part.
        shaped: ``(n,)`` row of the innermost operator with recorded inputs; one -1 where the trace has none.
        training: lane of the training thread, -1 where the trace has none.
    """

    def __init__(self, table: EventTable) -> None:
        self._columns = columns = table.columns
        self._launched, events = table.device.launched, table.host
        count = len(columns.starts)
        self.training, self.module, self._events = events.training, events.module, events
        self.part = np.full(count, _NONE, np.int8)
        self.label = np.full(count, _NONE, np.int32)
        self.outer = np.full(count, _NONE, np.int64)
        self.shaped = np.full(count if len(columns.shapes.rows) else 1, _NONE, np.int64)
        self._own, self._places = columns.named(is_own_work), events.is_place & ~events.is_module
        self.is_named = ~(self._own | events.is_module)
        lanes = np.unique(np.append(columns.lanes[self._launched[self._launched >= 0]], self.training))
        found = {int(lane): events.thread(int(lane)) for lane in lanes}
        for thread in found.values():
            self.part[thread.rows] = table.part[thread.rows]
        cold = table.cold
        self.part[cold[self.part[cold] >= 0]] = Part.COLD_START.number
        self.threads = found
        for thread in found.values():
            self._describe(thread)

    def _describe(self, thread: Thread) -> None:
        columns, (rows, parents, _) = self._columns, thread
        kinds, known = columns.kinds[rows], columns.names[rows]

        if len(columns.shapes.rows):
            at = nearest(parents, columns.shapes.of(rows) >= 0)
            self.shaped[rows] = np.where(at >= 0, rows[at], _NONE)
        is_python = (kinds == Kind.PYTHON) | (kinds == Kind.ANNOTATION)
        self.label[rows] = np.where((kinds == Kind.OPERATOR) | self._events.is_module[known], _NONE, known)
        place = nearest(parents, is_python & self._places[known])
        self.label[rows] = np.where(is_python & (place >= 0), known[place], self.label[rows])
        self.label[rows[is_python & self._own[known] & (place < 0)]] = _NONE
        own = self.part[rows]
        for part in _ENCLOSING:
            at = nearest(parents, own == part.number)
            inside = rows[at >= 0]
            self.part[inside] = part.number
            self.label[inside] = known[at[at >= 0]]
        own = self.part[rows]
        is_outer = (parents < 0) | (own[parents] != own)
        in_python = own == Part.IDLE_PYTHON.number
        outer = np.where(in_python, place, nearest(parents, is_outer))
        self.outer[rows] = np.where(outer >= 0, rows[outer], rows)

    def key(self, rows: Column) -> tuple[NDArray[np.int32], ...]:
        """Return label, module and operator of events."""
        return self.label[rows], self.module[rows], self.operator(rows)

    def operator(self, rows: Column) -> NDArray[np.int32]:
        """Return the number of the name of the innermost operator around events, -1 for none."""
        found = self._events.operator[rows]
        return np.where(found >= 0, self._columns.names[found], np.int32(_NONE))

    def pieces(self, lane: int, when: Intervals) -> tuple[Column, Intervals, Intervals]:
        """Return a thread's innermost events within a set, the pieces of it with each, and the rest of the set."""
        thread = self.threads.get(lane)
        if thread is None or not len(thread.rows):
            return np.empty(0, np.int64), Intervals(when.starts[:0], when.ends[:0]), when
        starts = self._columns.starts[thread.rows]
        meets = length_within(when, starts, np.maximum(starts, thread.ends)) > 0
        inner, found = innermost_stretches(starts, thread.ends, thread.parents, meets)
        at, pieces = overlaps(found, when)
        roots = thread.parents < 0
        return thread.rows[inner[at]], pieces, difference(when, union(starts[roots], thread.ends[roots]))

    def launches(self, rows: Column) -> NDArray[np.bool_]:
        """Return whether device work is launched while each event runs: by its thread, and in Python by any."""
        found = np.zeros(len(rows), np.bool_)
        columns, calls = self._columns, self._launched[self._launched >= 0]
        in_python = np.isin(columns.kinds[rows], (Kind.PYTHON, Kind.ANNOTATION))
        for lane in (_NONE, *np.unique(columns.lanes[rows]).tolist()):
            mine = in_python if lane == _NONE else columns.lanes[rows] == lane
            called = np.sort(columns.starts[calls if lane == _NONE else calls[columns.lanes[calls] == lane]])
            ends = np.searchsorted(called, columns.ends[rows[mine]])
            found[mine] |= ends > np.searchsorted(called, columns.starts[rows[mine]])
        return found


def _add_busy(lines: _Lines, passes: _Lines, host: _Host, table: EventTable, spans: Intervals) -> Table:
    """Add the device's work: each ns belongs to the first event of computation, else of a collective, else a copy.

    Add the computation of forward and backward to ``passes``, too. Return computation by the inputs of the operators
    that launched it.
    """
    columns, device, launched = table.columns, table.device, table.device.launched
    rows = device.rows
    starts, ends = columns.starts[rows], columns.ends[rows]
    computes, communicates = (device.part == part.number for part in (Part.COMPUTE, Part.COLLECTIVE))
    own = np.zeros(len(rows), np.int64)
    free = spans
    for part, busy in zip(BUSY, (device.compute, device.communication, device.memory_copy), strict=True):
        chosen = device.part == part.number
        own[chosen] = _first(free, starts[chosen], ends[chosen])
        free = difference(free, busy)
    known = launched >= 0
    operator = np.where(known, host.operator(launched), _NONE)
    worked = np.where(computes, _with_usual(columns.names[rows].astype(np.int64), operator, own), operator)
    module = np.where(known & ~communicates, host.module[launched], _UNKNOWN)
    lines.add(
        device.part,
        _labels(lines, table, computes),
        module,
        np.where(communicates, _NONE, worked),
        ns=own,
        longest=ends - starts,
    )
    in_pass = np.where(computes, _passes(columns, launched, host.training), _NONE)
    passes.add(in_pass, _NONE, module, operator, ns=np.where(in_pass >= 0, own, 0), longest=ends - starts)
    # Each device has its own rate, also while others compute.
    number_of = np.unique([str(process) for process, _ in columns.lane_of], return_inverse=True)[1]
    alone, numbers = np.zeros(len(rows), np.int64), number_of[columns.lanes[rows]]
    for number in np.unique(numbers).tolist():
        chosen = computes & (numbers == number)
        alone[chosen] = _first(spans, starts[chosen], ends[chosen])
    made = np.where(known & computes & (alone > 0), host.shaped[launched if len(columns.shapes.rows) else 0], _NONE)
    _, first = np.unique(made, return_index=True)  # an operator may launch several kernels
    is_first = np.zeros(len(rows), np.bool_)
    is_first[first] = True
    calls = np.maximum(made, 0)
    inputs = np.where(made >= 0, columns.shapes.of(calls), _NONE)
    return shaped(Part.COMPUTE.number, inputs, host.module[calls], columns.names[calls], alone, is_first)


def _first(when: Intervals, starts: Column, ends: Column) -> Column:
    """Return the time of a set that belongs to each event, by start: time in several belongs to the first."""
    reach = np.maximum.accumulate(np.append(np.iinfo(np.int64).min, ends))
    first, last = np.maximum(starts, reach[:-1]), np.maximum(ends, reach[:-1])
    return length_before(when, last) - length_before(when, first)


def _with_usual(names: Column, operators: Column, ns: Column) -> Column:
    """Return the operator of each kernel; without one, that of most of the time of kernels of its name, else the name.

    A kernel that was launched before the recording, or by a graph, has no operator.
    """
    found, known = operators.copy(), operators >= 0
    most = int(operators.max(initial=0)) + 1
    pairs, inverse = np.unique(names[known] * most + operators[known], return_inverse=True)
    spent = np.bincount(inverse.reshape(-1), weights=ns[known], minlength=len(pairs))
    usual = {pair // most: pair % most for pair in pairs[np.argsort(spent, kind="stable")].tolist()}
    found[~known] = [usual.get(name, name) for name in names[~known].tolist()]
    return found


def _passes(columns: TraceColumns, launched: Column, training: int) -> Column:
    """Return the number of forward or backward for each launch in it, else -1.

    Autograd runs the backward of a device in other threads than the training's.
    """
    rows = columns.rows_named(_FORWARD.match, Kind.ANNOTATION, Kind.OPERATOR)
    forward = union(columns.starts[rows], columns.ends[rows])
    at = columns.starts[launched]
    is_forward = length_within(forward, at, at + 1) > 0
    nodes = columns.rows_named(lambda name: name.startswith(NODE), Kind.OPERATOR)
    lanes = columns.lanes[launched]
    is_backward = np.isin(lanes, np.unique(columns.lanes[nodes])) & (lanes != training)
    in_pass = np.where(is_backward, Part.BACKWARD.number, np.where(is_forward, Part.FORWARD.number, _NONE))
    return np.where(launched < 0, _NONE, in_pass)


def _of_all_kernels(passes: Sequence[TimeLine], owners: Sequence[TimeLine]) -> tuple[TimeLine, ...]:
    """Return the lines of passes for all computation: kernels that were launched before the recording are like them."""
    computed = [line for line in owners if line.part == Part.COMPUTE]
    known = total(line for line in computed if line.module is not None)
    scale = total(computed) / known if known else 1.0
    return tuple(replace(line, ns=scale * line.ns) for line in passes)


def _labels(lines: _Lines, table: EventTable, computes: NDArray[np.bool_]) -> Column:
    """Return numbers of the names of collectives, and of the kinds of copies."""
    columns, rows = table.columns, table.device.rows
    called = {call.row: lines.text(call.name) for call in table.collectives}
    copied: dict[int, int] = {}
    found = np.full(len(rows), _NONE, np.int64)
    for at in np.flatnonzero(~computes).tolist():
        row, name = int(rows[at]), int(columns.names[rows[at]])
        if table.device.part[at] == Part.COLLECTIVE.number:
            found[at] = called.get(row, name)
            continue
        if name not in copied:
            kind, is_pageable = copy_kind(columns.name_of[name])
            memory = "" if is_pageable is None else " (pageable)" if is_pageable else " (pinned)"
            copied[name] = lines.text(kind + memory)
        found[at] = copied[name]
    return found


class _Gaps:
    """The gaps in a device's work while their owners are gathered."""

    def __init__(self, lines: _Lines, host: _Host, columns: TraceColumns, gaps: Intervals) -> None:
        self._lines, self._host, self._columns, self._gaps = lines, host, columns, gaps
        self._by_gap: dict[Part, Column] = {}
        self._events: dict[Part, list[tuple[Column, Column]]] = defaultdict(list)

    def add(
        self, part: NDArray[Any], when: Intervals, rows: Column, *key: _Numbers, named: Column | None = None
    ) -> None:
        """Add pieces of idle time.

        Args:
            part: ``(m,)`` ``Part.number`` of each.
            when: ``(m,)`` the pieces; empty ones are left out.
            rows: ``(m,)`` event that each is a part of, -1 for none.
            key: numbers of the label's, the module's and the operator's texts of the ledger's line.
            named: ``(m,)`` event that names the activity; None for the event itself.
        """
        ns = when.ends - when.starts
        events = np.where(rows >= 0, rows, -1 - np.arange(len(rows)))
        calls, first, own = np.unique(events, return_index=True, return_inverse=True)
        sums = np.zeros(len(calls), np.int64)
        np.add.at(sums, own.reshape(-1), ns)
        columns = self._columns
        of_call = (calls >= 0) & (columns.kinds[calls] == Kind.RUNTIME)
        longest = np.where(of_call, np.maximum(sums, columns.ends[calls] - columns.starts[calls]), sums)
        owners = np.broadcast_arrays(part, *key, ns)[:-1]
        some = sums > 0
        self._lines.add(*(column[first][some] for column in owners), ns=sums[some], longest=longest[some])
        gap = np.searchsorted(self._gaps.starts, when.starts, side="right") - 1
        for number in np.unique(part[ns > 0]).tolist():
            mine, cause = (part == number) & (ns > 0), PARTS[number]
            if cause is not Part.IDLE_UNKNOWN:
                by_gap = self._by_gap.setdefault(cause, np.zeros(len(self._gaps.starts), np.int64))
                np.add.at(by_gap, gap[mine], ns[mine])
                self._events[cause].append(((rows if named is None else named)[mine], ns[mine]))

    def causes(self) -> tuple[IdleCause, ...]:
        """Return the sums by cause, longest first."""
        found = []
        for cause, by_gap in self._by_gap.items():
            total_ns = int(by_gap.sum())
            if not total_ns:
                continue
            gaps = -np.sort(-by_gap)
            found.append(
                IdleCause(
                    cause=cause,
                    total_ns=total_ns,
                    count=int(np.count_nonzero(by_gap)),
                    longest_ns=int(by_gap.max()),
                    longest_start_ns=self._columns.origin_ns + int(self._gaps.starts[np.argmax(by_gap)]),
                    long_ns=int(gaps[np.searchsorted(np.cumsum(gaps), total_ns / 2)]),
                    **self._named(cause, total_ns),
                )
            )
        return tuple(sorted(found, key=lambda row: (-row.total_ns, row.cause)))

    def _named(self, cause: Part, total_ns: int) -> dict[str, Any]:
        """Return the fields of a cause that name it: the event with most of the time, and the one without launches."""
        rows, ns = (np.concatenate(column) for column in zip(*self._events[cause], strict=True))
        columns = self._columns
        known = np.flatnonzero(rows >= 0)
        if cause is Part.IDLE_PYTHON:
            known = known[self._host.is_named[columns.names[rows[known]]]]
        if not len(known):
            return {"example": ""}
        rows, ns = rows[known], ns[known]
        launches = self._host.launches(rows)
        names = columns.names[rows]
        most = max(totals_by(names, ns), key=lambda total: total.ns)
        result = {
            "example": columns.name_of[most.key],
            "example_share": most.ns / total_ns,
            "launches": 2 * int(ns[launches & (names == most.key)].sum()) > most.ns,
        }
        if not np.all(launches):
            most = max(totals_by(names[~launches], ns[~launches]), key=lambda total: total.ns)
            result |= {"apart": columns.name_of[most.key], "apart_ns": most.ns}
        return result


def _add_idle(lines: _Lines, host: _Host, table: EventTable, spans: Intervals) -> tuple[IdleCause, ...]:
    """Add the idle time: before the launch of the next work by what its thread did, then the launch, then the queue.

    Each gap in the device's work ends with an event, and a call on some thread launched that event. The call, and the
    latency of a launch after it, is a launch; where the event starts later still, the event is queued: it waits for
    another stream, a copy, or another rank. Where a thread of autograd had not begun yet, the cause is whatever the
    training thread did. Calls of the host count where they have idle time. Return the gaps by cause.
    """
    columns = table.columns
    idle = difference(spans, table.device.busy)
    gaps = _Gaps(lines, host, columns, idle)
    loading = np.flatnonzero((columns.kinds == Kind.OVERHEAD) & (table.part == Part.IDLE_LOADING.number)).tolist()
    # These have the idle time in them whatever the host does.
    found = [(Part.IDLE_LOADING, row, int(columns.starts[row]), int(columns.ends[row])) for row in loading]
    found += [(Part.COLD_START, *capture) for capture in graph_captures(columns, idle, table.ranges)]
    for part, row, start, end in found:
        once = intersection(idle, union(np.array([start]), np.array([end])))
        if len(once.starts):
            rows = np.full(len(once.starts), row)
            gaps.add(np.full(len(rows), part.number), once, rows, columns.names[rows], _NONE, _NONE)
            idle = difference(idle, once)
    # The events behind the gaps, the calls that launched them, and when they could have started.
    at = np.searchsorted(columns.starts[table.device.rows], idle.ends)
    events, calls = np.append(table.device.rows, _NONE)[at], np.append(table.device.launched, _NONE)[at]
    known = np.flatnonzero(calls >= 0)
    launch, begins, ends = calls[known], idle.starts[known], idle.ends[known]
    called = idle.ends.copy()
    called[known] = np.clip(columns.starts[launch], begins, ends)
    ready = np.clip(columns.ends[launch] + LATENCY_NS, called[known], ends)
    in_call = Intervals(called[known], ready)
    gaps.add(host.part[launch], in_call, launch, *host.key(launch), named=host.outer[launch])
    queue = np.full(len(known), Part.IDLE_QUEUE.number)
    gaps.add(queue, Intervals(ready, ends), events[known], _NONE, host.module[launch], host.operator(launch))
    lanes = np.where(calls >= 0, columns.lanes[calls], host.training)
    for lane in np.unique(lanes).tolist():
        mine = lanes == lane
        left = Intervals(idle.starts[mine], called[mine])
        left = Intervals(*(column[left.ends > left.starts] for column in left))
        for thread in dict.fromkeys((lane, host.training)):
            rows, pieces, left = host.pieces(thread, left)
            gaps.add(host.part[rows], pieces, rows, *host.key(rows), named=host.outer[rows])
        nothing = np.full(len(left.starts), _NONE)
        rest = (Part.IDLE_PYTHON if host.training >= 0 else Part.IDLE_UNKNOWN).number
        gaps.add(np.full(len(nothing), rest), left, nothing, nothing, _NONE, _NONE)
    return gaps.causes()
