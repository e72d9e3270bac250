"""Saved traces to the rows of the operator table: what torch's `key_averages()` counts, computed from the file.

Events do not come in the order of their start (torch writes thread after thread and a few events late, torch 1.9 wrote
them in order of their end), so a trace's columns are kept until its end and nested then. Kept are 32 bytes for
each CPU event, 24 for each memory event and about 100 for each operator that launched device work; a thread that is not
sorted costs about 80 more for each of its events while it is being sorted. Rows cost by their number.

What torch's trace does not hold cannot be counted: floating point operations, whether an event was asynchronous, and
names that Kineto replaces as it writes them (one with control or non-ASCII characters becomes `unknown`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from lightning_memprof.analysis.trace.nesting import Columns, Memory, OperatorRow, nest
from lightning_memprof.analysis.trace.reader import Event, Trace, read_trace

__all__ = ["OperatorRows", "collect_rows"]

_MEMORY: Final = "[memory]"
_OUT_OF_MEMORY: Final = "[OutOfMemory]"
_HIDDEN: Final = frozenset(
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
_CPU: Final = _OPERATORS | _RUNTIME | _OTHER_CPU
_DEVICE: Final = frozenset(
    {"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_sync", "Kernel", "Memcpy", "Memset"}
)
_ANNOTATIONS: Final = frozenset({"user_annotation", "gpu_user_annotation"})
# c10::DeviceType: CPU, MKLDNN, IDEEP; CUDA, HIP, XPU, PrivateUse1
_CPU_MEMORY: Final = frozenset({0, 2, 5})
_DEVICE_MEMORY: Final = frozenset({1, 6, 12, 20})


@dataclass(slots=True)
class OperatorRows:
    """The rows of all windows, in the order of their first events, and what the table's columns depend on."""

    rows: list[OperatorRow] = field(default_factory=list)
    windows: int = 0
    profile_memory: bool = False
    device_name: str | None = None


def collect_rows(traces: Iterable[Path], *, group_by_input_shapes: bool) -> OperatorRows:
    """Read every trace once and sum up its events by name, or by name and shapes of the inputs.

    Raises:
        ArtifactError: a trace is missing, damaged or cut off.
    """
    collector = _Collector(group_by_input_shapes=group_by_input_shapes)
    for path in traces:
        collector.add(read_trace(path))
    return collector.result


class _Collector:
    def __init__(self, *, group_by_input_shapes: bool) -> None:
        self.result = OperatorRows()
        self._by_shapes = group_by_input_shapes
        self._numbers: dict[tuple[str, bool, bool, bytes | str], int] = {}
        self._rows: list[OperatorRow] = []

    def add(self, trace: Trace) -> None:
        """Add one window."""
        window = _Window()
        for batch in trace.batches():
            for event in batch:
                self._take(event, window)
        window.finish(self._rows, self._rows[self._number(_MEMORY, "")])
        new = sorted((row for row in self._rows if row.count and not row.is_listed), key=lambda row: row.first)
        for row in new:
            row.list_it()
        result = self.result
        result.rows += new
        result.windows += 1
        result.profile_memory |= bool(trace.metadata.get("profile_memory") or window.memory.time)
        result.device_name = result.device_name or window.device_name

    def _take(self, event: Event, window: _Window) -> None:
        category = event.cat
        if category in _CPU:
            if event.ph == "X" and event.name not in _HIDDEN:
                dims = bytes(event.args.input_dims) if self._by_shapes else b""
                window.add_cpu(event, self._number(event.name, category, dims))
        elif category in _DEVICE:
            if event.ph == "X":
                window.add_device(event, self._rows[self._number(event.name, category)])
        elif event.name == _MEMORY:
            window.add_memory(event)
        elif event.name == _OUT_OF_MEMORY:
            row = self._rows[self._number(event.name, category)]
            row.see((event.start_ns, -event.start_ns, 0), is_nested=False)

    def _number(self, name: str, category: str, dims: bytes = b"") -> int:
        """The number of the row that counts events of this kind."""
        on_device, is_annotation = category in _DEVICE, category in _ANNOTATIONS
        written = (name, on_device, is_annotation, dims)
        number = self._numbers.get(written)
        if number is None:
            # Many spellings in the file can be one row: it is looked up by what is shown.
            shown = "ProfilerStep*" if name.startswith("ProfilerStep#") else name
            shapes = _shapes_text(dims) if self._by_shapes else ""
            number = self._numbers.setdefault((shown, on_device, is_annotation, shapes), len(self._rows))
            if number == len(self._rows):
                self._rows.append(OperatorRow(shown, on_device, is_annotation, shapes))
            self._numbers[written] = number
        return number


class _Window:
    """The columns of one trace."""

    def __init__(self) -> None:
        self.memory = Memory()
        self._threads: dict[tuple[int | str, int | str], Columns] = {}
        self._overhead = Columns()
        self._launched_ns: dict[int, int] = {}
        self._categories: set[str] = set()
        self._events = 0

    @property
    def device_name(self) -> str | None:
        """What torch calls the accelerator in the table, None where the trace saw none."""
        if "xpu_runtime" in self._categories:
            return "XPU"
        return "CUDA" if self._categories & (_DEVICE | _RUNTIME) else None

    def add_cpu(self, event: Event, row: int) -> None:
        category = event.cat
        self._categories.add(category)
        if category == "overhead":
            columns = self._overhead
        else:
            thread = (event.pid, event.tid)
            known = self._threads.get(thread)
            columns = known if known is not None else self._threads.setdefault(thread, Columns())
        start = event.start_ns
        columns.start.append(start)
        columns.end.append(start + event.duration_ns)
        # A runtime call carries the number of the operator it belongs to, but only the operator owns the kernels.
        columns.link.append(event.args.link if category in _OPERATORS else 0)
        columns.row.append(row)
        columns.place.append(self._events)
        self._events += 1

    def add_device(self, event: Event, row: OperatorRow) -> None:
        category = event.cat
        self._categories.add(category)
        duration = event.duration_ns
        self._events += 1
        row.see((event.start_ns, -event.start_ns - duration, self._events), is_nested=False)
        row.device_ns += duration
        row.self_device_ns += duration
        link = event.args.link
        # A device-side annotation spans kernels that are counted themselves.
        if link and category != "gpu_user_annotation":
            self._launched_ns[link] = self._launched_ns.get(link, 0) + duration

    def add_memory(self, event: Event) -> None:
        args = event.args
        self.memory.time.append(event.start_ns)
        self.memory.cpu.append(args.bytes if args.device_type in _CPU_MEMORY else 0)
        self.memory.device.append(args.bytes if args.device_type in _DEVICE_MEMORY else 0)

    def finish(self, rows: list[OperatorRow], free_memory: OperatorRow) -> None:
        """Add the window's events to their rows; memory that moved while no operator ran goes to `free_memory`."""
        self.memory.close()
        self._place_overhead()
        while self._threads:
            _, columns = self._threads.popitem()
            nest(columns, rows, self.memory, self._launched_ns)
        self.memory.add_uncovered(free_memory)

    def _place_overhead(self) -> None:
        """Count the profiler's own work on the main thread, as torch does."""
        if not self._overhead.start:
            return
        for (pid, tid), columns in self._threads.items():
            if pid == tid:
                columns.extend(self._overhead)
                return
        self._threads["", "overhead"] = self._overhead


def _shapes_text(dims: bytes) -> str:
    """The shapes as torch prints them: a list of tensors is one empty entry, whatever is in it."""
    found = msgspec.json.decode(dims) if dims else []
    shapes = found if isinstance(found, list) else []
    return str([[] if isinstance(s, list) and any(isinstance(n, list) for n in s) else s for s in shapes])
