"""A trace as columns: its complete events, 42 bytes each, read in one streaming pass; each name is held once."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from struct import pack
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.trace.events import Event, FullEvent, decoder, full_events
from lightning_memprof.read.trace.intervals import Column, Intervals, lookup, union
from lightning_memprof.read.trace.text import LARGEST, TraceText

Progress: TypeAlias = Callable[[int, int], None]
Lane: TypeAlias = tuple[int | str, int | str]

STEP_NAME: Final = re.compile(r"ProfilerStep#(\d{1,18})\Z")

# A piece and its events stay in the processor's cache: a MiB at a time takes up to twice as long.
_CHUNK: Final = 1 << 18
# `AccumulateGrad` has the largest number of 64 bits, and no forward.
_UNSIGNED: Final = (1 << 64) - 1
# Until torch 1.9 the program's annotations were operators among others.
_ANNOTATIONS: Final = (
    "ProfilerStep#", "enumerate(DataLoader", "Optimizer.", "[pl]", "[Strategy]", "[LightningModule]",
    "[LightningDataModule]", "[Callback]", "nccl:", "xccl:", "hccl:", "gloo:", "mpi:", "ucc:",
)  # fmt: skip
# Events of a device's streams in which it does no work.
_MARKERS: Final = frozenset({"event_wait", "event_record"})
COLLECTIVE_NAMES: Final = ("nccl", "rccl", "xccl:", "hccl:", "gloo:", "mpi:", "ucc:", "record_param_comms")
"""The beginnings of the names of events of collectives."""

# torch's numbers of device types.
_ACCELERATORS: Final[dict[int | str, str]] = {
    1: "cuda", 6: "cuda", 9: "xla", 12: "xpu", 13: "mps", 15: "hpu", 18: "ipu", 19: "mtia", 20: "privateuseone",
}  # fmt: skip

COMPUTES: Final = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "cudnn_convolution", "miopen_convolution", "mkldnn_convolution",
        "convolution_backward", "_flash_attention_forward", "_flash_attention_backward",
        "_efficient_attention_forward", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward", "add", "add_", "sub", "sub_", "mul", "mul_", "div",
        "div_", "pow", "neg", "exp", "sqrt", "rsqrt", "relu", "relu_", "gelu", "silu", "sigmoid", "tanh", "clamp_min",
        "copy_", "where", "masked_fill", "threshold_backward", "gelu_backward", "silu_backward", "sigmoid_backward",
        "tanh_backward", "_softmax", "_softmax_backward_data", "native_layer_norm", "cudnn_batch_norm",
        "native_batch_norm", "native_dropout", "sum", "mean",
    )
)  # fmt: skip
"""Operators whose inputs tell the arithmetic or the memory traffic; those that call others which do are not here."""

# The arrows of torch's EventList, the only sign of the device in its lists.
_TO_DEVICE: Final = "cpu_to_"
_events: Final = decoder(Event)
MEMORY: Final = "[memory]"
OUT_OF_MEMORY: Final = "[OutOfMemory]"


class Kind:
    """The kind of an event, in the categories of all versions of torch."""

    KERNEL: Final = 0
    MEMORY_COPY: Final = 1
    MEMORY_SET: Final = 2
    RUNTIME: Final = 3
    OPERATOR: Final = 4
    ANNOTATION: Final = 5
    PYTHON: Final = 6
    OVERHEAD: Final = 7
    OTHER: Final = 8
    SPAN: Final = 9  # covers a lane, and nothing runs in it


DEVICE_KINDS: Final = (Kind.KERNEL, Kind.MEMORY_COPY, Kind.MEMORY_SET)
HOST_KINDS: Final = (Kind.RUNTIME, Kind.OPERATOR, Kind.ANNOTATION, Kind.PYTHON)
"""Events of the program's threads."""
_KINDS: Final = {
    "kernel": Kind.KERNEL,
    "mtia_ccp_events": Kind.KERNEL,
    "gpu_memcpy": Kind.MEMORY_COPY,
    "memcpy": Kind.MEMORY_COPY,
    "gpu_memset": Kind.MEMORY_SET,
    "memset": Kind.MEMORY_SET,
    "runtime": Kind.RUNTIME,
    "hpu_op": Kind.RUNTIME,
    "cpu_op": Kind.OPERATOR,
    "operator": Kind.OPERATOR,
    "user_annotation": Kind.ANNOTATION,
    "python_function": Kind.PYTHON,
    "overhead": Kind.OVERHEAD,
    "trace": Kind.SPAN,
    "gpu_user_annotation": Kind.SPAN,
    "gpu_step": Kind.SPAN,
}


# Metadata of Kineto, also of a trace without events.
_OF_TORCH: Final = frozenset({"schemaVersion", "deviceProperties", "distributedInfo", "baseTimeNanoseconds"})
_NAMED_CATEGORIES: Final = 3


_ITEM_BYTES: Final = {
    "double": 8, "long": 8, "longint": 8, "complexfloat": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2,
    "short": 2, "shortint": 2, "char": 1, "signedchar": 1, "unsignedchar": 1, "byte": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "complexdouble": 16, "unsignedint": 4, "unsignedlong": 8,
}  # fmt: skip


def item_bytes(dtype: Any) -> int | None:
    """Return the size of a number of a type as torch writes it (``c10::Half``, ``long int``), None where unknown."""
    return _ITEM_BYTES.get(str(dtype).lower().removeprefix("c10::").replace(" ", ""))


class Inputs(NamedTuple):
    """An operator, and the dimensions, types and values of its inputs as JSON arrays; empty where not recorded."""

    operator: str
    dims: bytes
    types: bytes
    values: bytes


class Shapes(NamedTuple):
    """``(m,)`` rows of operators in the file's order, for each the position of its inputs in ``inputs``."""

    rows: Column
    numbers: NDArray[np.int32]
    inputs: tuple[Inputs, ...]

    def of(self, rows: Column) -> Column:
        """Return the position of each row's inputs, -1 for none."""
        return lookup(self.rows, self.numbers, rows)


class Allocations(msgspec.Struct, frozen=True, kw_only=True):
    """The ``[memory]`` events of a trace, in the file's order.

    Attributes:
        moments: ``(m,)`` ns after the trace's origin.
        lanes: ``(m,)`` as of other events.
        devices: ``(m, 2)`` torch's number of the device's type, and of the device, -1 for none.
        sizes: ``(m,)`` bytes, negative for a free.
        addresses: ``(m,)`` of the block, 0 where unknown.
        totals: ``(m,)`` bytes that torch counted as allocated after the event.
        failed: ``(k,)`` moments of the events ``[OutOfMemory]``.
    """

    moments: Column
    lanes: Column
    devices: Column
    sizes: Column
    addresses: Column
    totals: Column
    failed: Column


class Details(NamedTuple):
    """Further fields of the complete events of a trace, and its allocations.

    Attributes:
        allocations: allocations and frees.
        categories: ``(n,)`` positions in ``category_of``.
        links: ``(n,)`` the number that device work shares with its operator, 0 for none.
        dims: ``(n,)`` positions in ``dims_of``, the dimensions of the inputs as a JSON array; empty where not recorded.
    """

    allocations: Allocations
    categories: NDArray[np.int32]
    links: Column
    dims: NDArray[np.int32]
    category_of: tuple[str, ...]
    dims_of: tuple[bytes, ...]


class TraceColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The complete events (``ph`` is ``X``) of a trace, in the file's order.

    Attributes:
        starts: ``(n,)`` int64, ns after ``origin_ns``; ``ends`` likewise.
        names: ``(n,)`` int32, positions in ``name_of``; ``lanes`` likewise in ``lane_of`` (pid and tid).
        kinds: ``(n,)`` int8, values of ``Kind``.
        correlations: ``(n,)`` int64, the number that a launch shares with its device event; 0 for none.
        sequences: ``(n,)`` int64, number of the autograd node that the operator makes or runs, -1 for none.
        runs_node: ``(n,)`` bool, whether the operator runs the node, in backward, and does not make it.
        copied: bytes by row of each copy whose size is known.
        shapes: inputs of the operators that compute, where they were recorded.
        collectives: events of collectives with their arguments, by row.
        allocates_on: accelerators whose memory is allocated or freed (``cuda:0``), where memory was recorded.
        launches_on: the kind of device (``cuda``) to which a list of torch's ``EventList`` has arrows, else empty.
        events: number of events of any kind in the file.
        metadata: everything in the file beside the events.
        origin_ns: Unix epoch time in ns from which times count.
    """

    starts: Column
    ends: Column
    names: NDArray[np.int32]
    lanes: NDArray[np.int32]
    kinds: NDArray[np.int8]
    correlations: Column
    sequences: Column
    runs_node: NDArray[np.bool_]
    name_of: tuple[str, ...]
    lane_of: tuple[Lane, ...]
    copied: dict[int, int]
    shapes: Shapes = msgspec.field(default_factory=lambda: Shapes(np.empty(0, np.int64), np.empty(0, np.int32), ()))
    collectives: Mapping[int, FullEvent]
    allocates_on: tuple[str, ...] = ()
    launches_on: str = ""
    events: int
    metadata: dict[str, Any]
    origin_ns: int

    def rows(self, *kinds: int) -> NDArray[np.int64]:
        """Return the positions of the events of some kinds."""
        return np.flatnonzero(np.isin(self.kinds, kinds))

    def name(self, row: int) -> str:
        """Return the name of an event."""
        return self.name_of[int(self.names[row])]

    def named(self, matches: Callable[[str], object]) -> NDArray[np.bool_]:
        """Return for each number of a name whether the name matches; one False more where there is no name."""
        return np.array([bool(matches(name)) for name in self.name_of] or [False])

    def rows_named(self, matches: Callable[[str], object], *kinds: int) -> NDArray[np.int64]:
        """Return the positions of the events of some kinds whose name matches."""
        rows = self.rows(*kinds)
        return rows[self.named(matches)[self.names[rows]]]

    def when(self, rows: Column) -> Intervals:
        """Return the time in which at least one of some events ran."""
        return union(self.starts[rows], self.ends[rows])


def read_columns(path: Path, progress: Progress | None = None) -> TraceColumns:
    """Read a trace once.

    Args:
        path: a Kineto JSON file of any year, plain or gzip-compressed.
        progress: called now and then with the number of bytes read, and the size of the file.

    Raises:
        ArtifactError: the file is missing, damaged or truncated, or no trace.
    """
    return _read(path, progress, None)


def read_in_full(path: Path) -> tuple[TraceColumns, Details]:
    """Read a trace once, with its allocations and the details of its events: 16 more bytes each.

    Raises:
        ArtifactError: as `read_columns` does, but for a trace of another program.
    """
    details = _Details()
    return _read(path, None, details), details.columns()


def _read(path: Path, progress: Progress | None, details: _Details | None) -> TraceColumns:
    text, table = TraceText(path), _Table(details)
    size = path.stat().st_size if path.is_file() else 0
    # A report is the same with either category of an event; restoring the original costs a tenth.
    for _ in text.pieces(table.take, _CHUNK, as_written=details is None):
        if progress:
            progress(text.bytes_read, size)
    if text.merged_traces:
        # The devices of several ranks have no common idle time, and the time between windows is none.
        raise ArtifactError(
            f"{path}: is a timeline of {text.merged_traces} merged traces, for lightning-memprof view; name the run or "
            "the traces themselves"
        )
    if details is None and not table.is_of_torch and not _OF_TORCH & text.metadata.keys():
        raise ArtifactError(
            f"{path}: is a trace of another program: none of its events has a category of torch.profiler"
            f"{table.categories}; name a trace of torch.profiler"
        )
    return table.columns(text.metadata, text.time_origin_ns)


class _Table:
    """Columns while they grow."""

    def __init__(self, details: _Details | None) -> None:
        self._details = details
        self._starts, self._durations, self._correlations = array("q"), array("q"), array("q")
        self._sequences, self._runs_node = array("q"), array("b")
        self._name_numbers, self._lane_numbers = array("i"), array("i")
        self._kinds = array("b")
        self._names, self._lanes, self._kind_of = _Names(), _Numbers(), _Kinds()
        self._copied: dict[int, int] = {}
        self._shaped, self._shape_numbers, self._inputs = array("q"), array("i"), _Numbers()
        self._collectives: dict[int, FullEvent] = {}
        self._allocates_on: set[str] = set()
        self._launches_on = ""
        self._events = 0

    @property
    def is_of_torch(self) -> bool:
        """Whether a category is one of torch's, or there is no event."""
        return not self._events or any(kind < Kind.OTHER for kind in self._kind_of.values())

    @property
    def categories(self) -> str:
        """The first categories of the events, in brackets."""
        named = [category for category in self._kind_of if category]
        return f" (they are {', '.join(named[:_NAMED_CATEGORIES])})" if named else ""

    def take(self, text: bytes) -> list[int]:
        """Take the events of a piece, a JSON array; return their number.

        Raises:
            msgspec.DecodeError: the text is not valid JSON; nothing was taken.
        """
        full = full_events(text) if self._details is not None or True in self._names.of_collectives else None
        batch: Sequence[Event] = _events(text) if full is None else full
        if self._details is not None and full is not None:
            self._details.take(full, self._lanes)
        self._events += len(batch)
        found = [event for event in batch if event.ph == "X"]
        if len(found) < len(batch):
            used = {(event.args.device_type, event.args.device_id) for event in batch if event.name == MEMORY}
            self._allocates_on |= {f"{_ACCELERATORS[kind]}:{number}" for kind, number in used if kind in _ACCELERATORS}
            arrow = next((each.cat for each in batch if each.ph == "s"), "")
            self._launches_on = arrow.removeprefix(_TO_DEVICE) if arrow.startswith(_TO_DEVICE) else self._launches_on
        count, first, names, lanes = len(found), len(self._starts), self._names, self._lanes
        # One loop for each field and one `pack` cost half of a loop for all, and of numpy's conversion of a list.
        places = zip([event.pid for event in found], [event.tid for event in found], strict=True)
        numbers = pack(f"{count}i", *map(names.__getitem__, [event.name for event in found]))
        kinds = bytes(map(self._kind_of.__getitem__, [event.cat for event in found]))
        self._starts.frombytes(_nanoseconds(pack(f"{count}d", *[event.ts for event in found])))
        self._durations.frombytes(_nanoseconds(pack(f"{count}d", *[event.dur for event in found])))
        self._correlations.frombytes(pack(f"{count}q", *[event.args.correlation for event in found]))
        self._sequences.frombytes(pack(f"{count}Q", *[event.args.sequence & _UNSIGNED for event in found]))
        self._runs_node.frombytes(bytes([event.args.forward_thread != 0 for event in found]))
        self._lane_numbers.frombytes(pack(f"{count}i", *map(lanes.__getitem__, places)))
        self._name_numbers.frombytes(numbers)
        self._kinds.frombytes(kinds)
        on_device = np.flatnonzero(np.frombuffer(kinds, np.int8) <= Kind.MEMORY_COPY).tolist()
        rows = {row for row in on_device if found[row].args.collective}
        rows.update(_marked(names.of_collectives, numbers))
        self._keep_shapes(found, _marked(names.of_work, numbers), first)
        if rows:
            complete = [event for event in full or full_events(text) if event.ph == "X"]
            self._collectives |= {first + row: complete[row].detached() for row in sorted(rows)}
        for row in on_device:
            if kinds[row] == Kind.MEMORY_COPY and (size := found[row].args.bytes) and row not in rows:
                self._copied[first + row] = size
        return [len(batch)] if batch else []

    def _keep_shapes(self, found: list[Event], rows: list[int], first: int) -> None:
        for row in rows:
            event = found[row]
            if dims := bytes(event.args.input_dims):
                given = Inputs(event.name, dims, bytes(event.args.input_types), bytes(event.args.concrete))
                self._shaped.append(first + row)
                self._shape_numbers.append(self._inputs[given])

    def columns(self, metadata: dict[str, Any], origin_ns: int) -> TraceColumns:
        """Return the columns of all events taken."""
        starts, ends = (np.frombuffer(times, np.int64) for times in (self._starts, self._durations))
        np.maximum(ends, 0, out=ends)
        ends += starts  # in place: another column is eight bytes an event
        sequences = np.frombuffer(self._sequences, np.int64)
        sequences[(sequences < 0) | (sequences >= LARGEST)] = -1
        names = np.frombuffer(self._name_numbers, np.int32)
        kinds = np.frombuffer(self._kinds, np.int8)
        annotates = np.array([name.startswith(_ANNOTATIONS) for name in self._names] or [False])
        if len(names):
            kinds[(kinds == Kind.OPERATOR) & annotates[names]] = Kind.ANNOTATION
            kinds[(kinds == Kind.KERNEL) & np.array([name in _MARKERS for name in self._names])[names]] = Kind.SPAN
        return TraceColumns(
            starts=starts,
            ends=ends,
            names=names,
            lanes=np.frombuffer(self._lane_numbers, np.int32),
            kinds=kinds,
            correlations=np.frombuffer(self._correlations, np.int64),
            sequences=sequences,
            runs_node=np.frombuffer(self._runs_node, np.int8).view(np.bool_),
            name_of=tuple(self._names),
            lane_of=tuple(self._lanes),
            copied=self._copied,
            shapes=Shapes(
                np.frombuffer(self._shaped, np.int64),
                np.frombuffer(self._shape_numbers, np.int32),
                tuple(self._inputs),
            ),
            collectives=self._collectives,
            allocates_on=tuple(sorted(self._allocates_on)),
            launches_on=self._launches_on,
            events=self._events,
            metadata=metadata,
            origin_ns=origin_ns,
        )


class _Details:
    """Details while they grow."""

    def __init__(self) -> None:
        self._memory: list[tuple[int, ...]] = []
        self._failed: list[int] = []
        self._links, self._categories, self._dims = array("q"), array("i"), array("i")
        self._category_numbers, self._dims_numbers = _Numbers(), _Numbers()

    def take(self, batch: Sequence[FullEvent], lanes: _Numbers) -> None:
        """Take the events of a piece."""
        found = [event for event in batch if event.ph == "X"]
        self._memory += [_allocation(event, lanes) for event in batch if event.name == MEMORY]
        self._failed += [event.start_ns for event in batch if event.name == OUT_OF_MEMORY]
        self._links.extend([event.args.link for event in found])
        self._categories.extend(map(self._category_numbers.__getitem__, [event.cat for event in found]))
        self._dims.extend(map(self._dims_numbers.__getitem__, [bytes(event.args.input_dims) for event in found]))

    def columns(self) -> Details:
        """Return the details of all events taken."""
        table = np.array(self._memory, np.int64).reshape(-1, 7)
        return Details(
            allocations=Allocations(
                moments=table[:, 0],
                lanes=table[:, 1],
                devices=table[:, 2:4],
                sizes=table[:, 4],
                addresses=table[:, 5],
                totals=table[:, 6],
                failed=np.array(self._failed, np.int64),
            ),
            categories=np.frombuffer(self._categories, np.int32),
            links=np.frombuffer(self._links, np.int64),
            dims=np.frombuffer(self._dims, np.int32),
            category_of=tuple(self._category_numbers),
            dims_of=tuple(self._dims_numbers),
        )


def _allocation(event: FullEvent, lanes: _Numbers) -> tuple[int, ...]:
    args = event.args
    numbers = (args.device_type, args.device_id, args.size, args.address, args.total)
    # Larger ones are damage.
    kept = (number if isinstance(number, int) and -LARGEST < number < LARGEST else 0 for number in numbers)
    return (event.start_ns, lanes[event.pid, event.tid], *kept)


class _Numbers(dict[Any, int]):
    """A number for each key, from 0, in the order of first lookup."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


class _Names(_Numbers):
    """Names by number; by number, whether it is a collective's, and an operator's whose inputs tell its work."""

    def __init__(self) -> None:
        super().__init__()
        self.of_collectives, self.of_work = bytearray(), bytearray()

    def __missing__(self, key: str) -> int:
        self.of_collectives.append(key.startswith(COLLECTIVE_NAMES))
        self.of_work.append(key in COMPUTES)
        return super().__missing__(key)


def _marked(marks: bytearray, numbers: bytes) -> list[int]:
    """Return the places of the marked numbers; ``np.isin`` takes ten times as long."""
    found: list[int] = np.flatnonzero(np.frombuffer(bytes(marks), np.bool_)[np.frombuffer(numbers, np.int32)]).tolist()
    return found


class _Kinds(dict[str, int]):
    """The kind of each category."""

    def __missing__(self, category: str) -> int:
        plain = category.lower()
        fallback = Kind.RUNTIME if plain.endswith(("_runtime", "_driver")) else Kind.OTHER
        kind = self[category] = _KINDS.get(plain, fallback)
        return kind


def _nanoseconds(microseconds: bytes) -> bytes:
    """Exact nanoseconds: a double holds those of a time since 1970 only where whole and fraction stay apart."""
    times = np.frombuffer(microseconds, np.float64)
    whole = np.floor(times)
    return (whole.astype(np.int64) * 1000 + np.rint((times - whole) * 1000).astype(np.int64)).tobytes()
