"""The events of a source as rows that can be read and written at the speed of a disk: what is not needed stays text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from lightning_memprof.analysis.timeline.model import Source, TimelineEvent
from lightning_memprof.analysis.trace.text import TraceText
from lightning_memprof.errors import ConfigError

__all__ = ["Number", "Reader", "Row", "canonical"]

Number = int | str | float | None
_RAW: Final = msgspec.Raw()
_BATCH: Final = 4096
_NO_DATE_NS: Final = 1 << 62


class Row(msgspec.Struct, gc=False, omit_defaults=True):
    """An event of the Trace Event Format. What is no number of ours to change is kept as the text that it was."""

    ph: str = ""
    cat: msgspec.Raw = _RAW
    name: msgspec.Raw = _RAW
    pid: Number = None
    tid: Number = None
    ts: int | float | None = None
    dur: int | float | None = None
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


_DECODE: Final = msgspec.json.Decoder(list[Row]).decode
_ENCODE: Final = msgspec.json.Encoder().encode


def canonical(number: Number) -> int | str:
    """One key for a pid or tid, which the oldest traces write as a number here and as a string there."""
    if isinstance(number, str):
        try:
            return int(number)
        except ValueError:
            return number
    return int(number) if isinstance(number, (int, float)) else ""


class Reader:
    """Reads a source's rows in batches, as often as wanted, and knows afterwards where its time begins.

    Raises:
        ConfigError: the source has neither a trace nor events, or both.
    """

    def __init__(self, source: Source) -> None:
        if (source.trace is None) == (source.events is None):
            raise ConfigError(f"source {source.label!r}: has a trace and events, or neither; give it one of the two")
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
        """How far the file was read."""
        return 0 if self._text is None else self._text.bytes_read

    @property
    def ts_offset_ns(self) -> int:
        """What the reader took off the times that the file gives, in ns."""
        return 0 if self._text is None else self._text.ts_offset_us * 1000

    @property
    def base_ns(self) -> int:
        """Unix epoch time in ns from which the rows' times count, known when all were read; 0: nothing says so."""
        if self._text is None:
            return self._first_ns or 0
        base = self._text.metadata.get("baseTimeNanoseconds", 0)
        return base if isinstance(base, int) and not isinstance(base, bool) else 0

    def batches(self) -> Iterator[list[Row]]:
        """All rows, some thousand at a time; each is the caller's to change.

        Raises:
            ArtifactError: the file is missing, cut off, or no trace.
        """
        if self._text is not None:
            yield from self._text.pieces(_rows)
        elif self.source.events is not None:
            yield from self._ready(self.source.events)

    def _ready(self, events: Callable[[], Iterable[TimelineEvent]]) -> Iterator[list[Row]]:
        left = iter(events())
        while batch := list(islice(left, _BATCH)):
            if self._first_ns is None:
                # A damaged row may come first: what counts from its time would be lost with it.
                self._first_ns = next((event.start_ns for event in batch if 0 < event.start_ns < _NO_DATE_NS), None)
            base = self._first_ns or 0
            yield [_row(event, base) for event in batch]


def _row(event: TimelineEvent, base_ns: int) -> Row:
    row = Row(
        ph=event.ph,
        name=msgspec.Raw(_ENCODE(event.name)),
        pid=event.process,
        tid=event.thread,
        ts=(event.start_ns - base_ns) / 1000,
        id=event.id,
    )
    if event.cat:
        row.cat = msgspec.Raw(_ENCODE(event.cat))
    if event.ph == "X":
        row.dur = event.duration_ns / 1000
    elif event.ph == "i":
        row.s = msgspec.Raw(b'"t"')
    elif event.ph == "f":
        row.bp = msgspec.Raw(b'"e"')
    if event.args:
        row.args = msgspec.Raw(_ENCODE(event.args))
    return row


def _rows(text: bytes) -> list[Row]:
    try:
        return _DECODE(text)
    except msgspec.ValidationError:  # valid JSON, but a field of another type than the format's: read one by one
        return [_lenient(fields) for fields in msgspec.json.decode(text)]


def _lenient(fields: Any) -> Row:
    if not isinstance(fields, dict):
        raise msgspec.DecodeError(f"an event is a JSON object, not {type(fields).__name__}")
    row = Row(ph=str(fields.get("ph") or ""))
    for key in ("ts", "dur"):
        if key in fields:
            setattr(row, key, _number(fields[key]))
    for key in ("pid", "tid"):
        value = fields.get(key)
        setattr(row, key, value if isinstance(value, (int, float, str)) else None)
    given = fields.get("id")
    row.id = given if given is None or (isinstance(given, int) and not isinstance(given, bool)) else str(given)
    for key in ("cat", "name"):
        if key in fields:
            setattr(row, key, msgspec.Raw(_ENCODE(str(fields[key]))))
    for key in ("id2", "scope", "bp", "s", "cname", "tts", "tdur", "sf", "stack", "args"):
        if key in fields:
            setattr(row, key, msgspec.Raw(_ENCODE(fields[key])))
    return row


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if abs(number) < float("inf") else None
