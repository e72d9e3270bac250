"""The rows of torch's `key_averages()`, computed from saved traces.

A trace's columns take 58 bytes for each event and 64 for each memory event; nesting takes about 130 more for each event
of one thread at a time. Rows cost by their number.

A trace does not contain floating point operations, whether an event was asynchronous, and the names that Kineto
replaces when it writes them (a name with control or non-ASCII characters becomes `unknown`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_memprof.read.trace.columns import MEMORY, OUT_OF_MEMORY, Allocations, Details, TraceColumns, read_in_full
from lightning_memprof.read.trace.intervals import Column, lookup, nest

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
_PYTHON: Final = "python_function"
_OVERHEAD: Final = "overhead"
_RUNTIME: Final = frozenset({"cuda_runtime", "cuda_driver", "Runtime"})
_OTHER_CPU: Final = frozenset(
    {
        _PYTHON,
        _OVERHEAD,
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
_SPAN: Final = "gpu_user_annotation"
_ANNOTATIONS: Final = frozenset({"user_annotation", _SPAN})
# c10::DeviceType: CPU, MKLDNN, IDEEP; CUDA, HIP, XPU, PrivateUse1
CPU_MEMORY: Final = frozenset({0, 2, 5})
DEVICE_MEMORY: Final = frozenset({1, 6, 12, 20})

_BEHIND_ALL: Final = 1 << 40  # positions of memory events: torch appends them to its list of events

_Place = tuple[int, int, int, bool]  # start, -end, position in the file, whether it is inside another event


class OperatorRow(msgspec.Struct, eq=False, kw_only=True):
    """One row of the table: all events of one name (and shapes). Times in ns, memory in bytes, both signed sums.

    Attributes:
        is_nested: whether the first event ran inside another one.
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
    left_out = frozenset[str]() if include_python_functions else frozenset({_PYTHON})
    found = OperatorRows(by_shapes=group_by_input_shapes, left_out=left_out)
    for path in traces:
        found.add_window(*read_in_full(path))
    return found


def _device_name(categories: Collection[str]) -> str | None:
    """Return torch's name of the accelerator in the table, None where the trace has none."""
    if "xpu_runtime" in categories:
        return "XPU"
    return "CUDA" if not (DEVICE | _RUNTIME).isdisjoint(categories) else None


class OperatorRows:
    """The rows of all windows, in the order of their first events, and the facts that decide the table's columns."""

    def __init__(self, *, by_shapes: bool, left_out: frozenset[str]) -> None:
        self.rows: list[OperatorRow] = []
        self.windows = 0
        self.profile_memory = False
        self.device_name: str | None = None
        self._by_shapes, self._left_out = by_shapes, left_out
        self._rows: list[OperatorRow] = []
        self._numbers: dict[tuple[str, bool, bool, bool, str], int] = {}
        self._listed: set[int] = set()
        self._firsts: dict[int, _Place] = {}

    def add_window(self, columns: TraceColumns, details: Details) -> None:
        """Add the events of a window."""
        self.windows += 1
        self.profile_memory |= bool(columns.metadata.get("profile_memory") or len(details.allocations.moments))
        self.device_name = self.device_name or _device_name(details.category_of)
        hidden = columns.named(HIDDEN.__contains__)[columns.names]
        on_host, on_device = _is(details, CPU) & ~hidden, np.flatnonzero(_is(details, DEVICE))
        numbers = self._numbers_of(columns, details, on_host)
        free, failed = self._number(MEMORY, ""), self._number(OUT_OF_MEMORY, "")
        durations, memory = columns.ends - columns.starts, _Memory(details.allocations)
        self._firsts = {}
        events = _Events(numbers, columns.starts, columns.ends, np.arange(len(numbers)))
        of_device = durations[on_device]
        self._add(events.select(on_device), {"device_ns": of_device, "self_device_ns": of_device})
        # Steps have one name, also for twins.
        ids: dict[str, int] = {}
        names = np.array([ids.setdefault(row.name, len(ids)) for row in self._rows], np.int32)[numbers]
        kernels, lanes = _launched(details, durations), _lanes(columns, on_host, _is(details, {_OVERHEAD}))
        for lane in np.unique(lanes[on_host]).tolist():
            rows = np.flatnonzero(on_host & (lanes == lane))
            self._add_thread(events.select(rows), names[rows], kernels[rows], memory)
        moments = details.allocations.failed
        self._add(_Events(np.full(len(moments), failed), moments, moments, np.zeros_like(moments)), {})
        at = memory.uncovered
        sizes = {name: np.diff(sums)[at] for name, sums in memory.sums.items()}
        moments = memory.times[at]
        self._add(
            _Events(np.full(len(at), free), moments, moments, _BEHIND_ALL + at),
            sizes | {f"self_{name}": column for name, column in sizes.items()},
        )
        new = sorted((place, number) for number, place in self._firsts.items() if number not in self._listed)
        self._listed |= self._firsts.keys()
        for (*_, is_nested), number in new:
            self._rows[number].is_nested = is_nested
            self.rows.append(self._rows[number])

    def _add(self, events: _Events, values: Mapping[str, Column], parents: Column | None = None) -> None:
        """Add events to their rows, and their values to the sums of these names."""
        numbers, starts, ends, places = events
        order = np.lexsort((places, -ends, starts))
        present, first, counts = np.unique(numbers[order], return_index=True, return_counts=True)
        for number, at, count in zip(present.tolist(), order[first].tolist(), counts.tolist(), strict=True):
            is_nested = parents is not None and bool(parents[at] >= 0)
            place = (int(starts[at]), -int(ends[at]), int(places[at]), is_nested)
            self._firsts[number] = min(place, self._firsts.get(number, place))
            self._rows[number].count += count
        for name, column in values.items():
            totals = np.zeros(len(self._rows), np.int64)
            np.add.at(totals, numbers, column)
            for number in present.tolist():
                setattr(self._rows[number], name, getattr(self._rows[number], name) + int(totals[number]))

    def _add_thread(self, events: _Events, names: NDArray[np.int32], kernels: Column, memory: _Memory) -> None:
        """Add every event of a thread to its row, as torch counts them.

        An event is the child of the innermost one that contains it wholly; one that overlaps its neighbour only in part
        is neither its parent nor its child. An operator whose only child has its own name, its twin, is one operator
        with it: it has the children and the kernels of the twin, and the twin is not counted.
        """
        _, starts, ends, _ = events
        order, parents, _ = nest(starts, ends)
        inner = np.flatnonzero(parents >= 0)
        counted, innermost_twin = _twins(parents, inner, names)

        def without_children(values: Column) -> Column:
            of_children = np.zeros(len(values), np.int64)
            np.add.at(of_children, parents[inner], values[inner])
            return values - of_children[innermost_twin]

        kernels = kernels[innermost_twin]
        sizes = memory.change(starts, ends, parents < 0)
        sums = {
            "cpu_ns": ends - starts,
            "self_cpu_ns": without_children(ends - starts),
            "device_ns": _with_descendants(np.where(counted, kernels, 0), order, parents),
            "self_device_ns": kernels,
            **sizes,
            **{f"self_{name}": without_children(column) for name, column in sizes.items()},
        }
        self._add(events.select(counted), {name: column[counted] for name, column in sums.items()}, parents[counted])

    def _numbers_of(self, columns: TraceColumns, details: Details, on_host: NDArray[np.bool_]) -> Column:
        """Return the number of the row of each event."""
        names, dims = len(columns.name_of) + 1, len(details.dims_of) + 1
        by_shapes = np.where(on_host, details.dims + 1, 0) if self._by_shapes else 0
        keys = (details.categories.astype(np.int64) * names + columns.names) * dims + by_shapes
        found, inverse = np.unique(keys, return_inverse=True)
        numbers = [
            self._number(
                columns.name_of[key // dims % names],
                details.category_of[key // dims // names],
                details.dims_of[key % dims - 1] if key % dims else b"",
            )
            for key in found.tolist()
        ]
        of_events: Column = np.array(numbers, np.int64)[inverse.reshape(-1)]
        return of_events

    def _number(self, name: str, category: str, dims: bytes = b"") -> int:
        """Return the number of the row that counts events of this kind."""
        shown = "ProfilerStep*" if name.startswith("ProfilerStep#") else name
        on_device, is_annotation, is_left_out = category in DEVICE, category in _ANNOTATIONS, category in self._left_out
        shapes = _shapes_text(dims) if self._by_shapes else ""
        number = self._numbers.setdefault((shown, on_device, is_annotation, is_left_out, shapes), len(self._rows))
        if number == len(self._rows):
            row = OperatorRow(name=shown, on_device=on_device, is_annotation=is_annotation, input_shapes=shapes)
            self._rows.append(row)
            if is_left_out:
                self._listed.add(number)
        return number


def _is(details: Details, categories: Collection[str]) -> NDArray[np.bool_]:
    """Return whether the category of each event is one of these."""
    return np.array([category in categories for category in details.category_of] or [False])[details.categories]


def _launched(details: Details, durations: Column) -> Column:
    """Return the device time that each operator launched, 0 for other events.

    A runtime call carries the number of its operator, but only the operator owns the kernels. A device-side annotation
    spans kernels that are counted themselves.
    """
    works = np.flatnonzero(_is(details, DEVICE - {_SPAN}) & (details.links != 0))
    links, place = np.unique(details.links[works], return_inverse=True)
    sums = np.zeros(len(links), np.int64)
    np.add.at(sums, place.reshape(-1), durations[works])
    return np.maximum(lookup(links, sums, np.where(_is(details, _OPERATORS), details.links, 0)), 0)


def _lanes(columns: TraceColumns, on_host: NDArray[np.bool_], overhead: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the lane of each event; the profiler's own work counts on the main thread, as torch does."""
    threads = np.unique(columns.lanes[on_host & ~overhead]).tolist()
    main = next((lane for lane in threads if len(set(columns.lane_of[lane])) == 1), len(columns.lane_of))
    return np.where(overhead, np.int32(main), columns.lanes)


class _Memory:
    """Allocations and frees of all threads by time: torch counts those that happen while an operator runs, on any.

    Attributes:
        times: ``(m,)`` ns.
        sums: ``(m + 1,)`` bytes allocated until each, by the name of the row's sum.
    """

    def __init__(self, found: Allocations) -> None:
        order = np.argsort(found.moments, kind="stable")
        kinds, sizes = found.devices[order, 0], found.sizes[order]
        self.times = found.moments[order]
        self.sums = {
            name: np.append(0, np.cumsum(np.where(np.isin(kinds, [*of]), sizes, 0)))
            for name, of in (("cpu_bytes", CPU_MEMORY), ("device_bytes", DEVICE_MEMORY))
        }
        self._covered = np.zeros(len(order) + 1, np.int64)

    def change(self, starts: Column, ends: Column, is_outermost: NDArray[np.bool_]) -> dict[str, Column]:
        """Return bytes allocated from each start to each end, both inclusive; ``uncovered`` is then without them."""
        first, last = np.searchsorted(self.times, starts), np.searchsorted(self.times, ends, side="right")
        np.add.at(self._covered, first[is_outermost], 1)
        np.add.at(self._covered, last[is_outermost], -1)
        return {name: sums[last] - sums[first] for name, sums in self.sums.items()}

    @property
    def uncovered(self) -> Column:
        """Positions of the events that happened while no operator ran."""
        return np.flatnonzero(np.cumsum(self._covered[:-1]) == 0)


class _Events(NamedTuple):
    """Events: ``(m,)`` numbers of their rows, starts and ends in ns, and positions in the file."""

    numbers: Column
    starts: Column
    ends: Column
    places: Column

    def select(self, chosen: Column | NDArray[np.bool_]) -> _Events:
        """Return some of the events."""
        return _Events(*(column[chosen] for column in self))


def _twins(parents: Column, inner: Column, names: NDArray[np.int32]) -> tuple[NDArray[np.bool_], Column]:
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
