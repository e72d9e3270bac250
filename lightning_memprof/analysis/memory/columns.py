"""What an operator trace says about memory, as columns: its `[memory]` events by device, and what ran around them."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

from lightning_memprof.analysis.trace.events import OperatorEvent, read_trace
from lightning_memprof.analysis.trace.threads import HostRanges, Label
from lightning_memprof.schedule import Point

__all__ = ["DeviceMemory", "MemoryColumns", "MemoryTrace", "read_memory"]

_MEMORY: Final = "[memory]"
_OPTIMIZER_HOOK: Final = ".on_before_optimizer_step"
# c10::DeviceType; 2 and 5 are MKLDNN and IDEEP, which are the host's memory.
_HOST_TYPES: Final = frozenset({0, 2, 5})
_DEVICE_TYPES: Final = {1: "cuda", 6: "hip", 12: "xpu", 13: "mps", 18: "mtia", 20: "privateuseone"}
_LARGEST: Final = 1 << 62
_MOST_BYTES: Final = 1 << 50  # a block of a PiB is damage, and sums of blocks stay in 64 bits


class DeviceMemory(NamedTuple):
    """A device as a trace numbers it: c10's type, 0 for the host, and its index, -1 for none."""

    kind: int
    number: int

    @property
    def is_host(self) -> bool:
        """Whether its memory is the host's."""
        return self.kind in _HOST_TYPES

    def __str__(self) -> str:
        """Torch's name of the device."""
        if self.is_host:
            return "cpu"
        name = _DEVICE_TYPES.get(self.kind, f"device type {self.kind}")
        return name if self.number < 0 else f"{name}:{self.number}"


@dataclass(slots=True)
class MemoryColumns:
    """Allocations and frees (negative bytes) of one device in the order of time.

    Times are ns after the trace's origin; `total` is what torch had counted after each; `inner` is the innermost range
    of the event's thread, -1 for none.
    """

    time: array[int] = field(default_factory=lambda: array("q"))
    bytes: array[int] = field(default_factory=lambda: array("q"))
    address: array[int] = field(default_factory=lambda: array("q"))
    total: array[int] = field(default_factory=lambda: array("q"))
    thread: array[int] = field(default_factory=lambda: array("i"))
    inner: array[int] = field(default_factory=lambda: array("i"))

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


@dataclass(slots=True)
class MemoryTrace:
    """One trace: memory by device, the ranges around it, and its steps and marks.

    `steps` are start and end in ns after the origin, and number; `points` Unix ns and a value of `schedule.Point`.
    Both are in the order of time, and `origin_ns` is Unix ns.
    """

    ranges: HostRanges
    devices: dict[DeviceMemory, MemoryColumns] = field(default_factory=dict)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    points: list[tuple[int, str]] = field(default_factory=list)
    origin_ns: int = 0
    _memory: MemoryColumns = field(default_factory=MemoryColumns)
    _device: array[int] = field(default_factory=lambda: array("i"))
    _numbers: dict[DeviceMemory, int] = field(default_factory=dict)

    def step_at(self, time_ns: int) -> int | None:
        """Return the step that ran at a moment (Unix ns), or None."""
        at = time_ns - self.origin_ns
        before = bisect_right(self.steps, at, key=itemgetter(0))
        if not before:
            return None
        _, end, step = self.steps[before - 1]
        return step if at <= end else None

    def add(self, event: OperatorEvent) -> None:
        """Take an event if it is about memory or about what runs on the host."""
        if event.name == _MEMORY:
            device = DeviceMemory(event.args.device_type, event.args.device_id)
            self._device.append(self._numbers.setdefault(device, len(self._numbers)))
            self._memory.add(event, self.ranges.thread(event))
        elif event.ph == "X":
            label = self.ranges.add(event)
            if label is None:
                return
            if label.step is not None:
                self.steps.append((event.start_ns, event.start_ns + event.duration_ns, label.step))
            if label.step is not None or label.action is not None:
                self.points += _points(event, label)

    def finish(self, origin_ns: int) -> None:
        """Sort, and find what ran at every allocation: all events were taken."""
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


def read_memory(path: Path, stage: str = "fit") -> MemoryTrace:
    """Read a trace once.

    Args:
        path: the trace.
        stage: the run's stage, which tells the phase of Lightning's actions.

    Raises:
        ArtifactError: the trace is missing, damaged or cut off.

    """
    trace = read_trace(path)
    found = MemoryTrace(HostRanges(stage))
    for batch in trace.batches():
        for event in batch:
            found.add(event)
    found.finish(trace.time_origin_ns)
    return found


def _points(event: OperatorEvent, label: Label) -> Sequence[tuple[int, str]]:
    """Return the points of a step at which the range starts or ends."""
    start, end = event.start_ns, event.start_ns + event.duration_ns
    if label.step is not None:
        return (start, Point.STEP_START.value), (end, Point.STEP_END.value)
    action = label.action or ""
    if action == "run_training_batch":
        return (start, Point.BATCH_START.value), (end, Point.BATCH_END.value)
    if label.phase == "forward":
        return ((end, Point.AFTER_FORWARD.value),)
    if label.phase == "backward":
        return (start, Point.BEFORE_BACKWARD.value), (end, Point.AFTER_BACKWARD.value)
    if action.startswith("[LightningModule]") and action.endswith(_OPTIMIZER_HOOK):
        return ((start, Point.BEFORE_OPTIMIZER_STEP.value),)
    return ()


def _bounded(number: int, most: int) -> int:
    return number if -most < number < most else 0
