"""The `[memory]` events of an operator trace, as columns by device, and the origin of each allocation.

Device bytes are the allocator's blocks. On the host torch records only blocks that were allocated under a profiler, and
no free between two profiles: its totals are not used there.

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
from lightning_memprof.account.trace.events import HostEvents, node_makers
from lightning_memprof.artifacts.naming import TraceName
from lightning_memprof.read.stacks import Frame, parse_frame
from lightning_memprof.read.trace.columns import STEP_NAME, Allocations, Kind, TraceColumns, read_in_full
from lightning_memprof.read.trace.intervals import Nesting, innermost_at, nesting_order
from lightning_memprof.schedule import Point

_STEP: Final = "ProfilerStep#"
_ACTION: Final = "[pl][profile]"
_MODULE: Final = "[pl][module]"
# The others of Lightning and of this package: hooks.
_RANGE: Final = "[pl]"
_OPTIMIZER_HOOK: Final = ".on_before_optimizer_step"
# c10::DeviceType.
_HOST: Final = 0
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


# Start, end and number.
Step = tuple[int, int, int]


class DeviceMemory(NamedTuple):
    """A device as numbered in a trace: its c10 type, 0 for the host, and its index, -1 for none."""

    kind: int
    number: int

    @property
    def is_host(self) -> bool:
        """Whether this is host memory."""
        return self.kind == _HOST

    def __str__(self) -> str:
        """Return the name that torch gives the device: `cpu`, `cuda:0`, ..."""
        if self.is_host:
            return "cpu"
        name = _DEVICE_TYPES.get(self.kind, f"device type {self.kind}")
        return name if self.number < 0 else f"{name}:{self.number}"


class MemoryColumns(NamedTuple):
    """Allocations and frees (negative bytes) of one device, by time.

    Attributes:
        start_bytes: bytes allocated before the first event; None where torch did not count them.
        time: Unix ns.
        bytes: size of the block in bytes, negative for a free.
        address: address of the block.
        inner: row of the innermost event of the thread at the allocation, -1 for none.
    """

    start_bytes: int | None
    time: array[int]
    bytes: array[int]
    address: array[int]
    inner: array[int]


class MemoryTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The memory events of one trace by device, with their origins, and its steps and marks.

    Attributes:
        origins: by row of the innermost event.
        devices: allocations by device.
        steps: start and end in Unix ns, and step number, by time.
        points: Unix ns and a value of `schedule.Point`, by time.
    """

    origins: Origins
    devices: dict[DeviceMemory, MemoryColumns]
    steps: list[Step]
    points: list[tuple[int, str]]


def step_at(steps: Sequence[Step], time: int) -> int | None:
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
    (columns, details), name = read_in_full(path), TraceName.parse(path.name)
    events, stage = HostEvents(columns), name.stage if name else "fit"
    steps: list[Step] = []
    points: list[tuple[int, str]] = []
    for row in columns.rows_named(lambda name: name.startswith((_STEP, _ACTION)), Kind.ANNOTATION).tolist():
        start, end = (columns.origin_ns + int(times[row]) for times in (columns.starts, columns.ends))
        text = columns.name(row)
        if step := STEP_NAME.match(text):
            steps.append((start, end, int(step[1])))
        points += _points(text, stage, start, end)
    return MemoryTrace(
        origins=Origins(columns, events, stage),
        devices=_devices(columns, events, details.allocations),
        steps=sorted(steps),
        points=sorted(points),
    )


def _devices(columns: TraceColumns, events: HostEvents, found: Allocations) -> dict[DeviceMemory, MemoryColumns]:
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
    # Torch before 1.11 does not identify blocks.
    order = np.argsort(found.moments, kind="stable")
    order = order[found.addresses[order] != 0]
    result = {}
    for kind, number in dict.fromkeys(map(tuple, found.devices[order].tolist())):
        mine = order[np.all(found.devices[order] == (kind, number), axis=1)]
        of_device = (columns.origin_ns + found.moments, sizes, found.addresses, inner)
        total, first = int(found.totals[mine[0]]), int(sizes[mine[0]])
        result[DeviceMemory(kind=kind, number=number)] = MemoryColumns(
            total - first if total else None, *(array("q", column[mine].tobytes()) for column in of_device)
        )
    return result


def _points(name: str, stage: str, start: int, end: int) -> Sequence[tuple[int, str]]:
    """Return the marks of a step at the start and end of a range, as time and point."""
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


class Origin(NamedTuple):
    """Origin of an allocation: operator, module and phase as in `Site`; frames innermost first."""

    operator: str | None = None
    module: str | None = None
    phase: str | None = None
    stack: tuple[Frame, ...] = ()


NOWHERE: Final = -1
"""Row for allocations outside of all events."""


def _label(name: str, kind: int, stage: str) -> Origin:
    """Return what the name of an event tells of an origin."""
    if kind == Kind.PYTHON:
        # The names of builtins and modules contain addresses, and none is a line of the user's.
        frame = None if name.startswith(("<", "nn.Module:")) else parse_frame(name)
        return Origin(stack=() if frame is None else (frame,))
    if name.startswith(NODE):
        return Origin(operator=name[len(NODE) :], phase=Part.BACKWARD.phase)
    if name.startswith(_MODULE):
        return Origin(module=name.rpartition(": ")[2])
    if name.startswith(_ACTION):
        return Origin(phase=classify(name[len(_ACTION) :], stage))
    if kind == Kind.OPERATOR or name.startswith(_RANGE):
        return Origin(operator=name)
    return Origin(phase=next((part.phase for start, part in RANGES.items() if name.startswith(start)), None))


class Origins:
    """Origins of the allocations of a trace, by row of the innermost event; each is computed when it is first used."""

    def __init__(self, columns: TraceColumns, events: HostEvents, stage: str) -> None:
        """Index the operators of forward by the autograd nodes that they make."""
        self._columns, self._events, self._stage = columns, events, stage
        rows = events.thread(events.training).rows
        rows = rows[node_makers(columns, rows)]
        self._makers = dict(zip(columns.sequences[rows].tolist(), rows.tolist(), strict=True))
        self._labels: dict[tuple[int, int], Origin] = {}
        self._found: dict[int, Origin] = {NOWHERE: Origin()}

    def __getitem__(self, row: int) -> Origin:
        """Return the origin of the allocations inside of an event, -1 for those outside of all."""
        if row not in self._found:
            self._found[row] = self._found[NOWHERE]  # a damaged trace may have nodes that make themselves
            self._found[row] = self._look(row)
        return self._found[row]

    def _look(self, row: int) -> Origin:
        columns = self._columns
        rows, parents, _ = self._events.thread(int(columns.lanes[row]))
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
            stack += label.stack
            if forward is None and module is None and columns.runs_node[row]:
                maker = self._makers.get(int(columns.sequences[row]))
                forward = None if maker is None else self[maker]
            position = int(parents[position])
        if forward is not None:
            return Origin(operator, forward.module, phase, forward.stack or tuple(stack))
        return Origin(operator, module, phase, tuple(stack))

    def _label(self, row: int) -> Origin:
        key = int(self._columns.names[row]), int(self._columns.kinds[row])
        if key not in self._labels:
            self._labels[key] = _label(self._columns.name_of[key[0]], key[1], self._stage)
        return self._labels[key]
