"""The host ledger of a trace: what the training thread does in each ns of its steps, by part, module and operator.

An instant belongs to the innermost event of the training thread. Where that thread waits for autograd's threads in
backward, it belongs to what these run. Operators of backward belong to the module whose forward made their node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.ledger.table import NODE, Table, joined, summed, time_lines
from lightning_memprof.account.ledger.work import operator_work, shaped
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.events import MODULES, RANGES, action_name, is_profiler, meeting, part_of
from lightning_memprof.account.trace.classify import COLLECTS
from lightning_memprof.account.trace.collectives import host_collectives
from lightning_memprof.account.trace.events import HostEvents, Places, node_makers
from lightning_memprof.account.trace.spans import Step
from lightning_memprof.account.trace.table import EventTable
from lightning_memprof.read.trace.columns import Kind, TraceColumns
from lightning_memprof.read.trace.communication import common_name
from lightning_memprof.read.trace.intervals import (
    Column,
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

_ACTION: Final = "[pl][profile]"
_RANGES: Final[Mapping[str, Part]] = {
    **RANGES,
    NODE: Part.BACKWARD,
    "<built-in method run_backward": Part.BACKWARD,
    "_compile.compile_inner (dynamo_timed)": Part.COMPILE,
    "[pl][forward_hook]": Part.FORWARD_HOOK,
    "[pl][backward_hook]": Part.BACKWARD_HOOK,
}
# Python functions of a program without Lightning, whose actions would say it.
_CALLS_OF: Final[tuple[tuple[re.Pattern[str], Part], ...]] = (
    (COLLECTS, Part.GC_PAUSES),
    (re.compile(r"torch/serialization\.py\(\d+\): save\Z|torch/distributed/checkpoint/.*: save\Z"), Part.CHECKPOINT),
)
_STEP: Final = "Optimizer.step#"
# A hook of Python that begins or ends a range takes less.
RANGE_NS: Final = 50_000
_HOOKS: Final = ("[pl][forward_hook]", "[pl][backward_hook]")
_NONE: Final = -1
# Pairs and triplets of inputs; more forwards are a loop over time, or over samples.
MAX_FORWARDS: Final = 3
_CALLS: Final = "c10d::"
# A validation inside a fit is one part, as in the hook timings, less these.
_BESIDE_VALIDATION: Final = (
    Part.CALLBACK.number, Part.LOGGING.number, Part.CHECKPOINT.number, Part.PROFILER.number, Part.GC_PAUSES.number,
)  # fmt: skip
# The other parts say it all.
_LABELLED: Final = (
    Part.DATA_WAIT.number, Part.TRANSFER.number, Part.CALLBACK.number, Part.MODULE_HOOK.number, Part.LOGGING.number,
    Part.VALIDATION.number, Part.CHECKPOINT.number, Part.FORWARD_HOOK.number, Part.BACKWARD_HOOK.number,
    Part.SELF_LOG.number, Part.METRIC.number,
)  # fmt: skip
# Parts whose time outside operators has the place in the program.
_PLACED: Final = (Part.FORWARD.number, Part.GC_PAUSES.number, Part.CHECKPOINT.number)


def host_ledger(table: EventTable, stage: str = "fit") -> TimeLedger | None:
    """Return the owners of the training thread's time in the steps; None where the trace has no operator.

    Args:
        table: the trace; without steps, the time from the first operator or named range to the last one is the step.
        stage: of the Trainer, which tells the part of Lightning's actions.
    """
    columns, events, steps = table.columns, table.host, table.steps
    if not np.any(columns.kinds == Kind.OPERATOR):
        return None
    found = _Threads(columns, events, stage)
    if steps:
        spans = union(*(np.array([getattr(step, end) for step in steps], np.int64) for end in ("start", "end")))
        basis = "1 recorded step" if len(steps) == 1 else f"{len(steps)} recorded steps"
    else:
        thread = found.training
        known = thread.rows[(thread.part >= 0) | (columns.kinds[thread.rows] == Kind.OPERATOR)]
        spans = union(np.min(columns.starts[known], keepdims=True), np.max(columns.ends[known], keepdims=True))
        basis = "the time from the first operator or range to the last one: the trace has no steps"
    whole = int(np.sum(spans.ends - spans.starts))
    count = max(len(steps), 1)
    if not whole:
        return None
    exposed = _exposed(found, spans)
    tables, computed = _tables(found, spans, exposed)
    owners, texts = joined(tables), [*columns.name_of, *found.places.texts]
    owners = owners[:, (owners[4] != 0) | (owners[5] != 0)]
    lines = time_lines(owners, count, texts, events.path, outside="", label=_label)
    lines.sort(key=lambda line: (-line.ns, line.part, line.name, line.module or "", line.operator or ""))
    durations = [step.end - step.start for step in steps] or [whole]
    return TimeLedger(
        step_ns=whole / count,
        median_ns=float(np.median(durations)),
        steps=count,
        basis=basis,
        lines=tuple(lines),
        work=operator_work(columns, computed, events.path, count),
        double_backward_ns=_double_backward(found, steps),
        recomputed_ns=_recomputed(found, spans) / count,
        forwards=_forwards(found, steps),
        communication=tuple(_communication(columns, exposed, count)),
        exposed=stretches(exposed, columns.origin_ns),
    )


def corrected(lines: Sequence[TimeLine], true_ns: float) -> tuple[TimeLine, ...]:
    """Return the lines of a phase as they are without the cost of recording; none where they hold no time.

    The cost of an operator's event is in the event around it: of ``t`` ns with ``n`` events inside, ``n * o`` are
    recording, so that ``o`` is at most the least ``t / n`` of all operators. The cost ``r`` of a range, which Python
    begins and ends, is in the range itself, at most the least that a range has left, and at most ``RANGE_NS``. Neither
    is more than the phase took longer than its true time; a wait for a core makes it longer, too. The lines are scaled
    to the true time.

    Args:
        lines: of recorded steps.
        true_ns: the time of the phase per step, measured in steps that were not recorded.
    """
    operators, ranges = (
        [line for line in lines if bool(line.operator) == is_operator] for is_operator in (True, False)
    )
    excess = max(total(lines) - true_ns, 0.0)
    each = _least(excess, [(line.ns, line.inside) for line in operators], sum(line.inside for line in lines))
    excess -= each * sum(line.inside for line in lines)
    spent = [(max(line.ns - each * line.inside, 0.0), line.count) for line in ranges]
    in_python = min(_least(excess, spent, sum(line.count for line in ranges)), RANGE_NS)
    left = [
        max(line.ns - each * line.inside - (0.0 if line.operator else in_python * line.count), 0.0) for line in lines
    ]
    scale = true_ns / sum(left) if sum(left) else 0.0
    if not scale and true_ns:
        return ()
    return tuple(replace(line, ns=ns * scale) for line, ns in zip(lines, left, strict=True))


def _least(excess: float, spent: Sequence[tuple[float, float]], events: float) -> float:
    """Return the cost of an event: at most the excess of all ``events``, and what any line of ns and events has."""
    return min([excess / events if events else 0.0, *(ns / count for ns, count in spent if count)])


class _Thread(msgspec.Struct, frozen=True, kw_only=True):
    """Events of a thread that have an owner: rows of the trace, and by position the innermost named event around each.

    Attributes:
        rows: ``(m,)`` rows of the trace.
        parents: ``(m,)`` position of the event around each, -1 for none.
        ends: ``(m,)`` ends at which each moment has one innermost event.
        called: ``(m,)`` whether it is an operator that no operator called.
        part: ``(m,)`` ``Part.number``, -1 where no event says it; ``label``, ``module`` and ``operator`` likewise
            are numbers of names, and ``place`` of a text of ``Places``.
    """

    rows: Column
    parents: Column
    ends: Column
    called: NDArray[np.bool_]
    part: Column
    label: Column
    module: NDArray[np.int32]
    operator: Column
    place: Column


class _Threads:
    """The training thread and those of autograd."""

    def __init__(self, columns: TraceColumns, events: HostEvents, stage: str) -> None:
        self.columns = columns
        names = columns.name_of
        self.events = events
        self._parts = np.array([_part(name, stage) for name in names] or [_NONE], np.int64)
        # Autograd's call of a backward function has the number of that function.
        numbers = {name: number for number, name in enumerate(names)}
        called = (numbers.get(name.removeprefix(NODE), number) for name, number in numbers.items())
        self._operators = np.array([*called] or [_NONE])
        self.is_lightning = any(name.startswith(_ACTION) for name in names)
        self.places = Places(columns, events.is_place)
        # With a device, its ledger has the places.
        self._is_placed = not self.is_lightning and not len(columns.rows(Kind.RUNTIME))
        for pattern, part in () if self.is_lightning else _CALLS_OF:
            self._parts[columns.named(pattern.search)] = part.number
        self.training = self._thread(events.training)
        runs_node = columns.runs_node | columns.named(lambda name: name.startswith(NODE))[columns.names]
        nodes = events.on_host & runs_node & (columns.lanes != events.training)
        self.autograd = [self._thread(lane) for lane in np.unique(columns.lanes[nodes]).tolist()]

    def _thread(self, lane: int) -> _Thread:
        columns, (rows, parents, ends) = self.columns, self.events.thread(lane)
        starts, names, kinds = columns.starts[rows], columns.names[rows], columns.kinds[rows]
        is_operator = kinds == Kind.OPERATOR
        parts = self._parts[names]
        at = nearest(parents, parts >= 0)
        part = np.where(at >= 0, parts[at], _NONE)
        in_forward = nearest(parents, part == Part.FORWARD.number) >= 0
        part[(part == Part.SELF_LOG.number) & ~in_forward] = Part.LOGGING.number
        in_validation = nearest(parents, part == Part.VALIDATION.number) >= 0
        part[in_validation & ~np.isin(part, _BESIDE_VALIDATION)] = Part.VALIDATION.number
        operator = self.events.operator[rows]
        # An operator inside a range that is not an operator, as a module called by an operator, is not that operator's.
        inner = nearest(parents, ~is_operator & (self.events.is_module[names] | (parts != _NONE)))
        operator[(operator >= 0) & (inner >= 0) & (starts[inner] > columns.starts[operator])] = _NONE
        called = is_operator & ((parents < 0) | (operator[parents] < 0))
        return _Thread(
            rows=rows,
            parents=parents,
            ends=ends,
            called=called,
            part=part.astype(np.int32),
            label=np.where(at >= 0, names[at], _NONE).astype(np.int32),
            module=self.events.module[rows],
            operator=np.where(operator >= 0, self._operators[columns.names[operator]], _NONE).astype(np.int32),
            place=self.places.around(rows, parents) if self._is_placed else np.full(len(rows), _NONE),
        )


def _part(name: str, stage: str) -> int:
    """Return the number of the part that the name of an event says, negative where it says none."""
    for prefix, part in _RANGES.items():
        if name.startswith(prefix):
            return part.number
    if not name.startswith(_ACTION):
        return _NONE
    action = name.removeprefix(_ACTION)
    if is_profiler(action):
        return Part.PROFILER.number
    hook = Part.MODULE_HOOK if action.startswith(MODULES) else None
    found = meeting(action) or part_of(action, None, stage) or hook
    return _NONE if found is None else found.number


def _exposed(threads: _Threads, spans: Intervals) -> Intervals:
    """Return the time in which a collective of the host runs, and no operator but the call of a collective."""
    columns = threads.columns
    rows = np.concatenate([thread.rows for thread in (threads.training, *threads.autograd)])
    rows = rows[columns.kinds[rows] == Kind.OPERATOR]
    calls = columns.named(lambda name: name.startswith(_CALLS))[columns.names[rows]]
    works = difference(columns.when(rows[~calls]), columns.when(rows[calls]))
    return difference(intersection(spans, columns.when(host_collectives(columns))), works)


def _communication(columns: TraceColumns, exposed: Intervals, steps: int) -> Iterator[TimeLine]:
    """Yield the time of collectives of the host; where several run at once, it belongs to the first of their names."""
    rows = host_collectives(columns)
    for name in np.unique(columns.names[rows]).tolist():
        mine = rows[columns.names[rows] == name]
        taken = intersection(exposed, columns.when(mine))
        exposed = difference(exposed, taken)
        inside = mine[length_within(taken, columns.starts[mine], columns.ends[mine]) > 0]
        if len(inside):
            yield TimeLine(
                part=Part.COLLECTIVE,
                name=common_name(columns.name_of[name].partition(":")[2]),
                ns=length(taken) / steps,
                count=len(inside) / steps,
                longest_ns=int(np.max(columns.ends[inside] - columns.starts[inside])),
            )


def _tables(threads: _Threads, spans: Intervals, exposed: Intervals) -> tuple[list[Table], list[Table]]:
    """Return the owners of the time in ``spans``, and the time of operators by their recorded inputs.

    ``exposed`` is the time in collectives: from then on ``self.log`` waits for other ranks, for it sends a few bytes.
    """
    columns, training = threads.columns, threads.training
    waiting, left = _waiting(threads, spans), spans
    default = (Part.UNTRACKED if threads.is_lightning else Part.FORWARD).number
    taken_by: list[tuple[_Thread, Intervals, int]] = []
    for thread in threads.autograd:
        roots = thread.parents < 0
        taken = intersection(waiting, union(columns.starts[thread.rows[roots]], thread.ends[roots]))
        taken_by.append((thread, taken, Part.BACKWARD.number))
        waiting, left = difference(waiting, taken), difference(left, taken)
    taken_by.append((training, left, default))
    tables, computed = [], []
    for thread, taken, part in taken_by:
        own = _own(columns, thread, taken)
        in_log = thread.part == Part.SELF_LOG.number
        waits = _own(columns, thread, intersection(taken, _since_met(columns, thread, in_log, exposed))) * in_log
        tables += [_table(columns, thread, own - waits, spans, part), _waits(thread, waits, in_log)]
        if len(columns.shapes.rows):
            computed.append(_computed(columns, thread, own, part))
    rest = int(np.sum(spans.ends - spans.starts)) - sum(int(np.sum(table[4])) for table in tables)
    tables.append(np.array([[default], [_NONE], [_NONE], [_NONE], [rest], [0], [0], [0], [0]], np.int64))
    return tables, computed


def _computed(columns: TraceColumns, thread: _Thread, own: Column, default: int) -> Table:
    """Return the time of the operators in a thread by their inputs, with that of the operators that they call."""
    inputs = columns.shapes.of(thread.rows)
    at = nearest(thread.parents, inputs >= 0)
    part = np.where(thread.part >= 0, thread.part, np.int32(default))[at]
    names, calls = columns.names[thread.rows][at], (inputs >= 0) & (own > 0)
    return shaped(part, np.where(at >= 0, inputs[at], _NONE), thread.module[at], names, own, calls)


def _own(columns: TraceColumns, thread: _Thread, when: Intervals) -> Column:
    """Return the time of each event of a thread, as the innermost one, within a set."""
    inside: Column = length_before(when, thread.ends) - length_before(when, columns.starts[thread.rows])
    own = inside.copy()
    children = np.flatnonzero(thread.parents >= 0)
    np.subtract.at(own, thread.parents[children], inside[children])
    return own


def _waiting(threads: _Threads, spans: Intervals) -> Intervals:
    """Return the time in which the training thread is in backward and runs nothing itself.

    Without Lightning's range around backward, it is all time without an operator.
    """
    columns, thread = threads.columns, threads.training
    starts, kinds = columns.starts[thread.rows], columns.kinds[thread.rows]
    in_backward = thread.part == Part.BACKWARD.number
    works = np.isin(kinds, (Kind.OPERATOR, Kind.RUNTIME))
    if not threads.is_lightning:
        return difference(spans, union(starts[works], thread.ends[works]))
    works |= ~in_backward & (nearest(thread.parents, in_backward) >= 0)
    waits = in_backward & ~works
    waiting = difference(union(starts[waits], thread.ends[waits]), union(starts[works], thread.ends[works]))
    return intersection(waiting, spans)


def _table(columns: TraceColumns, thread: _Thread, own: Column, spans: Intervals, default: int) -> Table:
    """Return the owners in a thread: ns, count, calls, events directly inside and the longest call."""
    starts = columns.starts[thread.rows]
    at = np.searchsorted(spans.starts, starts, side="right") - 1
    counted = (at >= 0) & (starts < spans.ends[at])
    part = np.where(thread.part >= 0, thread.part, np.int32(default))
    of_optimizer = columns.named(lambda name: name.startswith(_STEP))[thread.label] & (thread.label >= 0)
    label = np.where(np.isin(part, _LABELLED) | of_optimizer, thread.label, np.int32(_NONE))
    placed = np.isin(part, _PLACED) & (thread.operator < 0) & (thread.place >= 0)
    label = np.where(placed, len(columns.name_of) + thread.place, label)
    longest = columns.ends[thread.rows] - starts
    inside = np.bincount(thread.parents[counted & (thread.parents >= 0)], minlength=len(starts))
    calls = counted & thread.called
    return summed(part, label, thread.module, thread.operator, own, counted, calls, inside, longest)


def _since_met(columns: TraceColumns, thread: _Thread, in_log: NDArray[np.bool_], exposed: Intervals) -> Intervals:
    """Return the time in each call of ``self.log`` since its first collective began."""
    calls = np.flatnonzero(in_log & ((thread.parents < 0) | ~in_log[thread.parents]))
    starts, ends = columns.starts[thread.rows[calls]], thread.ends[calls]
    first = np.searchsorted(exposed.ends, starts, side="right")
    met = first < len(exposed.starts)
    begins = np.maximum(starts[met], exposed.starts[first[met]])
    meets = begins < ends[met]
    return union(begins[meets], ends[met][meets])


def _waits(thread: _Thread, waits: Column, in_log: NDArray[np.bool_]) -> Table:
    """Return the waits for other ranks in a thread's calls of ``self.log``, and how many of these calls meet them."""
    rows = np.flatnonzero(waits)
    part, label, parents = Part.RANK_WAIT.number, thread.label[rows], thread.parents[rows]
    calls = (parents < 0) | ~in_log[parents]
    return summed(*np.broadcast_arrays(part, label, _NONE, _NONE, waits[rows], calls, 0, 0, 0))


def _double_backward(threads: _Threads, steps: Sequence[Step]) -> float:
    """Return the time per step of the training thread's nodes that build a graph of gradients, and of that graph's.

    With ``create_graph=True`` the operators of a node make nodes, which a later backward runs; those of a recomputed
    forward run inside their node, or never. 0 unless each step has such nodes: a penalty in few steps may have missed
    the recorded ones, or hit them.
    """
    columns, thread = threads.columns, threads.training
    starts, sequences = columns.starts[thread.rows], columns.sequences[thread.rows]
    runs = (sequences >= 0) & columns.runs_node[thread.rows]
    node = nearest(thread.parents, runs)
    outer = runs & ((thread.parents < 0) | (node[thread.parents] < 0))
    makes = node_makers(columns, thread.rows)
    makes = makes[(node[makes] >= 0) & np.isin(sequences[makes], sequences[outer])]
    built = nearest(thread.parents, outer)[makes]
    found = np.union1d(built, np.flatnonzero(outer & np.isin(sequences, sequences[makes])))
    in_steps = [np.any((starts[found] >= step.start) & (starts[found] < step.end)) for step in steps]
    return float(np.sum(thread.ends[found] - starts[found])) / max(len(steps), 1) if all(in_steps) else 0.0


def _recomputed(threads: _Threads, spans: Intervals) -> int:
    """Return the time of modules that are called in backward, as activation checkpointing does."""
    whole = 0
    for thread in (threads.training, *threads.autograd):
        is_module = threads.events.is_module[threads.columns.names[thread.rows]]
        calls = is_module & (thread.part == Part.BACKWARD.number)
        called = union(threads.columns.starts[thread.rows[calls]], thread.ends[calls])
        whole += length(intersection(spans, called))
    return whole


def _forwards(threads: _Threads, steps: Sequence[Step]) -> tuple[str, int] | None:
    """Return the module that each step calls first, and how often, if it calls different other modules after each call.

    A block that is repeated on its own output is called in a row, or before the same modules.
    """
    columns, thread = threads.columns, threads.training
    starts, names = columns.starts[thread.rows], columns.names[thread.rows]
    is_module = threads.events.is_module[names]
    around = np.where(thread.parents >= 0, nearest(thread.parents, is_module)[thread.parents], _NONE)
    outer = is_module & (around < 0) & np.isin(thread.part, (Part.FORWARD.number, _NONE))
    found = set()
    for step in steps:
        inside = np.flatnonzero(outer & (starts >= step.start) & (starts < step.end))
        calls = names[inside[np.argsort(starts[inside], kind="stable")]].tolist()
        found.add((calls[0], _rounds(calls)) if calls else (_NONE, 1))
    ((first, count),) = found if len(found) == 1 else {(_NONE, 1)}
    return (threads.events.path(first) or "", count) if 1 < count <= MAX_FORWARDS else None


def _rounds(calls: Sequence[int]) -> int:
    """Return how often the first one is called, each time for others; 1 where the others are the same, or none."""
    rounds: list[set[int]] = []
    for call in calls:
        if call == calls[0]:
            rounds.append(set())
        else:
            rounds[-1].add(call)
    return len(rounds) if all(rounds) and sum(map(len, rounds)) == len(set[int]().union(*rounds)) else 1


def _label(name: str) -> str:
    if name.startswith(_STEP):
        return name.removeprefix(_STEP).partition(".")[0]
    if name.startswith(_HOOKS):
        return name.rpartition("]")[2]
    return action_name(name.removeprefix(_ACTION))
