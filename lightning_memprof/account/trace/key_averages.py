"""The rows of torch's `key_averages()`, computed from saved traces.

Events are not in the order of their start (torch writes thread after thread and a few events late, torch 1.9 wrote them
in order of their end), so a trace's columns are kept until its end and nested then: 32 bytes for each CPU event, 24 for
each memory event and about 100 for each operator that launched device work; nesting takes about 130 more for each event
of one thread at a time. Rows cost by their number.

A trace does not contain floating point operations, whether an event was asynchronous, and the names that Kineto
replaces when it writes them (a name with control or non-ASCII characters becomes `unknown`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_memprof.read.trace.events import OperatorEvent, Trace, read_trace
from lightning_memprof.read.trace.intervals import Column, nest

MEMORY: Final = "[memory]"
_OUT_OF_MEMORY: Final = "[OutOfMemory]"
HIDDEN: Final = frozenset(
    {
        "profiler::_record_function_enter",
        "profiler::_record_function_enter_new",
        "profiler::_record_function_exit",
        "aten::is_leaf",
        "aten::output_nr",
        "aten::_version",
    }
)
_OPERATORS: Final = frozenset({"cpu_op", "user_annotation", "Operator"})
_RUNTIME: Final = frozenset({"cuda_runtime", "cuda_driver", "Runtime"})
_OTHER_CPU: Final = frozenset(
    {
        "python_function",
        "overhead",
        "xpu_runtime",
        "mtia_runtime",
        "glow_runtime",
        "privateuse1_runtime",
        "privateuse1_driver",
    }
)
CPU: Final = _OPERATORS | _RUNTIME | _OTHER_CPU
DEVICE: Final = frozenset(
    {"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_sync", "Kernel", "Memcpy", "Memset"}
)
_ANNOTATIONS: Final = frozenset({"user_annotation", "gpu_user_annotation"})
# c10::DeviceType: CPU, MKLDNN, IDEEP; CUDA, HIP, XPU, PrivateUse1
CPU_MEMORY: Final = frozenset({0, 2, 5})
DEVICE_MEMORY: Final = frozenset({1, 6, 12, 20})

_Place = tuple[int, int, int]  # start, -end, position in the file
_LATEST: Final = (1 << 62, 0, 0)
_BEFORE_ALL: Final = (-(1 << 62), 0, 0)
_BEHIND_ALL: Final = 1 << 40  # positions of memory events: torch appends them to its list of events


class OperatorRow(msgspec.Struct, eq=False, kw_only=True):
    """One row of the table: all events of one name (and shapes). Times in ns, memory in bytes, both signed sums.

    Attributes:
        is_nested: whether the first event ran inside another one.
        first: place of the first event, which orders the rows.
    """

    name: str
    on_device: bool = False
    is_annotation: bool = False
    input_shapes: str = ""
    count: int = 0
    cpu_ns: int = 0
    self_cpu_ns: int = 0
    device_ns: int = 0
    self_device_ns: int = 0
    cpu_bytes: int = 0
    self_cpu_bytes: int = 0
    device_bytes: int = 0
    self_device_bytes: int = 0
    is_nested: bool = False
    first: _Place = _LATEST

    @property
    def is_listed(self) -> bool:
        """Whether an earlier window already gave this row its place."""
        return self.first == _BEFORE_ALL

    def list_it(self) -> None:
        """Keep the row's place for all later windows."""
        self.first = _BEFORE_ALL

    def count_events(self, count: int, first: _Place, *, is_nested: bool) -> None:
        """Add events to the count, the first of them at `first`."""
        self.count += count
        if first < self.first:
            self.first = first
            self.is_nested = is_nested


class OperatorRows(msgspec.Struct, kw_only=True):
    """The rows of all windows, in the order of their first events, and the facts that decide the table's columns."""

    rows: list[OperatorRow] = msgspec.field(default_factory=list)
    windows: int = 0
    profile_memory: bool = False
    device_name: str | None = None


def collect_rows(
    traces: Iterable[Path], *, group_by_input_shapes: bool, include_python_functions: bool = True
) -> OperatorRows:
    """Read every trace once and sum up its events by name, or by name and shapes of the inputs.

    Args:
        traces: files of `torch.profiler`, one a window.
        group_by_input_shapes: whether each shape of the inputs has a row.
        include_python_functions: whether Python functions have rows; either way they count as callers of operators.

    Raises:
        ArtifactError: a trace is missing, damaged or truncated.
    """
    collector = _Collector(group_by_input_shapes, include_python_functions)
    for path in traces:
        collector.add(read_trace(path))
    return collector.result


class _Collector:
    def __init__(self, by_shapes: bool, python_functions: bool) -> None:  # noqa: FBT001 private
        self.result = OperatorRows()
        self._by_shapes = by_shapes
        self._left_out = frozenset[str]() if python_functions else frozenset({"python_function"})
        self._numbers: dict[tuple[str, bool, bool, bool, bytes | str], int] = {}
        self._rows: list[OperatorRow] = []
        self._left_out_rows: set[int] = set()

    def add(self, trace: Trace) -> None:
        """Add one window."""
        window = _Window()
        for batch in trace.batches():
            for event in batch:
                self._take(event, window)
        window.finish(self._rows, self._rows[self._number(MEMORY, "")])
        kept = (row for number, row in enumerate(self._rows) if number not in self._left_out_rows)
        new = sorted((row for row in kept if row.count and not row.is_listed), key=lambda row: row.first)
        for row in new:
            row.list_it()
        result = self.result
        result.rows += new
        result.windows += 1
        result.profile_memory |= bool(trace.metadata.get("profile_memory") or window.memory.time)
        result.device_name = result.device_name or window.device_name

    def _take(self, event: OperatorEvent, window: _Window) -> None:
        category = event.cat
        if category in CPU:
            if event.ph == "X" and event.name not in HIDDEN:
                dims = bytes(event.args.input_dims) if self._by_shapes else b""
                window.add_cpu(event, self._number(event.name, category, dims))
        elif category in DEVICE:
            if event.ph == "X":
                window.add_device(event, self._rows[self._number(event.name, category)])
        elif event.name == MEMORY:
            window.add_memory(event)
        elif event.name == _OUT_OF_MEMORY:
            row = self._rows[self._number(event.name, category)]
            row.count_events(1, (event.start_ns, -event.start_ns, 0), is_nested=False)

    def _number(self, name: str, category: str, dims: bytes = b"") -> int:
        """Return the number of the row that counts events of this kind."""
        on_device, is_annotation, is_left_out = category in DEVICE, category in _ANNOTATIONS, category in self._left_out
        written = (name, on_device, is_annotation, is_left_out, dims)
        number = self._numbers.get(written)
        if number is None:
            # Several spellings in the file can be one row: it is looked up by the text of the table.
            shown = "ProfilerStep*" if name.startswith("ProfilerStep#") else name
            shapes = _shapes_text(dims) if self._by_shapes else ""
            number = self._numbers.setdefault((shown, on_device, is_annotation, is_left_out, shapes), len(self._rows))
            if number == len(self._rows):
                row = OperatorRow(name=shown, on_device=on_device, is_annotation=is_annotation, input_shapes=shapes)
                self._rows.append(row)
                if is_left_out:
                    self._left_out_rows.add(number)
            self._numbers[written] = number
        return number


def _longs() -> array[int]:
    return array("q")


class _Thread(msgspec.Struct):
    """The CPU events of one thread: times in ns, link to device work (0: none), row number, position in the file."""

    start: array[int] = msgspec.field(default_factory=_longs)
    end: array[int] = msgspec.field(default_factory=_longs)
    link: array[int] = msgspec.field(default_factory=_longs)
    row: array[int] = msgspec.field(default_factory=lambda: array("i"))
    place: array[int] = msgspec.field(default_factory=lambda: array("I"))

    def extend(self, other: _Thread) -> None:
        """Append all events of another thread."""
        for name in self.__struct_fields__:
            getattr(self, name).extend(getattr(other, name))


class _Memory(msgspec.Struct):
    """Allocations and frees of all threads: torch counts those that happen while an operator runs, on any thread.

    Times in ns, and signed bytes; `covered` rises where an operator begins and falls where it ends.
    """

    time: array[int] = msgspec.field(default_factory=_longs)
    cpu: array[int] = msgspec.field(default_factory=_longs)
    device: array[int] = msgspec.field(default_factory=_longs)
    times: Column = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))
    sums: list[Column] = msgspec.field(default_factory=list)
    covered: Column = msgspec.field(default_factory=lambda: np.zeros(1, np.int64))

    def close(self) -> None:
        """Sort by time and make running sums of the bytes, with one entry more than there are events."""
        order = np.argsort(np.asarray(self.time), kind="stable")
        self.times = np.asarray(self.time)[order]
        self.sums = [np.append(0, np.cumsum(np.asarray(column)[order])) for column in (self.cpu, self.device)]
        self.covered = np.zeros(len(order) + 1, np.int64)

    def change(self, starts: Column, ends: Column, is_outermost: NDArray[np.bool_]) -> list[Column]:
        """Return host and device bytes allocated from each start to each end, both inclusive."""
        first, last = np.searchsorted(self.times, starts), np.searchsorted(self.times, ends, side="right")
        np.add.at(self.covered, first[is_outermost], 1)
        np.add.at(self.covered, last[is_outermost], -1)
        return [sums[last] - sums[first] for sums in self.sums]

    def add_uncovered(self, row: OperatorRow) -> None:
        """Count in `row` the events that happened while no operator ran."""
        free = np.flatnonzero(np.cumsum(self.covered[:-1]) == 0)
        if not len(free):
            return
        time = int(self.times[free[0]])
        row.count_events(len(free), (time, -time, _BEHIND_ALL + int(free[0])), is_nested=False)
        cpu, device = (int(np.sum(np.diff(sums)[free])) for sums in self.sums)
        row.cpu_bytes += cpu
        row.self_cpu_bytes += cpu
        row.device_bytes += device
        row.self_device_bytes += device


class _Window:
    """The columns of one trace."""

    def __init__(self) -> None:
        self.memory = _Memory()
        self._threads: dict[tuple[int | str, int | str], _Thread] = {}
        self._overhead = _Thread()
        self._launched_ns: dict[int, int] = {}
        self._categories: set[str] = set()
        self._events = 0

    @property
    def device_name(self) -> str | None:
        """Torch's name of the accelerator in the table, None where the trace has none."""
        if "xpu_runtime" in self._categories:
            return "XPU"
        return "CUDA" if self._categories & (DEVICE | _RUNTIME) else None

    def add_cpu(self, event: OperatorEvent, row: int) -> None:
        category = event.cat
        self._categories.add(category)
        if category == "overhead":
            thread = self._overhead
        else:
            lane = (event.pid, event.tid)
            known = self._threads.get(lane)
            thread = known if known is not None else self._threads.setdefault(lane, _Thread())
        start = event.start_ns
        thread.start.append(start)
        thread.end.append(start + event.duration_ns)
        # A runtime call carries the number of its operator, but only the operator owns the kernels.
        thread.link.append(event.args.link if category in _OPERATORS else 0)
        thread.row.append(row)
        thread.place.append(self._events)
        self._events += 1

    def add_device(self, event: OperatorEvent, row: OperatorRow) -> None:
        category = event.cat
        self._categories.add(category)
        duration = event.duration_ns
        row.count_events(1, (event.start_ns, -event.start_ns - duration, self._events), is_nested=False)
        self._events += 1
        row.device_ns += duration
        row.self_device_ns += duration
        link = event.args.link
        # A device-side annotation spans kernels that are counted themselves.
        if link and category != "gpu_user_annotation":
            self._launched_ns[link] = self._launched_ns.get(link, 0) + duration

    def add_memory(self, event: OperatorEvent) -> None:
        args = event.args
        self.memory.time.append(event.start_ns)
        self.memory.cpu.append(args.bytes if args.device_type in CPU_MEMORY else 0)
        self.memory.device.append(args.bytes if args.device_type in DEVICE_MEMORY else 0)

    def finish(self, rows: Sequence[OperatorRow], free_memory: OperatorRow) -> None:
        """Add the window's events to their rows; memory events while no operator ran go to `free_memory`."""
        self.memory.close()
        self._place_overhead()
        while self._threads:
            _, thread = self._threads.popitem()
            _add_thread(thread, rows, self.memory, self._launched_ns)
        self.memory.add_uncovered(free_memory)

    def _place_overhead(self) -> None:
        """Count the profiler's own work on the main thread, as torch does."""
        if not self._overhead.start:
            return
        for (pid, tid), thread in self._threads.items():
            if pid == tid:
                thread.extend(self._overhead)
                return
        self._threads["", "overhead"] = self._overhead


def _add_thread(thread: _Thread, rows: Sequence[OperatorRow], memory: _Memory, launched_ns: dict[int, int]) -> None:
    """Add every event of a thread to its row, as torch counts them.

    An event is the child of the innermost one that contains it wholly; one that overlaps its neighbour only in part is
    neither its parent nor its child. An operator whose only child has its own name, its twin, is one operator with it:
    it has the children and the kernels of the twin, and the twin is not counted.
    """
    starts, ends, numbers = (np.asarray(column) for column in (thread.start, thread.end, thread.row))
    order, parents, _ = nest(starts, ends)
    inner = np.flatnonzero(parents >= 0)
    counted, innermost_twin = _twins(parents, inner, _same_names(rows)[numbers])

    def without_children(values: Column) -> Column:
        of_children = np.zeros(len(values), np.int64)
        np.add.at(of_children, parents[inner], values[inner])
        return values - of_children[innermost_twin]

    kernels = np.array([launched_ns.get(link, 0) for link in thread.link], np.int64)[innermost_twin]
    cpu_bytes, device_bytes = memory.change(starts, ends, parents < 0)
    sums = {
        "cpu_ns": ends - starts,
        "self_cpu_ns": without_children(ends - starts),
        "device_ns": _with_descendants(np.where(counted, kernels, 0), order, parents),
        "self_device_ns": kernels,
        "cpu_bytes": cpu_bytes,
        "self_cpu_bytes": without_children(cpu_bytes),
        "device_bytes": device_bytes,
        "self_device_bytes": without_children(device_bytes),
    }
    places = np.asarray(thread.place).astype(np.int64)
    by_place = np.lexsort((places, -ends, starts))
    by_place = by_place[counted[by_place]]
    present, first, counts = np.unique(numbers[by_place], return_index=True, return_counts=True)
    for number, event, count in zip(present.tolist(), by_place[first].tolist(), counts.tolist(), strict=True):
        place = (int(starts[event]), -int(ends[event]), int(places[event]))
        rows[number].count_events(count, place, is_nested=bool(parents[event] >= 0))
    for name, values in sums.items():
        totals = np.zeros(len(rows), np.int64)
        np.add.at(totals, numbers[counted], values[counted])
        for number in present.tolist():
            setattr(rows[number], name, getattr(rows[number], name) + int(totals[number]))


def _same_names(rows: Sequence[OperatorRow]) -> NDArray[np.int64]:
    """Return a number for each row that rows of one name share."""
    found: dict[str, int] = {}
    return np.array([found.setdefault(row.name, len(found)) for row in rows], np.int64)


def _twins(parents: Column, inner: Column, names: Column) -> tuple[NDArray[np.bool_], Column]:
    """Return which events are not twins, and for each event the innermost twin below it, or itself."""
    around = parents[inner]
    twins = inner[(np.bincount(around, minlength=len(parents))[around] == 1) & (names[around] == names[inner])]
    counted = np.full(len(parents), fill_value=True)
    counted[twins] = False
    below = np.arange(len(parents))
    below[parents[twins]] = twins
    while np.any(below != (further := below[below])):
        below = further
    return counted, below


def _with_descendants(values: Column, order: Column, parents: Column) -> Column:
    """Add to each event's value those of all events inside it."""
    if not np.any(values):
        return values
    sums, around = values.tolist(), parents.tolist()
    for event in reversed(order.tolist()):
        if around[event] >= 0:
            sums[around[event]] += sums[event]
    return np.array(sums, np.int64)


def _shapes_text(dims: bytes) -> str:
    """The shapes as torch prints them: a list of tensors is one empty entry, whatever is in it."""
    found = msgspec.json.decode(dims) if dims else []
    shapes = found if isinstance(found, list) else []
    return str([[] if isinstance(s, list) and any(isinstance(n, list) for n in s) else s for s in shapes])
