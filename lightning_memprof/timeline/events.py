"""Events and sources of one timeline: ready events, and rows of trace files at the speed of a disk.

A row is read and written as JSON text where the merger does not change it. It is a struct of its own and not one of
:mod:`lightning_memprof.read.trace.events`, because it keeps every field of the file, in order to write it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from sys import float_info
from typing import Annotated, Any, Final, Literal

import msgspec

from lightning_memprof.errors import ConfigError
from lightning_memprof.read.trace.events import decoder
from lightning_memprof.read.trace.text import TraceText

Number = int | str | float | None
# Some profilers write numbers as strings, among them "nan" and "inf".
Microseconds = int | Annotated[float, msgspec.Meta(ge=-float_info.max, le=float_info.max)] | None
_RAW: Final = msgspec.Raw()
_BATCH: Final = 4096
_NO_DATE_NS: Final = 1 << 62


class TimelineEvent(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """An event that did not come from a trace file.

    Attributes:
        ph: its kind in the letters of the Trace Event Format: ``X`` a slice, ``i`` an instant, ``C`` the value of a
            counter, ``s`` and ``f`` the two ends of an arrow.
        name: its label in a viewer; the name of a counter's track.
        start_ns: Unix epoch time in ns, by the clock of the source's host.
        duration_ns: length of a slice in ns, 0 or more.
        process: its group of tracks, below the source's label; empty for the label itself.
        thread: its track in that group; counters have a track by their name instead.
        cat: category, by which a viewer filters.
        id: ties the two ends of an arrow together; unique within the source, cat and name.
        args: shown by a viewer on a click; for a counter ``{"value": number}``, the number in base units.
    """

    ph: Literal["X", "i", "C", "s", "f"] = "X"
    name: str
    start_ns: int
    duration_ns: int = 0
    process: str = ""
    thread: str = ""
    cat: str = ""
    id: int | None = None
    args: dict[str, Any] | None = None


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The events of one process group: a trace file or ready events, one of the two.

    Sources with one label share their processes and tracks, so that the windows of a rank, and the series recorded
    beside its traces, are together.

    Attributes:
        label: name of the process group, such as ``rank 3 · host``; empty: the names are those in the trace.
        sort: place of the group from the top, the global rank; groups of one place are in the order of the sources.
        trace: a trace file in the Trace Event Format, plain or gzip-compressed.
        events: returns the events in any order; called twice, so that they need not be held in memory.
        offset_ns: added to every time, to align the clock of this source's host with the others'.
        span_ns: the part of a trace to keep, from and to, in ns of its own ``ts``; slices across an edge are clipped.
    """

    label: str
    sort: int = 0
    trace: Path | None = None
    events: Callable[[], Iterable[TimelineEvent]] | None = None
    offset_ns: int = 0
    span_ns: tuple[int, int] | None = None


class Row(msgspec.Struct, gc=False, omit_defaults=True):
    """An event of the Trace Event Format; fields that the merger does not change are JSON text."""

    ph: str = ""
    cat: msgspec.Raw = _RAW
    name: msgspec.Raw = _RAW
    pid: Number = None
    tid: Number = None
    ts: Microseconds = None
    dur: Microseconds = None
    id: int | str | None = None
    id2: msgspec.Raw = _RAW
    scope: msgspec.Raw = _RAW
    bp: msgspec.Raw = _RAW
    s: msgspec.Raw = _RAW
    cname: msgspec.Raw = _RAW
    tts: msgspec.Raw = _RAW
    tdur: msgspec.Raw = _RAW
    sf: msgspec.Raw = _RAW
    stack: msgspec.Raw = _RAW
    args: msgspec.Raw = _RAW


_decode: Final = decoder(Row)
_encode: Final = msgspec.json.Encoder().encode


def canonical(number: Number) -> int | str:
    """Return one key for a pid or tid, which the oldest traces write as a number or as a string."""
    if isinstance(number, str):
        try:
            return int(number)
        except ValueError:
            return number
    return int(number) if isinstance(number, (int, float)) else ""


class Reader:
    """Reads a source's rows in batches, any number of times; afterwards it knows where its time begins.

    Raises:
        ConfigError: the source has neither a trace nor events, or both.
    """

    def __init__(self, source: Source) -> None:
        if (source.trace is None) == (source.events is None):
            raise ConfigError(f"source {source.label!r}: needs either a trace or events")
        self.source = source
        self._text = None if source.trace is None else TraceText(source.trace)
        self._first_ns: int | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the file, 0 for ready events or where there is none."""
        try:
            return 0 if self.source.trace is None else self.source.trace.stat().st_size
        except OSError:
            return 0

    @property
    def bytes_read(self) -> int:
        """Bytes read of the file."""
        return 0 if self._text is None else self._text.bytes_read

    @property
    def ts_offset_ns(self) -> int:
        """Offset in ns that the reader subtracted from the times in the file."""
        return 0 if self._text is None else self._text.ts_offset_us * 1000

    @property
    def base_ns(self) -> int:
        """Unix epoch time in ns from which the rows' times count, known when all were read; 0 where unknown."""
        if self._text is None:
            return self._first_ns or 0
        base = self._text.metadata.get("baseTimeNanoseconds", 0)
        return base if isinstance(base, int) and not isinstance(base, bool) else 0

    @property
    def traces(self) -> int:
        """Number of traces that the source was made from, known when all rows were read; 0 for ready events."""
        return 0 if self._text is None else self._text.merged_traces or 1

    def batches(self) -> Iterator[list[Row]]:
        """Yield all rows, some thousand at a time; the caller may change them.

        Raises:
            ArtifactError: the file is missing, truncated, or no trace.
        """
        if self._text is not None:
            yield from self._text.pieces(_decode)
        elif self.source.events is not None:
            yield from self._ready(self.source.events)

    def _ready(self, events: Callable[[], Iterable[TimelineEvent]]) -> Iterator[list[Row]]:
        left = iter(events())
        while batch := list(islice(left, _BATCH)):
            if self._first_ns is None:
                # A damaged row may come first: times that count from its own would be lost with it.
                self._first_ns = next((event.start_ns for event in batch if 0 < event.start_ns < _NO_DATE_NS), None)
            base = self._first_ns or 0
            yield [_row(event, base) for event in batch]


def _row(event: TimelineEvent, base_ns: int) -> Row:
    row = Row(
        ph=event.ph,
        name=msgspec.Raw(_encode(event.name)),
        pid=event.process,
        tid=event.thread,
        ts=(event.start_ns - base_ns) / 1000,
        id=event.id,
    )
    if event.cat:
        row.cat = msgspec.Raw(_encode(event.cat))
    if event.ph == "X":
        row.dur = event.duration_ns / 1000
    elif event.ph == "i":
        row.s = msgspec.Raw(b'"t"')
    elif event.ph == "f":
        row.bp = msgspec.Raw(b'"e"')
    if event.args:
        row.args = msgspec.Raw(_encode(event.args))
    return row
