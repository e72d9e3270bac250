"""The `[memory]` events of an operator trace, as columns by device, and the origin of each allocation.

Device bytes are the allocator's blocks. On the host torch records only blocks that were allocated under a profiler, and
no free between two profiles: its totals, and frees of unknown blocks, are ignored there.

The operator of an allocation is the innermost one that ran in its thread, without operators that only allocate for
another. A backward operator gets the module and the Python frames of the forward operator that made its autograd node.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.events import RANGES, classify
from lightning_memprof.artifacts.naming import TraceName
from lightning_memprof.read.stacks import Frame
from lightning_memprof.read.trace.events import OperatorEvent, read_trace
from lightning_memprof.read.trace.threads import HostRanges, Label
from lightning_memprof.schedule import Point

_MEMORY: Final = "[memory]"
_OPTIMIZER_HOOK: Final = ".on_before_optimizer_step"
# c10::DeviceType; 2 and 5 are MKLDNN and IDEEP, which use host memory.
_HOST_TYPES: Final = frozenset({0, 2, 5})
_DEVICE_TYPES: Final = {1: "cuda", 6: "hip", 12: "xpu", 13: "mps", 18: "mtia", 20: "privateuseone"}
_LARGEST: Final = 1 << 62
_MOST_BYTES: Final = 1 << 50  # a larger block is damage; sums of blocks stay in 64 bits
# These operators allocate for their caller; without a caller they are the operator.
_ALLOCATING: Final = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::resize_",
        "aten::_resize_output_",
    }
)


class DeviceMemory(NamedTuple):
    """A device as numbered in a trace: its c10 type, 0 for the host, and its index, -1 for none."""

    kind: int
    number: int

    @property
    def is_host(self) -> bool:
        """Whether this is host memory."""
        return self.kind in _HOST_TYPES

    def __str__(self) -> str:
        """Return the name that torch gives the device: `cpu`, `cuda:0`, ..."""
        if self.is_host:
            return "cpu"
        name = _DEVICE_TYPES.get(self.kind, f"device type {self.kind}")
        return name if self.number < 0 else f"{name}:{self.number}"


class MemoryColumns(msgspec.Struct):
    """Allocations and frees (negative bytes) of one device, by time.

    Attributes:
        time: ns after the origin of the trace.
        bytes: size of the block in bytes, negative for a free.
        address: address of the block; 0 where unknown.
        total: bytes that torch counted as allocated after the event.
        thread: index of the thread.
        inner: index of the innermost range of the thread at the event, -1 for none.
    """

    time: array[int] = msgspec.field(default_factory=lambda: array("q"))
    bytes: array[int] = msgspec.field(default_factory=lambda: array("q"))
    address: array[int] = msgspec.field(default_factory=lambda: array("q"))
    total: array[int] = msgspec.field(default_factory=lambda: array("q"))
    thread: array[int] = msgspec.field(default_factory=lambda: array("i"))
    inner: array[int] = msgspec.field(default_factory=lambda: array("i"))

    @property
    def start_bytes(self) -> int | None:
        """Bytes allocated before the first event; None where torch did not count them."""
        return self.total[0] - self.bytes[0] if self.total[0] else None

    def add(self, event: OperatorEvent, thread: int) -> None:
        """Append a `[memory]` event."""
        args = event.args
        self.time.append(event.start_ns)
        self.bytes.append(_bounded(args.bytes, _MOST_BYTES))
        self.address.append(_bounded(args.address, _LARGEST))
        self.total.append(_bounded(args.total_allocated, _LARGEST))
        self.thread.append(thread)

    def at(self, positions: Sequence[int]) -> MemoryColumns:
        """Return the events at `positions`, in their order."""
        columns = (self.time, self.bytes, self.address, self.total, self.thread, self.inner)
        return MemoryColumns(*(array(column.typecode, [column[i] for i in positions]) for column in columns))


class MemoryTrace(msgspec.Struct):
    """The memory events of one trace by device, with its host ranges, steps and marks.

    Attributes:
        stage: of the run, which tells the phase of Lightning's actions.
        ranges: nested ranges of the host threads.
        devices: events by device.
        steps: start and end in ns after the origin, and step number, by time.
        points: Unix ns and a value of `schedule.Point`, by time.
        origin_ns: Unix ns of the origin.
    """

    stage: str
    ranges: HostRanges = msgspec.field(default_factory=HostRanges)
    devices: dict[DeviceMemory, MemoryColumns] = msgspec.field(default_factory=dict)
    steps: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    points: list[tuple[int, str]] = msgspec.field(default_factory=list)
    origin_ns: int = 0
    _memory: MemoryColumns = msgspec.field(default_factory=MemoryColumns)
    _device: array[int] = msgspec.field(default_factory=lambda: array("i"))
    _numbers: dict[DeviceMemory, int] = msgspec.field(default_factory=dict)

    def step_at(self, time_ns: int) -> int | None:
        """Return the step at a time (Unix ns), or None outside steps."""
        return step_at(self.steps, time_ns - self.origin_ns)

    def add(self, event: OperatorEvent) -> None:
        """Add a memory event or a host range; ignore other events."""
        if event.name == _MEMORY:
            device = DeviceMemory(kind=event.args.device_type, number=event.args.device_id)
            self._device.append(self._numbers.setdefault(device, len(self._numbers)))
            self._memory.add(event, self.ranges.thread(event))
        elif event.ph == "X":
            label = self.ranges.add(event)
            if label is None:
                return
            if label.step is not None:
                self.steps.append((event.start_ns, event.start_ns + event.duration_ns, label.step))
            if label.step is not None or label.action is not None:
                self.points += _points(event, label, phase_of(label, self.stage))

    def finish(self, origin_ns: int) -> None:
        """Sort all events and find the innermost range at every allocation."""
        self.origin_ns = origin_ns
        self.steps.sort()
        self.points = sorted((origin_ns + time, point) for time, point in self.points)
        memory, by_thread = self._memory, [array("i") for _ in self.ranges.threads]
        memory.inner = array("i", [-1]) * len(memory.time)
        order = sorted(range(len(memory.time)), key=memory.time.__getitem__)
        for i in order:
            by_thread[memory.thread[i]].append(i)
        for ranges, places in zip(self.ranges.threads, by_thread, strict=True):
            for i, position in zip(places, ranges.nest([memory.time[i] for i in places]), strict=True):
                memory.inner[i] = position
        for device, number in self._numbers.items():
            self.devices[device] = memory.at([i for i in order if self._device[i] == number])
        self._memory, self._device = MemoryColumns(), array("i")


def step_at(steps: Sequence[tuple[int, int, int]], time_ns: int) -> int | None:
    """Return the number of the step at a time, None outside of steps: (start, end, number) by time."""
    before = bisect_right(steps, time_ns, key=itemgetter(0))
    if not before or steps[before - 1][1] < time_ns:
        return None
    return steps[before - 1][2]


def read_memory(path: Path) -> MemoryTrace:
    """Read a trace once; its name has the stage of the run, which the phases of Lightning's actions depend on.

    Raises:
        ArtifactError: the trace is missing, damaged or truncated.
    """
    trace = read_trace(path)
    name = TraceName.parse(path.name)
    found = MemoryTrace(name.stage if name else "fit")
    for batch in trace.batches():
        for event in batch:
            found.add(event)
    found.finish(trace.time_origin_ns)
    return found


def phase_of(label: Label, stage: str) -> str | None:
    """Return the phase of a range, or None where it belongs to the range around it."""
    if label.action is not None:
        return classify(label.action, stage)
    if label.runs_node:
        return Part.BACKWARD.phase
    if label.operator or label.module or label.frame:
        return None
    return next((part.phase for start, part in RANGES.items() if label.name.startswith(start)), None)


def _points(event: OperatorEvent, label: Label, phase: str | None) -> Sequence[tuple[int, str]]:
    """Return the marks of a step at the start and end of a range, as ns after the origin and point."""
    start, end = event.start_ns, event.start_ns + event.duration_ns
    if label.step is not None:
        return (start, Point.STEP_START.value), (end, Point.STEP_END.value)
    action = label.action or ""
    if action == "run_training_batch":
        return (start, Point.BATCH_START.value), (end, Point.BATCH_END.value)
    if phase == Part.FORWARD.phase:
        return ((end, Point.AFTER_FORWARD.value),)
    if phase == Part.BACKWARD.phase:
        return (start, Point.BEFORE_BACKWARD.value), (end, Point.AFTER_BACKWARD.value)
    if action.startswith("[LightningModule]") and action.endswith(_OPTIMIZER_HOOK):
        return ((start, Point.BEFORE_OPTIMIZER_STEP.value),)
    return ()


def _bounded(number: int, most: int) -> int:
    return number if -most < number < most else 0


def counted_bytes(device: DeviceMemory, memory: MemoryColumns) -> array[int]:
    """Return the change of the live bytes at each event; 0 for a host free of an unknown block."""
    deltas = array("q", memory.bytes)
    if not any(memory.address):  # traces before torch 1.11 do not identify blocks
        return deltas
    live: dict[int, int] = {}
    for i, (address, count) in enumerate(zip(memory.address, memory.bytes, strict=True)):
        if count >= 0:
            # The block at this address was freed by a thread that is not recorded.
            deltas[i] -= live.get(address, 0)
            live[address] = count
        elif live.pop(address, None) is None and device.is_host:
            deltas[i] = 0
    return deltas


class Origin(NamedTuple):
    """Origin of an allocation: operator, module, phase and step as in `Site`; frames innermost first."""

    operator: str | None
    module: str | None
    phase: str | None
    stack: tuple[Frame, ...]
    step: int | None = None


class Origins:
    """Origins of the allocations of a trace, computed once per range."""

    def __init__(self, trace: MemoryTrace) -> None:
        """Index the origins of a trace whose ranges are nested."""
        self._trace = trace
        self._ranges: HostRanges = trace.ranges
        self._forward_threads = self._ranges.forward_threads()
        self._found: dict[tuple[int, int], Origin] = {}

    def of(self, memory: MemoryColumns, i: int) -> Origin:
        """Return the origin of allocation `i`."""
        step = self._trace.step_at(self._trace.origin_ns + memory.time[i])
        return self._around(memory.thread[i], memory.inner[i])._replace(step=step)

    def _around(self, thread: int, position: int) -> Origin:
        found = self._found.get((thread, position))
        if found is None:
            found = self._found[thread, position] = self._look(thread, position)
        return found

    def _look(self, thread: int, position: int) -> Origin:
        operator = module = phase = None
        stack: list[Frame] = []
        forward: Origin | None = None
        nodes = self._ranges.threads[thread].nodes
        for at, label in self._ranges.chain(thread, position):
            if label.operator and (operator is None or operator in _ALLOCATING):
                operator = label.operator
            module = module or label.module
            phase = phase or phase_of(label, self._trace.stage)
            if label.frame is not None:
                stack.append(label.frame)
            if forward is None and module is None and at in nodes:
                forward = self._forward_of(*nodes[at])
        if forward is not None:
            return Origin(operator, forward.module, phase, forward.stack or tuple(stack))
        return Origin(operator, module, phase, tuple(stack))

    def _forward_of(self, forward_thread: int, sequence: int) -> Origin | None:
        """Return the origin of the forward operator of an autograd node, or None if it is not in the trace."""
        thread = self._forward_threads.get(forward_thread)
        if thread is None:
            return None
        position = self._ranges.threads[thread].created.get(sequence)
        return None if position is None else self._around(thread, position)
