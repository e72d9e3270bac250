"""A trace as columns: its complete events, 33 bytes each, read in one streaming pass; each name is held once."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_memprof.analysis.communication import Span
from lightning_memprof.analysis.intervals import Column
from lightning_memprof.analysis.lenient_event import LONGEST_US, event_fields, number
from lightning_memprof.analysis.trace_text import TraceText

__all__ = ["Kind", "NamedEvent", "Progress", "TraceColumns", "read_columns"]

Progress: TypeAlias = Callable[[int, int], None]

_CHUNK: Final = 1 << 20
# Sums of two are still 64 bits in ns; what is beyond (127 years) is damage.
_LARGEST: Final = 1 << 62
_Microseconds = Annotated[float, msgspec.Meta(ge=-LONGEST_US, le=LONGEST_US)]
_Whole = Annotated[int, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]


class Kind:
    """What an event is, whatever the year of the file."""

    KERNEL: Final = 0
    MEMORY_COPY: Final = 1
    MEMORY_SET: Final = 2
    RUNTIME: Final = 3
    OPERATOR: Final = 4
    ANNOTATION: Final = 5
    PYTHON: Final = 6
    OVERHEAD: Final = 7
    OTHER: Final = 8


_KINDS: Final = {
    "kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.MEMORY_COPY,
    "memcpy": Kind.MEMORY_COPY,
    "gpu_memset": Kind.MEMORY_SET,
    "memset": Kind.MEMORY_SET,
    "runtime": Kind.RUNTIME,
    "cpu_op": Kind.OPERATOR,
    "operator": Kind.OPERATOR,
    "user_annotation": Kind.ANNOTATION,
    "python_function": Kind.PYTHON,
    "overhead": Kind.OVERHEAD,
}
# Until torch 1.9 what a program had annotated was an operator among others.
_ANNOTATIONS: Final = (
    "ProfilerStep#", "enumerate(DataLoader", "Optimizer.", "[pl]", "[Strategy]", "[LightningModule]",
    "[LightningDataModule]", "[Callback]", "nccl:", "gloo:", "mpi:", "ucc:",
)  # fmt: skip
_OF_COLLECTIVES: Final = ("nccl", "rccl", "gloo:", "mpi:", "ucc:", "record_param_comms")


class _Args(msgspec.Struct, gc=False, frozen=True):
    correlation: _Whole = 0
    external_id: _Whole = msgspec.field(default=0, name="External id")
    bytes: _Whole = 0
    collective: str = msgspec.field(default="", name="Collective name")
    group: str = msgspec.field(default="", name="Process Group Name")
    elements: _Whole = msgspec.field(default=-1, name="In msg nelems")
    dtype: str = ""
    input_dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    input_types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")


_NO_ARGS: Final = _Args()


class _Event(msgspec.Struct, gc=False, frozen=True):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: _Microseconds = 0.0
    dur: _Microseconds = 0.0
    args: _Args = _NO_ARGS


# Not strict: some profilers write numbers as strings.
_DECODE: Final = msgspec.json.Decoder(list[_Event], strict=False).decode


@dataclass(frozen=True)
class NamedEvent:
    """An event of a collective, with its arguments; the times are ns after the trace's origin."""

    row: int
    category: str
    lane: tuple[int | str, int | str]
    span: Span


@dataclass(frozen=True, kw_only=True)
class TraceColumns:
    """The complete events (``ph`` is ``X``) of a trace, in the file's order.

    Attributes:
        starts: ``(n,)`` int64, ns after ``origin_ns``; ``ends`` likewise.
        names: ``(n,)`` int32, positions in ``name_of``; ``lanes`` likewise in ``lane_of`` (pid and tid).
        kinds: ``(n,)`` int8, values of ``Kind``.
        correlations: ``(n,)`` int64, what a launch and its device event have in common; 0 for none.
        copied: bytes by row of a copy that says them.
        collectives: events of collectives with their arguments.
        events: how many events of any kind the file has.
        metadata: what stands beside the events.
        origin_ns: Unix epoch time from which times count.
    """

    starts: Column
    ends: Column
    names: NDArray[np.int32]
    lanes: NDArray[np.int32]
    kinds: NDArray[np.int8]
    correlations: Column
    name_of: tuple[str, ...]
    lane_of: tuple[tuple[int | str, int | str], ...]
    copied: dict[int, int]
    collectives: tuple[NamedEvent, ...]
    events: int
    metadata: dict[str, Any]
    origin_ns: int

    def rows(self, *kinds: int) -> NDArray[np.int64]:
        """Return the positions of the events of some kinds."""
        return np.flatnonzero(np.isin(self.kinds, kinds))


def read_columns(path: Path, progress: Progress | None = None) -> TraceColumns:
    """Read a trace once.

    Args:
        path: a Kineto JSON file of any year, plain or gzip-compressed.
        progress: called now and then with how many bytes of the file were read, and how many it has.

    Raises:
        ArtifactError: the file is missing, damaged or cut off, or no trace.
    """
    text, table = TraceText(path), _Table()
    # Either category of an event is of the same kind.
    for batch in text.pieces(_decode, _CHUNK, as_written=True):
        table.add(batch)
        if progress:
            progress(text.bytes_read, path.stat().st_size)
    base = text.metadata.get("baseTimeNanoseconds")
    origin = base if isinstance(base, int) and 0 <= base < _LARGEST else 0
    return table.columns(text.metadata, origin + text.ts_offset_us * 1000)


class _Table:
    """Columns while they grow."""

    def __init__(self) -> None:
        self._starts, self._durations, self._correlations = array("q"), array("q"), array("q")
        self._name_numbers, self._lane_numbers = array("i"), array("i")
        self._kinds = array("b")
        self._names, self._lanes, self._kind_of = _Names(), _Numbers(), _Kinds()
        self._copied: dict[int, int] = {}
        self._collectives: list[NamedEvent] = []
        self._events = 0

    def add(self, batch: list[_Event]) -> None:
        """Take the events of a piece."""
        self._events += len(batch)
        found = [event for event in batch if event.ph == "X"]
        if not found:
            return
        names, lanes, kind_of = self._names, self._lanes, self._kind_of
        starts = _nanoseconds([event.ts for event in found])
        durations = np.maximum(_nanoseconds([event.dur for event in found]), 0)
        numbers = [names[event.name] for event in found]
        kinds = [kind_of[event.cat] for event in found]
        self._keep_arguments(found, numbers, kinds, starts, durations)
        self._starts.frombytes(starts.tobytes())
        self._durations.frombytes(durations.tobytes())
        self._name_numbers.extend(numbers)
        self._kinds.extend(kinds)
        self._lane_numbers.extend([lanes[event.pid, event.tid] for event in found])
        self._correlations.extend([event.args.correlation for event in found])

    def _keep_arguments(
        self, found: list[_Event], numbers: list[int], kinds: list[int], starts: Column, durations: Column
    ) -> None:
        first, of_collectives = len(self._starts), self._names.of_collectives
        for i, kind in enumerate(kinds):
            if kind > Kind.MEMORY_COPY and numbers[i] not in of_collectives:
                continue
            event = found[i]
            if numbers[i] in of_collectives or event.args.collective:
                end = int(starts[i] + durations[i])
                self._collectives.append(_named_event(event, first + i, int(starts[i]), end))
            elif kind == Kind.MEMORY_COPY and event.args.bytes:
                self._copied[first + i] = event.args.bytes

    def columns(self, metadata: dict[str, Any], origin_ns: int) -> TraceColumns:
        """Return what was taken."""
        starts = np.frombuffer(self._starts, np.int64)
        ends = np.frombuffer(self._durations, np.int64)
        ends += starts  # in place: another column is eight bytes an event
        names = np.frombuffer(self._name_numbers, np.int32)
        kinds = np.frombuffer(self._kinds, np.int8)
        annotates = np.array([name.startswith(_ANNOTATIONS) for name in self._names] or [False])
        if len(names):
            kinds[(kinds == Kind.OPERATOR) & annotates[names]] = Kind.ANNOTATION
        return TraceColumns(
            starts=starts,
            ends=ends,
            names=names,
            lanes=np.frombuffer(self._lane_numbers, np.int32),
            kinds=kinds,
            correlations=np.frombuffer(self._correlations, np.int64),
            name_of=tuple(self._names),
            lane_of=tuple(self._lanes),
            copied=self._copied,
            collectives=tuple(self._collectives),
            events=self._events,
            metadata=metadata,
            origin_ns=origin_ns,
        )


class _Numbers(dict[Any, int]):
    """Numbers what it is asked for, from 0, in the order of its first appearance."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


class _Names(_Numbers):
    """Names by number, and the numbers of those that collectives have."""

    def __init__(self) -> None:
        super().__init__()
        self.of_collectives: set[int] = set()

    def __missing__(self, key: str) -> int:
        number = super().__missing__(key)
        if key.startswith(_OF_COLLECTIVES):
            self.of_collectives.add(number)
        return number


class _Kinds(dict[str, int]):
    """The kind of event that a category names."""

    def __missing__(self, key: str) -> int:
        category = key.lower()
        fallback = Kind.RUNTIME if category.endswith(("_runtime", "_driver")) else Kind.OTHER
        kind = self[key] = _KINDS.get(category, fallback)
        return kind


def _nanoseconds(microseconds: list[float]) -> Column:
    """Exact nanoseconds: a double holds those of a moment since 1970 only where whole and fraction stay apart."""
    times = np.array(microseconds, np.float64)
    whole = np.floor(times)
    exact: Column = whole.astype(np.int64) * 1000 + np.rint((times - whole) * 1000).astype(np.int64)
    return exact


def _named_event(event: _Event, row: int, start: int, end: int) -> NamedEvent:
    given = event.args
    args: dict[str, Any] = {"External id": given.external_id}
    if given.collective:
        args |= {"Collective name": given.collective, "Process Group Name": given.group, "dtype": given.dtype}
        args["In msg nelems"] = given.elements if given.elements >= 0 else None
    for key, raw in (("Input Dims", given.input_dims), ("Input type", given.input_types)):
        if bytes(raw):
            args[key] = msgspec.json.decode(raw)
    return NamedEvent(row, event.cat, (event.pid, event.tid), Span(start, end, event.name, args))


def _decode(text: bytes) -> list[_Event]:
    try:
        return _DECODE(text)
    except msgspec.ValidationError:  # valid JSON, but something of another type than Kineto's: read one by one
        return [_lenient(event) for event in msgspec.json.decode(text)]


def _lenient(event: Any) -> _Event:
    fields, args = event_fields(event)
    return _Event(
        **fields,
        args=_Args(
            correlation=int(number(args.get("correlation"), _LARGEST)),
            external_id=int(number(args.get("External id"), _LARGEST)),
            bytes=int(number(args.get("bytes"), _LARGEST)),
            collective=str(args.get("Collective name") or ""),
            group=str(args.get("Process Group Name") or ""),
            elements=int(number(args.get("In msg nelems", -1), _LARGEST)),
            dtype=str(args.get("dtype") or ""),
            input_dims=_raw(args, "Input Dims"),
            input_types=_raw(args, "Input type"),
        ),
    )


def _raw(args: dict[str, Any], key: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(args[key]) if key in args else b"")
