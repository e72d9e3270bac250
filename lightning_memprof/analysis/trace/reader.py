"""Streaming reader of Kineto JSON traces, plain or gzip-compressed, in bounded memory.

What a file holds besides its events is known in full once the events were read, because the format allows metadata
behind them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from lightning_memprof.analysis.trace.lenient_event import LONGEST_US, event_fields, number
from lightning_memprof.analysis.trace.text import TraceText
from lightning_memprof.units import nanoseconds

__all__ = ["Event", "EventArgs", "Trace", "read_events", "read_trace"]

_CHUNK: Final = 1 << 20

_Microseconds = Annotated[float, msgspec.Meta(ge=-LONGEST_US, le=LONGEST_US)]


class EventArgs(msgspec.Struct, gc=False, frozen=True):
    """The arguments of an event that analyses read; 0 or empty where the event has none.

    Torch numbers devices and autograd nodes from 0: there the event has none where it says -1.
    """

    external_id: int = msgspec.field(default=0, name="External id")
    legacy_external_id: int = msgspec.field(default=0, name="external id")
    correlation: int = 0
    input_dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    bytes: int = msgspec.field(default=0, name="Bytes")
    device_type: int = msgspec.field(default=0, name="Device Type")
    device_id: int = msgspec.field(default=-1, name="Device Id")
    address: int = msgspec.field(default=0, name="Addr")
    total_allocated: int = msgspec.field(default=0, name="Total Allocated")
    sequence_number: int = msgspec.field(default=-1, name="Sequence number")
    forward_thread: int = msgspec.field(default=0, name="Fwd thread id")

    @property
    def link(self) -> int:
        """The number that ties a device event or a runtime call to the operator that caused it; 0 where none does."""
        return self.external_id or self.legacy_external_id


_NO_ARGS: Final = EventArgs()


class Event(msgspec.Struct, gc=False, frozen=True):
    """One event. `ts` and `dur` are microseconds; `start_ns` and `duration_ns` are the exact nanoseconds in them.

    Times count from `Trace.time_origin_ns`.
    """

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: _Microseconds = 0.0
    dur: _Microseconds = 0.0
    args: EventArgs = _NO_ARGS

    @property
    def start_ns(self) -> int:
        """Start in ns after `Trace.time_origin_ns`."""
        return nanoseconds(self.ts)

    @property
    def duration_ns(self) -> int:
        """Duration in ns."""
        return nanoseconds(self.dur)


_DECODE: Final = msgspec.json.Decoder(list[Event]).decode


class Trace:
    """A trace file: its metadata, and its events as a stream.

    Reading starts with the iterator; every iterator reads the file again, so a trace is never held in memory.

    Args:
        path: a Kineto JSON file, plain or gzip-compressed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._text = TraceText(path)

    @property
    def metadata(self) -> dict[str, Any]:
        """Everything beside the events (`schemaVersion`, `distributedInfo`, ...); empty until they were all read."""
        return self._text.metadata

    @property
    def time_origin_ns(self) -> int:
        """Unix epoch time in ns from which `ts` counts; right once all events were read."""
        base = self.metadata.get("baseTimeNanoseconds", 0)
        return (base if isinstance(base, int) else 0) + self._text.ts_offset_us * 1000

    def events(self) -> Iterator[Event]:
        """All events in the file's order.

        Raises:
            ArtifactError: the file is missing, no gzip data under a name that ends in `.gz`, cut off, or no trace.
        """
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[Event]]:
        """All events in the file's order, as lists of a few thousand: the fast way through a large trace.

        Raises:
            ArtifactError: as `events` does.
        """
        yield from self._text.pieces(_events, _CHUNK)


def read_trace(path: Path) -> Trace:
    """Open a trace for reading; nothing is read before its events are asked for."""
    return Trace(path)


def read_events(path: Path) -> Iterator[Event]:
    """All events of a trace in the file's order.

    Raises:
        ArtifactError: as `Trace.events` does.
    """
    return Trace(path).events()


def _events(text: bytes) -> list[Event]:
    try:
        return _DECODE(text)
    except msgspec.ValidationError:  # valid JSON, but an argument of another type than Kineto's: read one by one
        return [_lenient_event(event) for event in msgspec.json.decode(text)]


def _lenient_event(event: Any) -> Event:
    fields, args = event_fields(event)
    return Event(
        **fields,
        args=EventArgs(
            external_id=int(number(args.get("External id"))),
            legacy_external_id=int(number(args.get("external id"))),
            correlation=int(number(args.get("correlation"))),
            input_dims=msgspec.Raw(msgspec.json.encode(args["Input Dims"]) if "Input Dims" in args else b""),
            bytes=int(number(args.get("Bytes"))),
            device_type=int(number(args.get("Device Type"))),
            device_id=int(number(args.get("Device Id", -1))),
            address=int(number(args.get("Addr"))),
            total_allocated=int(number(args.get("Total Allocated"))),
            sequence_number=int(number(args.get("Sequence number", -1))),
            forward_thread=int(number(args.get("Fwd thread id"))),
        ),
    )
