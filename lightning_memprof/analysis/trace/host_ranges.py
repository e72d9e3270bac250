"""The host's events of one trace as columns: what runs inside what, and what ran at a given moment.

Events of a thread come in any order; a range is the child of the innermost one that outlives it. Kept are 24 bytes for
each range and about 100 more for each operator that autograd has numbered; sorting takes about 80 for a while.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from lightning_memprof.analysis.stacks import Frame, parse_frame
from lightning_memprof.analysis.steps.phases import classify
from lightning_memprof.analysis.trace.nesting import nesting_order
from lightning_memprof.analysis.trace.reader import Event

__all__ = ["HostRanges", "Label", "Ranges"]

# Kineto rounds starts and durations one by one: a child may seem to end this much after its parent. In ns.
_SLACK_NS: Final = 1_000
_NO_NODE: Final = 1 << 62  # AccumulateGrad has the largest number there is, and no forward operator

_OPERATORS: Final = frozenset({"cpu_op", "Operator"})
_ANNOTATIONS: Final = frozenset({"user_annotation"})
_MODULE: Final = "[pl][module]"
_ACTION: Final = "[pl][profile]"
_NODE: Final = "autograd::engine::evaluate_function: "
_STEP: Final = "ProfilerStep#"
_STEP_DIGITS: Final = 18
# What torch itself names in a trace that Lightning's actions are not in.
_PHASES: Final = {
    "Optimizer.step#": "optimizer",
    "Optimizer.zero_grad#": "optimizer",
    "enumerate(DataLoader)#": "data_wait",
}


class Label(NamedTuple):
    """What a range's name says; None where it says nothing about it."""

    operator: str | None = None
    module: str | None = None
    phase: str | None = None
    frame: Frame | None = None
    action: str | None = None
    step: int | None = None


@dataclass(slots=True)
class Ranges:
    """The ranges of one thread: times in ns, label by number; `parent` is a position, -1 for none, once nested.

    `created` are forward operators by the sequence number of the autograd node that they made, `nodes` the forward's
    thread, as autograd numbers it, and that sequence number of each range that runs a node.
    """

    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    label: array[int] = field(default_factory=lambda: array("i"))
    parent: array[int] = field(default_factory=lambda: array("i"))
    created: dict[int, int] = field(default_factory=dict)
    nodes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, event: Event, label: int) -> None:
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
            # Operators only look at the next number; the last one to see it is the one that takes it.
            before = self.created.get(sequence)
            if before is None or self.start[before] <= start:
                self.created[sequence] = position

    def nest(self, moments: Sequence[int]) -> array[int]:
        """Find every range's parent, and the innermost range at each of `moments` (ns, sorted); -1 where none ran."""
        starts, ends = self.start, self.end
        parent = self.parent = array("i", [-1]) * len(starts)
        inner = array("i", [-1]) * len(moments)
        stack: list[int] = []
        done, count = 0, len(moments)
        for position in nesting_order(starts, ends):
            start, end = starts[position], ends[position]
            while done < count and moments[done] < start:
                inner[done] = _innermost(stack, ends, moments[done])
                done += 1
            # What ends before its successor does cannot hold it: Python calls around a range that they open do that.
            while stack and (ends[stack[-1]] <= start or ends[stack[-1]] < end - _SLACK_NS):
                stack.pop()
            if stack:
                parent[position] = stack[-1]
            stack.append(position)
        while done < count:
            inner[done] = _innermost(stack, ends, moments[done])
            done += 1
        return inner


def _innermost(stack: list[int], ends: array[int], moment: int) -> int:
    while stack and ends[stack[-1]] < moment:
        stack.pop()
    return stack[-1] if stack else -1


class HostRanges:
    """The ranges of all threads of one trace.

    Args:
        stage: the run's stage, which tells the phase of Lightning's actions.
    """

    def __init__(self, stage: str = "fit") -> None:
        self.threads: list[Ranges] = []
        self.labels: list[Label] = []
        self.has_stacks = False
        self._stage = stage
        self._numbers: dict[tuple[int | str, int | str], int] = {}
        self._names: dict[tuple[str, str], int] = {}

    def thread(self, event: Event) -> int:
        """Return the number of the event's thread."""
        number = self._numbers.setdefault((event.pid, event.tid), len(self.threads))
        if number == len(self.threads):
            self.threads.append(Ranges())
        return number

    def add(self, event: Event) -> Label | None:
        """Take an event if it says who runs: an operator, a module, an action, a Python call."""
        category, name = event.cat, event.name
        if category == "python_function":
            # Their names hold addresses: they would not be few, and none is the user's line.
            if name.startswith(("<", "nn.Module:")):
                return None
            self.has_stacks = True
        elif category not in _OPERATORS and category not in _ANNOTATIONS:
            return None
        number = self._names.get((name, category))
        if number is None:
            number = self._names[name, category] = len(self.labels)
            self.labels.append(_label(name, category, self._stage))
        self.threads[self.thread(event)].add(event, number)
        return self.labels[number]

    def chain(self, thread: int, position: int) -> list[tuple[int, Label]]:
        """Return the ranges around one, itself first: position and label."""
        ranges = self.threads[thread]
        found = []
        while position >= 0:
            found.append((position, self.labels[ranges.label[position]]))
            position = ranges.parent[position]
        return found

    def forward_threads(self) -> dict[int, int]:
        """Return the thread that autograd's number of a forward's thread means: the one that made most of its nodes."""
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


def _label(name: str, category: str, stage: str) -> Label:  # noqa: PLR0911 one for each kind of name
    if category == "python_function":
        return Label(frame=parse_frame(name))
    if name.startswith(_STEP):
        number = name[len(_STEP) :]
        is_step = number.isascii() and number.isdigit() and len(number) <= _STEP_DIGITS
        return Label(step=int(number) if is_step else None)
    if name.startswith(_MODULE):
        return Label(module=name.rpartition(": ")[2])
    if name.startswith(_ACTION):
        action = name[len(_ACTION) :]
        return Label(phase=classify(action, stage), action=action)
    for start, phase in _PHASES.items():
        if name.startswith(start):
            return Label(phase=phase)
    if name.startswith(_NODE):
        return Label(operator=name[len(_NODE) :], phase="backward")
    return Label() if category in _ANNOTATIONS else Label(operator=name)
