"""A trace as columns: its complete events, 33 bytes each, read in one streaming pass; each name is held once."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import pack
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_memprof.analysis.trace.communication import Span
from lightning_memprof.analysis.trace.event import (
    LARGEST,
    Event,
    FullEvent,
    Kind,
    Phase,
    decode_events,
    decode_full_events,
)
from lightning_memprof.analysis.trace.intervals import Column
from lightning_memprof.analysis.trace.text import TraceText

__all__ = ["Kind", "NamedEvent", "Progress", "TraceColumns", "read_columns"]

Progress: TypeAlias = Callable[[int, int], None]

# A piece and its events stay in the processor's cache: a MiB at a time takes up to twice as long.
_CHUNK: Final = 1 << 18
_BLOCK: Final = 1 << 15
# A name of its own: to look a member up takes as long as to compare it.
_COMPLETE: Final = Phase.COMPLETE
# Until torch 1.9 what a program had annotated was an operator among others.
_ANNOTATIONS: Final = (
    "ProfilerStep#", "enumerate(DataLoader", "Optimizer.", "[pl]", "[Strategy]", "[LightningModule]",
    "[LightningDataModule]", "[Callback]", "nccl:", "gloo:", "mpi:", "ucc:",
)  # fmt: skip
_OF_COLLECTIVES: Final = ("nccl", "rccl", "gloo:", "mpi:", "ucc:", "record_param_comms")


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
    size = path.stat().st_size if path.is_file() else 0
    # A report is the same with either category of an event; to put the original back costs a tenth.
    for _ in text.pieces(table.take, _CHUNK, as_written=True):
        if progress:
            progress(text.bytes_read, size)
    base = text.metadata.get("baseTimeNanoseconds")
    origin = base if isinstance(base, int) and 0 <= base < LARGEST else 0
    return table.columns(text.metadata, origin + text.ts_offset_us * 1000)


class _Table:
    """Columns while they grow."""

    def __init__(self) -> None:
        self._starts, self._durations, self._correlations = array("d"), array("d"), array("q")  # times in us
        self._name_numbers, self._lane_numbers = array("i"), array("i")
        self._kinds = array("b")
        self._names, self._lanes = _Names(), _Numbers()
        self._copied: dict[int, int] = {}
        self._collectives: list[NamedEvent] = []
        self._events = 0

    def take(self, text: bytes) -> list[int]:
        """Take the events of a piece, a JSON array; return how many there are.

        Raises:
            msgspec.DecodeError: the text is not valid JSON; nothing was taken.
        """
        full = decode_full_events(text) if self._names.of_collectives else None
        batch: Sequence[Event] = decode_events(text) if full is None else full
        self._events += len(batch)
        found = [event for event in batch if event.ph is _COMPLETE]
        count, first, names, lanes = len(found), len(self._starts), self._names, self._lanes
        # One loop for each field and one `pack` cost half of a loop for all, and of what numpy takes for a list.
        places = zip([event.pid for event in found], [event.tid for event in found], strict=True)
        numbers = pack(f"{count}i", *map(names.__getitem__, [event.name for event in found]))
        kinds = bytes([event.cat.kind for event in found])
        self._starts.frombytes(pack(f"{count}d", *[event.ts for event in found]))
        self._durations.frombytes(pack(f"{count}d", *[event.dur for event in found]))
        self._correlations.frombytes(pack(f"{count}q", *[event.args.correlation for event in found]))
        self._lane_numbers.frombytes(pack(f"{count}i", *map(lanes.__getitem__, places)))
        self._name_numbers.frombytes(numbers)
        self._kinds.frombytes(kinds)
        on_device = np.flatnonzero(np.frombuffer(kinds, np.int8) <= Kind.MEMORY_COPY).tolist()
        rows = {row for row in on_device if found[row].args.collective}
        if names.of_collectives:
            rows.update(np.flatnonzero(np.isin(np.frombuffer(numbers, np.int32), list(names.of_collectives))).tolist())
        if rows:
            self._keep_collectives(decode_full_events(text) if full is None else full, rows, first)
        for row in on_device:
            if kinds[row] == Kind.MEMORY_COPY and (size := found[row].args.bytes) and row not in rows:
                self._copied[first + row] = size
        return [len(batch)] if batch else []

    def _keep_collectives(self, batch: list[FullEvent], rows: set[int], first: int) -> None:
        found = [event for event in batch if event.ph is _COMPLETE]
        for row in sorted(rows):
            event = found[row]
            start, duration = _nanoseconds(np.array([event.ts, event.dur])).tolist()
            span = Span(start, start + max(duration, 0), event.name, event.arguments())
            self._collectives.append(NamedEvent(first + row, event.cat.value, (event.pid, event.tid), span))

    def columns(self, metadata: dict[str, Any], origin_ns: int) -> TraceColumns:
        """Return what was taken."""
        starts = _in_nanoseconds(self._starts)
        ends = _in_nanoseconds(self._durations)
        np.maximum(ends, 0, out=ends)
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


def _in_nanoseconds(microseconds: array[float]) -> Column:
    """Make a column of microseconds one of nanoseconds, in its own memory."""
    times = np.frombuffer(microseconds, np.float64)
    column = times.view(np.int64)
    for begin in range(0, len(times), _BLOCK):
        column[begin : begin + _BLOCK] = _nanoseconds(times[begin : begin + _BLOCK])
    return column


def _nanoseconds(times: NDArray[np.float64]) -> Column:
    """Exact nanoseconds: a double holds those of a moment since 1970 only where whole and fraction stay apart."""
    whole = np.floor(times)
    exact: Column = whole.astype(np.int64) * 1000 + np.rint((times - whole) * 1000).astype(np.int64)
    return exact
