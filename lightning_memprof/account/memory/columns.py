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
import numpy as np

from lightning_memprof.account.ledger.table import NODE
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.events import RANGES, classify
from lightning_memprof.account.trace.events import HostEvents
from lightning_memprof.artifacts.naming import TraceName
from lightning_memprof.read.stacks import Frame, parse_frame
from lightning_memprof.read.trace.columns import STEP_NAME, Kind, TraceColumns, read_columns
from lightning_memprof.read.trace.intervals import Nesting, innermost_at, nesting_order
from lightning_memprof.schedule import Point

_STEP: Final = "ProfilerStep#"
_ACTION: Final = "[pl][profile]"
_MODULE: Final = "[pl][module]"
# The others of Lightning and of this package: hooks.
_RANGE: Final = "[pl]"
_OPTIMIZER_HOOK: Final = ".on_before_optimizer_step"
# c10::DeviceType; 2 and 5 are MKLDNN and IDEEP, which use host memory.
_HOST_TYPES: Final = frozenset({0, 2, 5})
_DEVICE_TYPES: Final = {1: "cuda", 6: "hip", 12: "xpu", 13: "mps", 18: "mtia", 20: "privateuseone"}
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


class MemoryColumns(NamedTuple):
    """Allocations and frees (negative bytes) of one device, by time.

    Attributes:
        time: ns after the origin of the trace.
        bytes: size of the block in bytes, negative for a free.
        address: address of the block; 0 where unknown.
        total: bytes that torch counted as allocated after the event.
        inner: row of the innermost event of the thread at the allocation, -1 for none.
    """

    time: array[int]
    bytes: array[int]
    address: array[int]
    total: array[int]
    inner: array[int]

    @property
    def start_bytes(self) -> int | None:
        """Bytes allocated before the first event; None where torch did not count them."""
        return self.total[0] - self.bytes[0] if self.total[0] else None


class MemoryTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The memory events of one trace by device, with its host events, steps and marks.

    Attributes:
        columns: the trace.
        events: of its host.
        stage: of the run, which tells the phase of Lightning's actions.
        devices: allocations by device.
        steps: start and end in ns after the origin, and step number, by time.
        points: Unix ns and a value of `schedule.Point`, by time.
    """

    columns: TraceColumns
    events: HostEvents
    stage: str
    devices: dict[DeviceMemory, MemoryColumns]
    steps: list[tuple[int, int, int]]
    points: list[tuple[int, str]]

    @property
    def origin_ns(self) -> int:
        """Unix ns of the origin."""
        return self.columns.origin_ns

    def step_at(self, time_ns: int) -> int | None:
        """Return the step at a time (Unix ns), or None outside steps."""
        return step_at(self.steps, time_ns - self.origin_ns)


def step_at(steps: Sequence[tuple[int, int, int]], time: int) -> int | None:
    """Return the number of the step at a time, None outside of steps: (start, end, number) by time."""
    before = bisect_right(steps, time, key=itemgetter(0))
    if not before or steps[before - 1][1] < time:
        return None
    return steps[before - 1][2]


def read_memory(path: Path) -> MemoryTrace:
    """Read a trace once; its name has the stage of the run, which the phases of Lightning's actions depend on.

    Raises:
        ArtifactError: the trace is missing, damaged or truncated.
    """
    columns, name = read_columns(path, with_memory=True), TraceName.parse(path.name)
    events, stage = HostEvents(columns), name.stage if name else "fit"
    steps, points = [], []
    for row in columns.rows_named(lambda name: name.startswith((_STEP, _ACTION)), Kind.ANNOTATION).tolist():
        start, end, text = int(columns.starts[row]), int(columns.ends[row]), columns.name(row)
        if step := STEP_NAME.match(text):
            steps.append((start, end, int(step[1])))
        points += [(columns.origin_ns + moment, point) for moment, point in _points(text, stage, start, end)]
    return MemoryTrace(
        columns=columns,
        events=events,
        stage=stage,
        devices=_devices(columns, events),
        steps=sorted(steps),
        points=sorted(points),
    )


def _devices(columns: TraceColumns, events: HostEvents) -> dict[DeviceMemory, MemoryColumns]:
    found = columns.allocations
    if found is None:
        return {}
    inner = np.full(len(found.moments), -1, np.int64)
    for lane in np.unique(found.lanes).tolist():
        mine = np.flatnonzero(found.lanes == lane)
        rows, parents, _ = events.thread(lane)
        starts, ends = columns.starts[rows], columns.ends[rows]
        # A range still runs at the moment of its end.
        nesting = Nesting(nesting_order(starts, ends), parents, ends + 1)
        at = innermost_at(nesting, starts, found.moments[mine])
        inner[mine] = np.where(at >= 0, rows[at], -1) if len(rows) else -1
    sizes = np.where(np.abs(found.sizes) < _MOST_BYTES, found.sizes, 0)
    order = np.argsort(found.moments, kind="stable")
    result = {}
    for kind, number in dict.fromkeys(map(tuple, found.devices.tolist())):
        mine = order[np.all(found.devices[order] == (kind, number), axis=1)]
        of_device = (found.moments, sizes, found.addresses, found.totals, inner)
        result[DeviceMemory(kind=kind, number=number)] = MemoryColumns(
            *(array("q", column[mine].tobytes()) for column in of_device)
        )
    return result


def _points(name: str, stage: str, start: int, end: int) -> Sequence[tuple[int, str]]:
    """Return the marks of a step at the start and end of a range, as ns after the origin and point."""
    if not name.startswith(_ACTION):
        return (start, Point.STEP_START.value), (end, Point.STEP_END.value)
    action = name[len(_ACTION) :]
    phase = classify(action, stage)
    if action == "run_training_batch":
        return (start, Point.BATCH_START.value), (end, Point.BATCH_END.value)
    if phase == Part.FORWARD.phase:
        return ((end, Point.AFTER_FORWARD.value),)
    if phase == Part.BACKWARD.phase:
        return (start, Point.BEFORE_BACKWARD.value), (end, Point.AFTER_BACKWARD.value)
    if action.startswith("[LightningModule]") and action.endswith(_OPTIMIZER_HOOK):
        return ((start, Point.BEFORE_OPTIMIZER_STEP.value),)
    return ()


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


class _Label(NamedTuple):
    """What is in the name of an event; None for each part that it does not have."""

    operator: str | None = None
    module: str | None = None
    phase: str | None = None
    frame: Frame | None = None


def _label(name: str, kind: int, stage: str) -> _Label:
    if kind == Kind.PYTHON:
        # The names of builtins and modules contain addresses, and none is a line of the user's.
        return _Label() if name.startswith(("<", "nn.Module:")) else _Label(frame=parse_frame(name))
    if name.startswith(NODE):
        return _Label(operator=name[len(NODE) :], phase=Part.BACKWARD.phase)
    if name.startswith(_MODULE):
        return _Label(module=name.rpartition(": ")[2])
    if name.startswith(_ACTION):
        return _Label(phase=classify(name[len(_ACTION) :], stage))
    if kind == Kind.OPERATOR or name.startswith(_RANGE):
        return _Label(operator=name)
    return _Label(phase=next((part.phase for start, part in RANGES.items() if name.startswith(start)), None))


class Origins:
    """Origins of the allocations of a trace, computed once per event of the host."""

    def __init__(self, trace: MemoryTrace) -> None:
        """Index the operators of forward by the autograd nodes that they make."""
        self._trace = trace
        columns = trace.columns
        rows = trace.events.thread(trace.events.training).rows
        rows = rows[(columns.sequences[rows] >= 0) & ~columns.runs_node[rows]]
        rows = rows[np.argsort(columns.starts[rows], kind="stable")]
        # Operators read the next sequence number without taking it; the last operator that reads a number takes it.
        self._makers = dict(zip(columns.sequences[rows].tolist(), rows.tolist(), strict=True))
        self._labels: dict[tuple[int, int], _Label] = {}
        self._found: dict[int, Origin] = {-1: Origin(None, None, None, ())}

    def of(self, memory: MemoryColumns, i: int) -> Origin:
        """Return the origin of allocation `i`."""
        return self._around(memory.inner[i])._replace(step=step_at(self._trace.steps, memory.time[i]))

    def _around(self, row: int) -> Origin:
        if row not in self._found:
            self._found[row] = self._found[-1]  # a damaged trace may have nodes that make themselves
            self._found[row] = self._look(row)
        return self._found[row]

    def _look(self, row: int) -> Origin:
        columns = self._trace.columns
        rows, parents, _ = self._trace.events.thread(int(columns.lanes[row]))
        operator = module = phase = None
        stack: list[Frame] = []
        forward: Origin | None = None
        position = int(np.searchsorted(rows, row))
        while position >= 0:
            row = int(rows[position])
            label = self._label(row)
            if label.operator and (operator is None or operator in _ALLOCATING):
                operator = label.operator
            module = module or label.module
            phase = phase or label.phase
            if label.frame is not None:
                stack.append(label.frame)
            if forward is None and module is None and columns.runs_node[row]:
                maker = self._makers.get(int(columns.sequences[row]))
                forward = None if maker is None else self._around(maker)
            position = int(parents[position])
        if forward is not None:
            return Origin(operator, forward.module, phase, forward.stack or tuple(stack))
        return Origin(operator, module, phase, tuple(stack))

    def _label(self, row: int) -> _Label:
        columns = self._trace.columns
        key = int(columns.names[row]), int(columns.kinds[row])
        if key not in self._labels:
            self._labels[key] = _label(columns.name_of[key[0]], key[1], self._trace.stage)
        return self._labels[key]
