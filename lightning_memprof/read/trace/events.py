"""Events of a JSON trace as typed rows, decoded piece by piece in bounded memory.

msgspec skips the arguments that an event type does not name without building them. Decoding a recorded trace with all
arguments of `FullEvent` takes 15 to 25% longer than with those of `Event` (interleaved runs on three traces of 50 MB);
enumerations in place of the strings `ph` and `cat` save nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from lightning_memprof.read.trace.text import LARGEST
from lightning_memprof.units import nanoseconds

_LONGEST_US: Final = 4e15  # 127 years: as ns below LARGEST
Microseconds = Annotated[float, msgspec.Meta(ge=-_LONGEST_US, le=_LONGEST_US)]
_Whole = Annotated[int, msgspec.Meta(ge=-LARGEST, le=LARGEST)]

_T = TypeVar("_T")


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


class FullArgs(Args, gc=False, frozen=True):
    """The arguments of collectives and of allocations as well; ``size`` is negative for a free.

    ``sent``, ``received``, ``ranks`` and ``number`` are -1 where the event has none.
    """

    external_id: _Whole = msgspec.field(default=0, name="External id")
    legacy_external_id: _Whole = msgspec.field(default=0, name="external id")
    group: str = msgspec.field(default="", name="Process Group Name")
    sent: _Whole = msgspec.field(default=-1, name="In msg nelems")
    received: _Whole = msgspec.field(default=-1, name="Out msg nelems")
    ranks: _Whole = msgspec.field(default=-1, name="Group size")
    number: _Whole = msgspec.field(default=-1, name="Seq")
    dtype: str = ""
    size: _Whole = msgspec.field(default=0, name="Bytes")
    address: int = msgspec.field(default=0, name="Addr")
    total: int = msgspec.field(default=0, name="Total Allocated")

    @property
    def link(self) -> int:
        """The number that ties a device event or a runtime call to the operator that caused it; 0 for none."""
        return self.external_id or self.legacy_external_id


class Event(msgspec.Struct, gc=False, frozen=True):
    """One event. `ts` and `dur` are microseconds; the properties are the exact ns in them.

    Times count from `TraceText.time_origin_ns`.
    """

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: Microseconds = 0.0
    dur: Microseconds = 0.0
    args: Args = Args()

    @property
    def start_ns(self) -> int:
        """Start in ns after `TraceText.time_origin_ns`."""
        return nanoseconds(self.ts)

    @property
    def duration_ns(self) -> int:
        """Duration in ns."""
        return nanoseconds(self.dur)


class FullEvent(Event, gc=False, frozen=True):
    """An event with all arguments that any analysis needs."""

    args: FullArgs = FullArgs()

    @property
    def end_ns(self) -> int:
        """End in ns after `TraceText.time_origin_ns`."""
        return self.start_ns + max(self.duration_ns, 0)

    def detached(self) -> FullEvent:
        """Return the event without a reference to the text that it was decoded from."""
        dims, types = self.args.input_dims.copy(), self.args.input_types.copy()
        return replace(self, args=replace(self.args, input_dims=dims, input_types=types, concrete=msgspec.Raw()))


def decoder(kind: type[_T]) -> Callable[[bytes], list[_T]]:
    """Return a function that decodes a JSON array of events of this type.

    It raises `msgspec.DecodeError` for text that is not valid JSON, or an event that is not an object. Numbers may
    come as strings, as some profilers write them; a field of another type has its default.
    """
    decode = msgspec.json.Decoder(list[kind], strict=False).decode  # type: ignore[valid-type]

    def events(text: bytes) -> list[_T]:
        try:
            return decode(text)
        except msgspec.ValidationError:  # valid JSON, but a field of another type: decode event by event
            return [_lenient(event, kind) for event in msgspec.json.decode(text)]

    return events


_fields: Final = cache(msgspec.structs.fields)


def _lenient(event: Any, kind: type[Any]) -> Any:
    """Build an event from the fields that make sense."""
    if not isinstance(event, dict):
        raise msgspec.DecodeError(f"an event is a JSON object, not {type(event).__name__}")
    found: dict[str, Any] = {}
    for field in _fields(kind):  # type: ignore[arg-type]  # a class is hashable
        value, wanted = event.get(field.encode_name), field.type
        if wanted is msgspec.Raw and field.encode_name in event:
            found[field.name] = msgspec.Raw(msgspec.json.encode(value))
        elif isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
            if isinstance(value, dict):
                found[field.name] = _lenient(value, wanted)
        elif value is not None:
            for given in (value, str(value)):
                with suppress(msgspec.ValidationError, OverflowError):
                    found[field.name] = msgspec.convert(given, wanted, strict=False)
                    break
    return kind(**found)


full_events: Final = decoder(FullEvent)
"""Decodes a JSON array of events with all arguments."""
