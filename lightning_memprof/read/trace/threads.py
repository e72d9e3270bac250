"""Threads of a trace: nested ranges with the operator and module in their names, and lanes for flame graphs.

Events of a thread come in any order. A host range takes 24 bytes, and about 100 more for each operator that autograd
has numbered; an event of a lane takes 20. Nesting takes about 60 more for each event of one thread at a time.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from lightning_memprof.read.stacks import Frame, parse_frame
from lightning_memprof.read.trace.events import OperatorEvent, read_trace
from lightning_memprof.read.trace.intervals import ROUNDING_NS, Column, innermost_at, nest

_NO_NODE: Final = 1 << 62  # AccumulateGrad has the largest number there is, and no forward operator

_OPERATORS: Final = frozenset({"cpu_op", "Operator"})
_ANNOTATIONS: Final = frozenset({"user_annotation"})
_MODULE: Final = "[pl][module]"
_ACTION: Final = "[pl][profile]"
_NODE: Final = "autograd::engine::evaluate_function: "
_STEP: Final = "ProfilerStep#"
# Ranges of torch itself; until torch 1.9 they were operators among others.
_RANGES: Final = ("Optimizer.step#", "Optimizer.zero_grad#", "enumerate(DataLoader)")
_STEP_DIGITS: Final = 18
_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"})
# Spans that cover lanes and are no calls in them.
_NOT_CALLS: Final = frozenset({"Trace", "gpu_user_annotation", "overhead", "ac2g", "async_gpu", "fwdbwd"})


def _longs() -> array[int]:
    return array("q")


def _numbers() -> array[int]:
    return array("i")


class Label(NamedTuple):
    """A range's name, and what is in it; None for each part that it does not have.

    ``action`` is of Lightning's profiler. ``runs_node`` is whether the range runs a node of autograd.
    """

    name: str
    operator: str | None = None
    module: str | None = None
    frame: Frame | None = None
    action: str | None = None
    step: int | None = None
    runs_node: bool = False


class Ranges(msgspec.Struct):
    """The ranges of one thread.

    Attributes:
        start: ns after the trace's origin; ``end`` likewise.
        label: number of a label.
        parent: position of the range around each, -1 for none; empty until :meth:`nest`.
        created: positions of forward operators by the sequence number of the autograd node that they made.
        nodes: by position of a range that runs an autograd node: the forward's thread, as autograd numbers it, and the
            node's sequence number.
    """

    start: array[int] = msgspec.field(default_factory=_longs)
    end: array[int] = msgspec.field(default_factory=_longs)
    label: array[int] = msgspec.field(default_factory=_numbers)
    parent: array[int] = msgspec.field(default_factory=_numbers)
    created: dict[int, int] = msgspec.field(default_factory=dict)
    nodes: dict[int, tuple[int, int]] = msgspec.field(default_factory=dict)

    def add(self, event: OperatorEvent, label: int) -> None:
        """Append an event."""
        position, start = len(self.start), event.start_ns
        self.start.append(start)
        self.end.append(start + event.duration_ns)
        self.label.append(label)
        sequence = event.args.sequence_number
        if not 0 <= sequence < _NO_NODE:
            return
        if event.args.forward_thread:
            self.nodes[position] = (event.args.forward_thread, sequence)
        else:
            # Operators read the next sequence number without taking it; the last operator that reads a number takes it.
            before = self.created.get(sequence)
            if before is None or self.start[before] <= start:
                self.created[sequence] = position

    def nest(self, moments: Sequence[int]) -> Sequence[int]:
        """Find every range's parent, and return the innermost range at each of `moments` (ns, sorted); -1 for none."""
        # A range that ends before its successor does cannot contain it: Python calls around a range that they open.
        nesting = nest(self.start, self.end, slack=ROUNDING_NS)
        self.parent = array("i", nesting.parents.astype(np.int32).tobytes())
        # A range still runs at the moment of its end.
        found: list[int] = innermost_at(nesting._replace(ends=nesting.ends + 1), self.start, moments).tolist()
        return found


class HostRanges:
    """The ranges of all threads of one trace."""

    def __init__(self) -> None:
        self.threads: list[Ranges] = []
        self.labels: list[Label] = []
        self._numbers: dict[tuple[int | str, int | str], int] = {}
        self._names: dict[tuple[str, str], int] = {}

    def thread(self, event: OperatorEvent) -> int:
        """Return the number of the event's thread."""
        number = self._numbers.setdefault((event.pid, event.tid), len(self.threads))
        if number == len(self.threads):
            self.threads.append(Ranges())
        return number

    def add(self, event: OperatorEvent) -> Label | None:
        """Take an event if it is an operator, an annotation or a Python call; return its label."""
        category, name = event.cat, event.name
        if category == "python_function":
            # The names of builtins and modules contain addresses: too many labels, and none is a line of the user's.
            if name.startswith(("<", "nn.Module:")):
                return None
        elif category not in _OPERATORS and category not in _ANNOTATIONS:
            return None
        number = self._names.get((name, category))
        if number is None:
            number = self._names[name, category] = len(self.labels)
            self.labels.append(_label(name, category))
        self.threads[self.thread(event)].add(event, number)
        return self.labels[number]

    def chain(self, thread: int, position: int) -> list[tuple[int, Label]]:
        """Return a range and those around it, innermost first: position and label."""
        ranges = self.threads[thread]
        found = []
        while position >= 0:
            found.append((position, self.labels[ranges.label[position]]))
            position = ranges.parent[position]
        return found

    def forward_threads(self) -> dict[int, int]:
        """Return our number of a thread by autograd's number: the thread that made most of its nodes."""
        asked: dict[int, set[int]] = defaultdict(set)
        for ranges in self.threads:
            for forward, sequence in ranges.nodes.values():
                asked[forward].add(sequence)
        found = {}
        for forward, sequences in asked.items():
            made = [len(sequences & ranges.created.keys()) for ranges in self.threads]
            if max(made):
                found[forward] = made.index(max(made))
        return found


def _label(name: str, category: str) -> Label:
    if category == "python_function":
        return Label(name, frame=parse_frame(name))
    if name.startswith(_STEP):
        number = name[len(_STEP) :]
        is_step = number.isascii() and number.isdigit() and len(number) <= _STEP_DIGITS
        return Label(name, step=int(number) if is_step else None)
    if name.startswith(_MODULE):
        return Label(name, module=name.rpartition(": ")[2])
    if name.startswith(_ACTION):
        return Label(name, action=name[len(_ACTION) :])
    if name.startswith(_NODE):
        return Label(name, operator=name[len(_NODE) :], runs_node=True)
    return Label(name) if category in _ANNOTATIONS or name.startswith(_RANGES) else Label(name, operator=name)


class Call(NamedTuple):
    """The begin or the end of a call, in ns after the first event of the trace; ``name`` is a number."""

    is_begin: bool
    at_ns: int
    name: int


class Lane(msgspec.Struct):
    """One thread, or one stream of a device: starts and ends in ns, and numbers of names."""

    title: str
    start: array[int] = msgspec.field(default_factory=_longs)
    end: array[int] = msgspec.field(default_factory=_longs)
    name: array[int] = msgspec.field(default_factory=_numbers)

    def calls(self, origin_ns: int) -> Iterator[Call]:
        """Yield begins and ends in the order of time, each end with the begin that it closes.

        A call that outlasts the call that it began in ends with it: a lane is calls inside calls.
        """
        order, parents, ends = nest(self.start, self.end, slack=None)
        opened: list[int] = []
        for at in order.tolist():
            while opened and opened[-1] != parents[at]:
                yield self._end(opened.pop(), ends, origin_ns)
            yield Call(is_begin=True, at_ns=self.start[at] - origin_ns, name=self.name[at])
            opened.append(at)
        while opened:
            yield self._end(opened.pop(), ends, origin_ns)

    def _end(self, at: int, ends: Column, origin_ns: int) -> Call:
        return Call(is_begin=False, at_ns=int(ends[at]) - origin_ns, name=self.name[at])


class Lanes(msgspec.Struct):
    """All lanes of a trace. ``names`` are by number."""

    names: list[str] = msgspec.field(default_factory=list)
    lanes: list[Lane] = msgspec.field(default_factory=list)

    @property
    def origin_ns(self) -> int:
        """Start of the first call of all lanes."""
        return min((min(lane.start) for lane in self.lanes if lane.start), default=0)

    @property
    def end_ns(self) -> int:
        """End of the last call, after the origin."""
        return max((max(lane.end) for lane in self.lanes if lane.end), default=0) - self.origin_ns

    def self_times(self) -> Counter[tuple[str, ...]]:
        """Return self time in ns by path: the lane, and the calls from the outermost to the one itself."""
        paths: Counter[tuple[str, ...]] = Counter()
        origin = self.origin_ns
        for lane in self.lanes:
            path: list[str] = [lane.title]
            before = 0
            for call in lane.calls(origin):
                if len(path) > 1:
                    paths[tuple(path)] += call.at_ns - before
                before = call.at_ns
                if call.is_begin:
                    path.append(self.names[call.name])
                else:
                    path.pop()
        return Counter({path: ns for path, ns in paths.items() if ns > 0})


def read_lanes(path: Path) -> Lanes:
    """Read a trace once.

    Raises:
        ArtifactError: the trace is missing, damaged or truncated.
    """
    found = Lanes()
    names: dict[str, int] = {}
    lanes: dict[tuple[int | str, int | str, bool], Lane] = {}
    for batch in read_trace(path).batches():
        for event in batch:
            if event.ph != "X" or event.cat in _NOT_CALLS:
                continue
            is_device = event.cat in _DEVICE
            key = (event.pid, event.tid, is_device)
            lane = lanes.get(key)
            if lane is None:
                title = f"device {event.pid} stream {event.tid}" if is_device else f"thread {event.tid}"
                lane = lanes[key] = Lane(title=title)
                found.lanes.append(lane)
            number = names.setdefault(event.name, len(names))
            if number == len(found.names):
                found.names.append(event.name)
            start = event.start_ns
            lane.start.append(start)
            lane.end.append(start + max(event.duration_ns, 0))
            lane.name.append(number)
    return found
