"""Events of a JSON trace as typed rows, decoded piece by piece in bounded memory.

There is one decoder family: each analysis names the event type with the arguments that it reads, and msgspec skips the
rest without building it. Decoding a recorded trace with all arguments of `OperatorEvent` takes 15 to 25% longer than
with those of `Event` (interleaved runs on three traces of 50 MB); enumerations in place of the strings `ph` and `cat`
save nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeVar, get_type_hints

import msgspec

from lightning_memprof.read.trace.text import TraceText
from lightning_memprof.units import nanoseconds

_CHUNK: Final = 1 << 20

LARGEST: Final = 1 << 62
"""Sums of two such numbers still fit into 64 bits; a larger number in a column is damage."""

_LONGEST_US: Final = 4e15  # 127 years: as ns below LARGEST
Microseconds = Annotated[float, msgspec.Meta(ge=-_LONGEST_US, le=_LONGEST_US)]
_Whole = Annotated[int, msgspec.Meta(ge=-LARGEST, le=LARGEST)]

_T = TypeVar("_T")


class TraceEvent(msgspec.Struct, gc=False, frozen=True):
    """One event without its arguments. `ts` and `dur` are microseconds; the properties are the exact ns in them.

    Times count from `Trace.time_origin_ns`.
    """

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: Microseconds = 0.0
    dur: Microseconds = 0.0

    @property
    def start_ns(self) -> int:
        """Start in ns after `Trace.time_origin_ns`."""
        return nanoseconds(self.ts)

    @property
    def duration_ns(self) -> int:
        """Duration in ns."""
        return nanoseconds(self.dur)


class Args(msgspec.Struct, gc=False, frozen=True):
    """The arguments that every analysis of device work needs; 0 or empty where the event has none.

    Autograd numbers its nodes from 0: a ``sequence`` of -1 is none. The thread of the forward is 0 in the forward.
    """

    correlation: _Whole = 0
    bytes: _Whole = 0
    collective: str = msgspec.field(default="", name="Collective name")
    sequence: int = msgspec.field(default=-1, name="Sequence number")
    forward_thread: int = msgspec.field(default=0, name="Fwd thread id")
    input_dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    input_types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    concrete: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Concrete Inputs")
    device_type: int | str = msgspec.field(default=0, name="Device Type")
    device_id: int | str = msgspec.field(default=-1, name="Device Id")


class Event(TraceEvent, gc=False, frozen=True):
    """An event with the arguments that every analysis of device work needs."""

    args: Args = Args()


class _CollectiveArgs(Args, gc=False, frozen=True):
    external_id: _Whole = msgspec.field(default=0, name="External id")
    group: str = msgspec.field(default="", name="Process Group Name")
    sent: _Whole = msgspec.field(default=-1, name="In msg nelems")
    received: _Whole = msgspec.field(default=-1, name="Out msg nelems")
    ranks: _Whole = msgspec.field(default=-1, name="Group size")
    dtype: str = ""


class CollectiveEvent(Event, gc=False, frozen=True):
    """An event with the arguments of a collective."""

    args: _CollectiveArgs = _CollectiveArgs()

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that the event has, under Kineto's names."""
        args = self.args
        found: dict[str, Any] = {"External id": args.external_id}
        if args.collective:
            found |= {"Collective name": args.collective, "Process Group Name": args.group, "dtype": args.dtype}
            counts = {"In msg nelems": args.sent, "Out msg nelems": args.received, "Group size": args.ranks}
            found |= {name: count for name, count in counts.items() if count >= 0}
        for key, raw in (("Input Dims", args.input_dims), ("Input type", args.input_types)):
            if bytes(raw):
                found[key] = msgspec.json.decode(raw)
        return found


class _MemoryArgs(_CollectiveArgs, gc=False, frozen=True):
    size: _Whole = msgspec.field(default=0, name="Bytes")
    address: int = msgspec.field(default=0, name="Addr")
    total: int = msgspec.field(default=0, name="Total Allocated")


class MemoryEvent(CollectiveEvent, gc=False, frozen=True):
    """An event with the arguments of a collective, or of an allocation or a free: its ``size`` is then negative."""

    args: _MemoryArgs = _MemoryArgs()


class OperatorArgs(msgspec.Struct, gc=False, frozen=True):
    """The arguments of operators, kernels and allocations; 0 or empty where the event has none.

    Torch numbers devices and autograd nodes from 0: -1 means none there. `bytes` is negative for a free.
    """

    external_id: _Whole = msgspec.field(default=0, name="External id")
    legacy_external_id: _Whole = msgspec.field(default=0, name="external id")
    correlation: int = 0
    input_dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    bytes: _Whole = msgspec.field(default=0, name="Bytes")
    device_type: int = msgspec.field(default=0, name="Device Type")
    device_id: int = msgspec.field(default=-1, name="Device Id")
    sequence_number: int = msgspec.field(default=-1, name="Sequence number")
    forward_thread: int = msgspec.field(default=0, name="Fwd thread id")

    @property
    def link(self) -> int:
        """The number that ties a device event or a runtime call to the operator that caused it; 0 for none."""
        return self.external_id or self.legacy_external_id


class OperatorEvent(TraceEvent, gc=False, frozen=True):
    """An event with the arguments of operators, kernels and allocations."""

    args: OperatorArgs = OperatorArgs()


def decoder(kind: type[_T]) -> Callable[[bytes], list[_T]]:
    """Return a function that decodes a JSON array of events of this type.

    It raises `msgspec.DecodeError` for text that is not valid JSON, or an event that is not an object. Numbers may
    come as strings, as some profilers write them; a field of another type has its default.
    """
    decode = msgspec.json.Decoder(list[kind], strict=False).decode  # type: ignore[valid-type]
    fields = _fields(kind)

    def events(text: bytes) -> list[_T]:
        try:
            return decode(text)
        except msgspec.ValidationError:  # valid JSON, but a field of another type: decode event by event
            return [_lenient(event, kind, fields) for event in msgspec.json.decode(text)]

    return events


class _Field(NamedTuple):
    name: str
    type: Any
    fields: dict[str, _Field] | None  # of a struct inside the struct


def _fields(kind: type[Any]) -> dict[str, _Field]:
    """Describe the fields of a struct by their names in JSON."""
    types = get_type_hints(kind, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(kind):
        wanted = types[field.name]
        is_struct = isinstance(wanted, type) and issubclass(wanted, msgspec.Struct)
        found[field.encode_name] = _Field(field.name, wanted, _fields(wanted) if is_struct else None)
    return found


def _lenient(event: Any, kind: type[_T], fields: dict[str, _Field]) -> _T:
    """Build an event from the fields that make sense."""
    if not isinstance(event, dict):
        raise msgspec.DecodeError(f"an event is a JSON object, not {type(event).__name__}")
    found = {}
    for key in event.keys() & fields.keys():
        value, field = event[key], fields[key]
        if field.type is msgspec.Raw:
            found[field.name] = msgspec.Raw(msgspec.json.encode(value))
        elif field.fields is not None:
            if isinstance(value, dict):
                found[field.name] = _lenient(value, field.type, field.fields)
        elif value is not None:
            for given in (value, str(value)):
                try:
                    found[field.name] = msgspec.convert(given, field.type, strict=False)
                    break
                except (msgspec.ValidationError, OverflowError):
                    continue
    return kind(**found)


class Trace(TraceText):
    """A trace file: its metadata, and its events as a stream.

    Reading starts with the iterator; every iterator reads the file again, so a trace is never held in memory. The
    metadata is empty until all events were read, because the format allows metadata after them.

    Args:
        path: a Kineto JSON file, plain or gzip-compressed.
    """

    def events(self) -> Iterator[OperatorEvent]:
        """All events in the file's order.

        Raises:
            ArtifactError: the file is missing, no gzip data under a name that ends in `.gz`, truncated, or no trace.
        """
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[OperatorEvent]]:
        """All events in the file's order, as lists of a few thousand: the fast way through a large trace.

        Raises:
            ArtifactError: as `events` does.
        """
        yield from self.pieces(_operator_events, _CHUNK)


_operator_events: Final = decoder(OperatorEvent)


def read_trace(path: Path) -> Trace:
    """Open a trace; nothing is read before its events are iterated."""
    return Trace(path)
