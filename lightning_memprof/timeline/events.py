"""Events and sources of one timeline: ready events, and rows of trace files at the speed of a disk.

A row is read and written as JSON text where the merger does not change it. It is a struct of its own and not one of
:mod:`lightning_memprof.read.trace.events`, because it keeps all that torch writes, in order to write it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from lightning_memprof.read.trace.events import Microseconds, decoder
from lightning_memprof.read.trace.text import TraceText

Number = int | str | float | None
Seen = Callable[[int], None]
"""Called with the bytes of a file that were read since the last call."""

# A time before 2001 is not a date: a trace then counts from the start of a machine or of a program.
A_DATE_NS: Final = 978_307_200_000_000_000
_RAW: Final = msgspec.Raw()
_BATCH: Final = 4096
# A damaged series may have times before 2001, and such as do not fit into a column.
_MOST_NS: Final = 1 << 62
_ALWAYS: Final = (-_MOST_NS, _MOST_NS)


class TimelineEvent(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """An event that did not come from a trace file.

    Attributes:
        ph: its kind in the letters of the Trace Event Format: ``X`` a slice, ``i`` an instant, ``C`` the value of a
            counter.
        name: its label in a viewer; the name of a counter's track.
        start_ns: Unix epoch time in ns, by the clock of the source's host.
        duration_ns: length of a slice in ns, 0 or more.
        process: its group of tracks, below the source's label; empty for the label itself.
        thread: its track in that group; counters have a track by their name instead.
        cat: category, by which a viewer filters.
        args: shown by a viewer on a click; for a counter ``{"value": number}``, the number in base units.
    """

    ph: Literal["X", "i", "C"] = "X"
    name: str
    start_ns: int
    duration_ns: int = 0
    process: str = ""
    thread: str = ""
    cat: str = ""
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
        span_ns: the part to keep, from and to, in ns of a trace's own ``ts``, of ready events in Unix ns; slices across
            an edge are clipped.
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
    ts: Microseconds | None = None
    dur: Microseconds | None = None
    id: int | str | None = None
    bp: msgspec.Raw = _RAW
    s: msgspec.Raw = _RAW
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
    """Reads a source's rows in batches, any number of times; afterwards it knows where its time begins."""

    def __init__(self, source: Source) -> None:
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
    def ts_offset_ns(self) -> int:
        """Offset in ns that the reader subtracted from the times in the file."""
        return 0 if self._text is None else self._text.ts_offset_us * 1000

    @property
    def base_ns(self) -> int:
        """Unix epoch time in ns from which the rows' times count, known when all were read; 0 where unknown."""
        return self._first_ns or 0 if self._text is None else self._text.base_ns

    @property
    def span_ns(self) -> tuple[int, int]:
        """The part to keep in ns of the rows' times, known once the first rows were read."""
        if self.source.span_ns is None:
            return _ALWAYS
        begin, end = self.source.span_ns
        origin = self.base_ns if self._text is None else self.ts_offset_ns
        return begin - origin, end - origin

    @property
    def traces(self) -> int:
        """Number of traces that the source was made from, known when all rows were read; 0 for ready events."""
        return 0 if self._text is None else self._text.merged_traces or 1

    def batches(self, seen: Seen) -> Iterator[list[Row]]:
        """Yield all rows, some thousand at a time; the caller may change them.

        Raises:
            ArtifactError: the file is missing, truncated, or no trace.
        """
        if self._text is not None:
            before = 0
            for rows in self._text.pieces(_decode):
                yield rows
                seen(self._text.bytes_read - before)
                before = self._text.bytes_read
            seen(self.size_bytes - before)
            return
        events = self.source.events() if self.source.events is not None else ()
        dated = (event for event in events if A_DATE_NS <= event.start_ns <= _MOST_NS - event.duration_ns)
        while batch := list(islice(dated, _BATCH)):
            base = self._first_ns = self._first_ns or batch[0].start_ns
            yield [_row(event, base) for event in batch]


def _row(event: TimelineEvent, base_ns: int) -> Row:
    row = Row(
        ph=event.ph,
        name=msgspec.Raw(_encode(event.name)),
        pid=event.process,
        tid=event.thread,
        ts=(event.start_ns - base_ns) / 1000,
    )
    if event.cat:
        row.cat = msgspec.Raw(_encode(event.cat))
    if event.ph == "X":
        row.dur = event.duration_ns / 1000
    elif event.ph == "i":
        row.s = msgspec.Raw(b'"t"')
    if event.args:
        row.args = msgspec.Raw(_encode(event.args))
    return row
