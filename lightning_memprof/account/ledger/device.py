"""The ledger of a device: each ns of the steps has one owner, at work or by what the host did meanwhile.

A device at work belongs to computation, else to a collective, else to a copy. An idle device belongs to the activity of
the thread that launches the next work, up to the launch; then to the launch, and to the queue. Sums are whole ns.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.ledger.table import Table, joined, summed
from lightning_memprof.account.ledger.work import operator_work, shaped
from lightning_memprof.account.parts import BUSY, PARTS, PHASE_PARTS, Part
from lightning_memprof.read.trace.columns import Kind, is_loading, launches
from lightning_memprof.read.trace.device import copy_kind, device_steps
from lightning_memprof.read.trace.idle import (
    COLLECTS,
    LOADING,
    READS_BACK,
    call_part,
    cold_calls,
    gap_ends,
    is_own_work,
    training_lane,
)
from lightning_memprof.read.trace.intervals import (
    Intervals,
    difference,
    intersection,
    length,
    length_before,
    length_within,
    nearest,
    stretches,
    union,
)
from lightning_memprof.read.trace.modules import HostThreads, Modules, is_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lightning_memprof.read.trace.columns import Step, TraceColumns
    from lightning_memprof.read.trace.communication import CollectiveCall
    from lightning_memprof.read.trace.device import DeviceEvents
    from lightning_memprof.read.trace.intervals import Column
    from lightning_memprof.read.trace.modules import Makers, Tree

    _Numbers: TypeAlias = NDArray[np.signedinteger[Any]] | int

# Time inside an event of these parts is theirs, whatever runs in it; of several the last one.
_ENCLOSING: Final = (Part.COLD_START, Part.IDLE_SYNCHRONIZATION, Part.IDLE_DATA, Part.IDLE_GC_PAUSES)
_BACKWARD: Final = "autograd::engine::evaluate_function: "
# The passes whose kernels have lines of their own, and the action around those of forward.
_PASSES: Final = (Part.FORWARD, Part.BACKWARD)
_FORWARD: Final = re.compile(r"\[pl\]\[profile\]\[Strategy\]\w+\.training_step\Z")
_NONE: Final = -1
# The recording does not have the launch.
_UNKNOWN: Final = -2


def device_ledger(
    columns: TraceColumns,
    device: DeviceEvents,
    steps: list[Step],
    collectives: Sequence[CollectiveCall] = (),
    threads: HostThreads | None = None,
) -> TimeLedger | None:
    """Return the owners of the device's time in the steps; None where nothing ran on a device.

    Args:
        columns: the trace.
        device: its device events.
        steps: by start; without any, the time from the first device event to the last one is the step. Where the host
            is ahead, the device's time for them counts.
        collectives: those of the trace, for their names.
        threads: of the trace, where they are known already.
    """
    if not len(device.busy.starts):
        return None
    if steps:
        ranges = [(step.start, step.end) for step in steps]
        owned = [(step.start, step.end) for step in device_steps(columns, device, steps)]
        basis = "1 recorded step" if len(steps) == 1 else f"{len(steps)} recorded steps"
        basis += "" if owned == ranges else ", as long as the device works for them: the host is ahead"
    else:
        owned = ranges = [(int(device.busy.starts[0]), int(device.busy.ends[-1]))]
        basis = "the time from the first device event to the last one: the trace has no steps"
    start, end = owned[0][0], max(end for _, end in owned)
    if start == end:
        return None
    spans = Intervals(np.array([start], np.int64), np.array([end], np.int64))
    launched = launches(columns, device.rows)
    work = _Work(columns=columns, device=device, spans=spans, launched=launched, collectives=collectives)
    host = _Host(work, ranges, threads or HostThreads(columns))
    lines, passes = _Lines(columns, host.modules), _Lines(columns, host.modules)
    computed = _add_busy(lines, passes, host, work)
    _add_idle(lines, host, work)
    owners = lines.lines(len(ranges))
    durations = [end - start for start, end in owned]
    return TimeLedger(
        step_ns=(end - start) / len(ranges),
        median_ns=float(np.median(durations)),
        steps=len(ranges),
        basis=basis,
        lines=owners,
        communication=tuple(line for line in owners if line.part == Part.COLLECTIVE),
        work=operator_work(columns, [computed], host.modules.path, len(ranges)),
        exposed=stretches(difference(intersection(device.communication, spans), device.compute), columns.origin_ns),
        passes=_of_all_kernels(passes.lines(len(ranges)), owners),
    )


class _Work(msgspec.Struct, frozen=True, kw_only=True):
    """A device's events, the rows of the calls that launched them (-1 for none), and the steps that they are in."""

    columns: TraceColumns
    device: DeviceEvents
    spans: Intervals
    launched: Column
    collectives: Sequence[CollectiveCall]


class _Lines:
    """Owners while they are gathered: columns of numbers, and the texts behind them."""

    def __init__(self, columns: TraceColumns, modules: Modules) -> None:
        self._texts = list(columns.name_of)
        self._numbers: dict[str, int] = {}
        self._tables: list[Table] = []
        self._modules = modules

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
        keys, sums, longest = table[:4].T.tolist(), table[4:6].tolist(), table[6].tolist()
        found = [
            TimeLine(
                part=PARTS[part],
                name="" if label < 0 else self._texts[label],
                module=None if module == _UNKNOWN else self._modules.path(module),
                operator=None if operator < 0 else self._texts[operator].removeprefix(_BACKWARD),
                ns=ns / steps,
                count=count / steps,
                longest_ns=most,
            )
            for (part, label, module, operator), ns, count, most in zip(keys, *sums, longest, strict=True)
            if ns
        ]
        return tuple(sorted(found, key=lambda line: (-line.ns, line.part, line.name, line.operator or "")))


class _Host:
    """What the threads that launch work do, by row of the trace; -1 for events of others.

    Attributes:
        part: ``(n,)`` ``Part.number`` of the time in which the event is the innermost one.
        label: ``(n,)`` number of the name that says more than the part; ``module`` and ``operator`` likewise.
        shaped: ``(n,)`` row of the innermost operator with recorded inputs; one -1 where the trace has none.
        modules: the trace's.
        training: lane of the training thread, -1 where the trace has none.
    """

    def __init__(self, work: _Work, ranges: Sequence[tuple[int, int]], threads: HostThreads) -> None:
        self._columns = columns = work.columns
        count = len(columns.starts)
        self.training = training_lane(columns)
        self.part = np.full(count, _NONE, np.int8)
        self.label, self.module, self.operator = (np.full(count, _NONE, np.int32) for _ in range(3))
        self.shaped = np.full(count if len(columns.shapes.rows) else 1, _NONE, np.int64)
        self.modules = Modules(columns)
        names = _Names(columns, self.modules.named)
        lanes = np.unique(np.append(columns.lanes[work.launched[work.launched >= 0]], self.training))
        found = {int(lane): threads.tree(int(lane)) for lane in lanes}
        for tree in found.values():
            self.part[tree.rows] = names.parts(tree.rows)
        cold = cold_calls(columns, work.device, ranges)
        self.part[cold[self.part[cold] >= 0]] = Part.COLD_START.number
        # The training thread first: the others run the nodes that it makes.
        self._forward: Makers | None = None
        self.trees = found
        for _, tree in sorted(found.items(), key=lambda item: item[0] != self.training):
            self._describe(tree, names)
            self._forward = self._forward or self.modules.makers(tree.rows, self.module[tree.rows].astype(np.int64))

    def _describe(self, tree: Tree, names: _Names) -> None:
        columns, (rows, parents, _) = self._columns, tree
        kinds, known = columns.kinds[rows], columns.names[rows]

        def around(marked: NDArray[np.bool_], values: NDArray[np.int32], target: NDArray[np.int32]) -> None:
            at = nearest(parents, marked)
            target[rows[at >= 0]] = values[at[at >= 0]]

        around(kinds == Kind.OPERATOR, known, self.operator)
        if len(columns.shapes.rows):
            at = nearest(parents, columns.shapes.of(rows) >= 0)
            self.shaped[rows] = np.where(at >= 0, rows[at], _NONE)
        self.module[rows] = self.modules.around(rows, parents, self._forward)
        is_python = (kinds == Kind.PYTHON) | (kinds == Kind.ANNOTATION)
        self.label[rows] = np.where((kinds == Kind.OPERATOR) | self.modules.named[known], _NONE, known)
        places = np.full(len(self.label), _NONE, np.int32)
        around(is_python & names.places[known], known, places)
        self.label[rows] = np.where(is_python & (places[rows] >= 0), places[rows], self.label[rows])
        self.label[rows[is_python & names.own[known] & (places[rows] < 0)]] = _NONE
        own = self.part[rows]
        for part in _ENCLOSING:
            at = nearest(parents, own == part.number)
            inside = rows[at >= 0]
            self.part[inside] = part.number
            self.label[inside] = known[at[at >= 0]]

    def shares(self, lane: int, when: Intervals) -> tuple[Column, Column, Intervals]:
        """Return a thread's rows, the time of each as innermost event within a set, and the rest of the set."""
        thread = self.trees.get(lane)
        if thread is None or not len(thread.rows):
            return np.empty(0, np.int64), np.empty(0, np.int64), when
        starts = self._columns.starts[thread.rows]
        inside = length_before(when, thread.ends) - length_before(when, starts)
        own = inside.copy()
        children = np.flatnonzero(thread.parents >= 0)
        np.subtract.at(own, thread.parents[children], inside[children])
        roots = thread.parents < 0
        return thread.rows, own, difference(when, union(starts[roots], thread.ends[roots]))


class _Names:
    """What the names of a trace say, by number of the name.

    Attributes:
        places: whether the name is a place in the program: a line of the user's code, or a range.
        own: whether it is work of this package.
    """

    def __init__(self, columns: TraceColumns, modules: NDArray[np.bool_]) -> None:
        self._columns = columns
        self.own = columns.named(is_own_work)
        self.places = columns.named(is_place) & ~modules
        self._collects = columns.named(COLLECTS.search)

    def parts(self, rows: Column) -> NDArray[np.int8]:
        """Return the part of each event by its kind and name alone, by its number."""
        columns = self._columns
        kinds, known = columns.kinds[rows], columns.names[rows]
        of_kind: dict[int, list[Part]] = {
            Kind.RUNTIME: [call_part(name) for name in columns.name_of],
            Kind.OPERATOR: [
                Part.IDLE_SYNCHRONIZATION if name in READS_BACK else Part.IDLE_OPERATORS for name in columns.name_of
            ],
            Kind.ANNOTATION: [Part.IDLE_DATA if is_loading(name) else Part.IDLE_PYTHON for name in columns.name_of],
            Kind.PYTHON: [Part.IDLE_PYTHON] * len(columns.name_of),
        }
        found = np.full(len(rows), _NONE, np.int8)
        for kind, parts in of_kind.items():
            numbers = np.array([part.number for part in parts], np.int8)
            found[kinds == kind] = numbers[known[kinds == kind]]
        found[self._collects[known] & (kinds != Kind.RUNTIME)] = Part.IDLE_GC_PAUSES.number
        return found


def _add_busy(lines: _Lines, passes: _Lines, host: _Host, work: _Work) -> Table:
    """Add the device's work: each ns belongs to the first event of computation, else of a collective, else a copy.

    Add the computation of forward and backward to ``passes``, too. Return computation by the inputs of the operators
    that launched it.
    """
    columns, device = work.columns, work.device
    rows = device.rows
    starts, ends = columns.starts[rows], columns.ends[rows]
    computes = ~device.communicates & ~device.copies
    own = np.zeros(len(rows), np.int64)
    free = work.spans
    for chosen, busy in (
        (computes, device.compute),
        (device.communicates, device.communication),
        (device.copies, device.memory_copy),
    ):
        reach = np.maximum.accumulate(np.append(np.iinfo(np.int64).min, ends[chosen]))
        first, last = np.maximum(starts[chosen], reach[:-1]), np.maximum(ends[chosen], reach[:-1])
        own[chosen] = length_before(free, last) - length_before(free, first)
        free = difference(free, busy)
    known = work.launched >= 0
    operator = np.where(known, host.operator[work.launched], _NONE)
    worked = np.where(computes, _with_usual(columns.names[rows].astype(np.int64), operator, own), operator)
    module = np.where(known & ~device.communicates, host.module[work.launched], _UNKNOWN)
    numbers = [part.number for part in BUSY]
    lines.add(
        np.where(computes, numbers[0], np.where(device.communicates, numbers[1], numbers[2])),
        _labels(lines, work, computes),
        module,
        np.where(device.communicates, _NONE, worked),
        ns=own,
        longest=ends - starts,
    )
    texts = np.array([*map(passes.text, _PASSES), _NONE], np.int64)
    in_pass = np.where(computes, texts[_pass_of(columns, work.launched, host.training)], _NONE)
    passes.add(numbers[0], in_pass, module, operator, ns=np.where(in_pass >= 0, own, 0), longest=ends - starts)
    made = np.where(known & computes & (own > 0), host.shaped[work.launched if len(columns.shapes.rows) else 0], _NONE)
    _, first = np.unique(made, return_index=True)  # an operator may launch several kernels
    is_first = np.zeros(len(rows), np.bool_)
    is_first[first] = True
    calls = np.maximum(made, 0)
    inputs = np.where(made >= 0, columns.shapes.of(calls), _NONE)
    return shaped(numbers[0], inputs, host.module[calls], columns.names[calls], own, is_first)


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


def _pass_of(columns: TraceColumns, launched: Column, training: int) -> Column:
    """Return the place in ``_PASSES`` of each launch, -1 where it is in neither.

    Autograd runs the backward of a device in other threads than the training's.
    """
    rows = columns.rows_named(_FORWARD.match, Kind.ANNOTATION, Kind.OPERATOR)
    forward = union(columns.starts[rows], columns.ends[rows])
    at = columns.starts[launched]
    is_forward = length_within(forward, at, at + 1) > 0
    nodes = columns.rows_named(lambda name: name.startswith(_BACKWARD), Kind.OPERATOR)
    lanes = columns.lanes[launched]
    is_backward = np.isin(lanes, np.unique(columns.lanes[nodes])) & (lanes != training)
    return np.where(launched < 0, _NONE, np.where(is_backward, 1, np.where(is_forward, 0, _NONE)))


def _of_all_kernels(passes: Sequence[TimeLine], owners: Sequence[TimeLine]) -> tuple[TimeLine, ...]:
    """Return the lines of passes for all computation: kernels that were launched before the recording are like them."""
    computed = [line for line in owners if line.part == Part.COMPUTE]
    known = total(line for line in computed if line.module is not None)
    scale = total(computed) / known if known else 1.0
    return tuple(replace(line, part=PHASE_PARTS[line.name], name="", ns=scale * line.ns) for line in passes)


def _labels(lines: _Lines, work: _Work, computes: NDArray[np.bool_]) -> Column:
    """Return numbers of the names of collectives, and of the kinds of copies."""
    columns, rows = work.columns, work.device.rows
    called = {call.row: lines.text(call.name) for call in work.collectives}
    copied: dict[int, int] = {}
    found = np.full(len(rows), _NONE, np.int64)
    for at in np.flatnonzero(~computes).tolist():
        row, name = int(rows[at]), int(columns.names[rows[at]])
        if work.device.communicates[at]:
            found[at] = called.get(row, name)
            continue
        if name not in copied:
            kind, is_pageable = copy_kind(columns.name_of[name])
            memory = "" if is_pageable is None else " (pageable)" if is_pageable else " (pinned)"
            copied[name] = lines.text(kind + memory)
        found[at] = copied[name]
    return found


def _add_idle(lines: _Lines, host: _Host, work: _Work) -> None:
    """Add the idle time: before the launch of the next work by what its thread did, then the launch, then the queue.

    Calls of the host count where they have idle time.
    """
    columns = work.columns
    idle = difference(work.spans, work.device.busy)
    loads = columns.rows(Kind.OVERHEAD)
    loads = loads[columns.named(LOADING.__contains__)[columns.names[loads]]]
    for row in loads.tolist():
        loading = intersection(idle, union(columns.starts[[row]], columns.ends[[row]]))
        lines.add(
            Part.IDLE_LOADING.number, int(columns.names[row]), _NONE, _NONE, ns=length(loading), longest=length(loading)
        )
        idle = difference(idle, loading)
    ends = gap_ends(columns, work.device, idle)
    known = np.flatnonzero(ends.calls >= 0)
    launch = ends.calls[known]
    spent, queued = (ends.ready - ends.called)[known], (idle.ends - ends.ready)[known]
    lines.add(
        host.part[launch],
        host.label[launch],
        host.module[launch],
        host.operator[launch],
        ns=spent,
        longest=np.maximum(spent, columns.ends[launch] - columns.starts[launch]),
    )
    lines.add(Part.IDLE_QUEUE.number, _NONE, host.module[launch], host.operator[launch], ns=queued, longest=queued)
    lanes = np.where(ends.calls >= 0, columns.lanes[ends.calls], host.training)
    for lane in np.unique(lanes).tolist():
        mine = lanes == lane
        left = Intervals(idle.starts[mine], ends.called[mine])
        left = Intervals(*(column[left.ends > left.starts] for column in left))
        for thread in dict.fromkeys((lane, host.training)):
            rows, own, left = host.shares(thread, left)
            rows, own = rows[own > 0], own[own > 0]  # most events run while the device is busy
            longest = np.where(columns.kinds[rows] == Kind.RUNTIME, columns.ends[rows] - columns.starts[rows], own)
            lines.add(
                host.part[rows], host.label[rows], host.module[rows], host.operator[rows], ns=own, longest=longest
            )
        rest = left.ends - left.starts
        part = (Part.IDLE_PYTHON if host.training >= 0 else Part.IDLE_UNKNOWN).number
        lines.add(part, _NONE, _NONE, _NONE, ns=rest, longest=rest)
