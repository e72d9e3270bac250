"""An event of a trace as its columns need it: what is not needed is skipped, not built."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Final

import msgspec

from lightning_memprof.analysis.trace.lenient_event import LONGEST_US, event_fields, number

__all__ = ["LARGEST", "Event", "FullEvent", "Kind", "Phase", "decode_events", "decode_full_events"]

# Sums of two are still 64 bits in ns; what is beyond (127 years) is damage.
LARGEST: Final = 1 << 62
_Microseconds = Annotated[float, msgspec.Meta(ge=-LONGEST_US, le=LONGEST_US)]
_Whole = Annotated[int, msgspec.Meta(ge=-LARGEST, le=LARGEST)]


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


def _kind(category: str) -> int:
    category = category.lower()
    fallback = Kind.RUNTIME if category.endswith(("_runtime", "_driver")) else Kind.OTHER
    return _KINDS.get(category, fallback)


# Members of an enumeration are looked up by the text's bytes, without a string for each event.
class Phase(Enum):
    """The kind of record: an event with a duration, or something else; a kind that no one knows is ``OTHER``."""

    COMPLETE = "X"
    OTHER = ""
    BEGIN = "B"
    END = "E"
    INSTANT = "i"
    OLD_INSTANT = "I"
    METADATA = "M"
    COUNTER = "C"
    ARROW_START = "s"
    ARROW_STEP = "t"
    ARROW_END = "f"
    ASYNCHRONOUS_BEGIN = "b"
    ASYNCHRONOUS_INSTANT = "n"
    ASYNCHRONOUS_END = "e"

    @classmethod
    def _missing_(cls, value: object) -> Phase:  # noqa: ARG003
        return cls.OTHER


class Category(Enum):
    """The categories that profilers have written; another one is one of these that has the same kind."""

    OTHER = ""
    KERNEL = "kernel"
    OLD_KERNEL = "Kernel"
    MEMORY_COPY = "gpu_memcpy"
    OLD_MEMORY_COPY = "Memcpy"
    MEMORY_SET = "gpu_memset"
    OLD_MEMORY_SET = "Memset"
    CUDA_RUNTIME = "cuda_runtime"
    CUDA_DRIVER = "cuda_driver"
    HIP_RUNTIME = "hip_runtime"
    OLD_RUNTIME = "Runtime"
    OPERATOR = "cpu_op"
    OLD_OPERATOR = "Operator"
    ANNOTATION = "user_annotation"
    PYTHON = "python_function"
    OVERHEAD = "overhead"
    OLD_OVERHEAD = "Overhead"
    ANNOTATION_OF_DEVICE = "gpu_user_annotation"
    INSTANT = "cpu_instant_event"
    SYNCHRONIZATION = "cuda_sync"
    PROFILER = "Trace"
    ARROW = "ac2g"
    ARROW_OF_AUTOGRAD = "fwdbwd"
    OLD_ARROW = "async_cpu_to_gpu"
    OLD_ARROW_OF_DEVICE = "async_gpu"
    OLD_ASYNCHRONOUS = "async"

    def __init__(self, text: str) -> None:
        self.kind = _kind(text)

    @classmethod
    def _missing_(cls, value: object) -> Category:
        return _OF_KIND[_kind(str(value))]


# The first of each kind says less than its name would: categories are told apart by their case elsewhere.
_OF_KIND: Final = {
    Kind.KERNEL: Category.OLD_KERNEL,
    Kind.MEMORY_COPY: Category.OLD_MEMORY_COPY,
    Kind.MEMORY_SET: Category.OLD_MEMORY_SET,
    Kind.RUNTIME: Category.OLD_RUNTIME,
    Kind.OPERATOR: Category.OLD_OPERATOR,
    Kind.ANNOTATION: Category.ANNOTATION,
    Kind.PYTHON: Category.PYTHON,
    Kind.OVERHEAD: Category.OVERHEAD,
    Kind.OTHER: Category.OTHER,
}


class _Args(msgspec.Struct, gc=False, frozen=True):
    correlation: _Whole = 0
    bytes: _Whole = 0
    collective: str = msgspec.field(default="", name="Collective name")


class _FullArgs(_Args, gc=False, frozen=True):
    external_id: _Whole = msgspec.field(default=0, name="External id")
    group: str = msgspec.field(default="", name="Process Group Name")
    elements: _Whole = msgspec.field(default=-1, name="In msg nelems")
    dtype: str = ""
    input_dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    input_types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")


_NO_ARGS: Final = _Args()
_NO_FULL_ARGS: Final = _FullArgs()


class Event(msgspec.Struct, gc=False, frozen=True):
    """What the columns hold of any event; ``ts`` and ``dur`` are microseconds."""

    ph: Phase = Phase.OTHER
    cat: Category = Category.OTHER
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: _Microseconds = 0.0
    dur: _Microseconds = 0.0
    args: _Args = _NO_ARGS


class FullEvent(Event, gc=False, frozen=True):
    """An event with all arguments that a collective has: a sixth dearer to read."""

    args: _FullArgs = _NO_FULL_ARGS

    def arguments(self) -> dict[str, Any]:
        """Return what was given, under the names that Kineto has for it."""
        given = self.args
        found: dict[str, Any] = {"External id": given.external_id}
        if given.collective:
            found |= {"Collective name": given.collective, "Process Group Name": given.group, "dtype": given.dtype}
            found["In msg nelems"] = given.elements if given.elements >= 0 else None
        for key, raw in (("Input Dims", given.input_dims), ("Input type", given.input_types)):
            if bytes(raw):
                found[key] = msgspec.json.decode(raw)
        return found


# Not strict: some profilers write numbers as strings.
_DECODE: Final = msgspec.json.Decoder(list[Event], strict=False).decode
_DECODE_FULL: Final = msgspec.json.Decoder(list[FullEvent], strict=False).decode


def decode_events(text: bytes) -> list[Event]:
    """Read a JSON array of events.

    Raises:
        msgspec.DecodeError: it is not valid JSON.
    """
    try:
        return _DECODE(text)
    except msgspec.ValidationError:  # valid JSON, but something of another type than Kineto's: read one by one
        return [_lenient(event) for event in msgspec.json.decode(text)]


def decode_full_events(text: bytes) -> list[FullEvent]:
    """Read a JSON array of events with all their arguments.

    Raises:
        msgspec.DecodeError: it is not valid JSON.
    """
    try:
        return _DECODE_FULL(text)
    except msgspec.ValidationError:
        return [_lenient(event) for event in msgspec.json.decode(text)]


def _lenient(event: Any) -> FullEvent:
    fields, args = event_fields(event)
    return FullEvent(
        ph=Phase(fields["ph"]),
        cat=Category(fields["cat"]),
        name=fields["name"],
        pid=fields["pid"],
        tid=fields["tid"],
        ts=fields["ts"],
        dur=fields["dur"],
        args=_FullArgs(
            correlation=int(number(args.get("correlation"), LARGEST)),
            external_id=int(number(args.get("External id"), LARGEST)),
            bytes=int(number(args.get("bytes"), LARGEST)),
            collective=str(args.get("Collective name") or ""),
            group=str(args.get("Process Group Name") or ""),
            elements=int(number(args.get("In msg nelems", -1), LARGEST)),
            dtype=str(args.get("dtype") or ""),
            input_dims=_raw(args, "Input Dims"),
            input_types=_raw(args, "Input type"),
        ),
    )


def _raw(args: dict[str, Any], key: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(args[key]) if key in args else b"")
