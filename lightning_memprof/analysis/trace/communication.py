"""The collectives of a trace: when this rank came to each, and when all were done.

A trace holds a few hundred collectives among millions of events. Only what looks like one is decoded: the text is
searched for the words that begin their names, a piece of 256 KiB at a time, so that a training process can read its own
trace beside its steps: a piece holds the interpreter for about a millisecond.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeAlias

from isal import igzip, isal_zlib

from lightning_memprof.artifacts.plain_file import open_plain
from lightning_memprof.errors import ArtifactError

__all__ = ["Collective", "Lane", "Span", "collectives", "collectives_among", "described"]

_UNREADABLE: Final[tuple[type[Exception], ...]] = (OSError, EOFError, isal_zlib.error)  # type: ignore[assignment]

_CHUNK: Final = 1 << 18
# Longer than any event of a collective: one of 4,096 ranks names its group in 20 kB.
_LONGEST: Final = 1 << 16
_WORDS: Final = (b'"gloo:', b'"mpi:', b'"ucc:', b'"nccl', b'"record_param_comms"', b'"baseTimeNanoseconds"')
_LARGEST: Final = 1 << 53
_BASE: Final = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})\b')
_OPENINGS_TO_TRY: Final = 6

_ON_HOST: Final = re.compile(r"(gloo|mpi|ucc):(\w+)\Z")
_ON_DEVICE: Final = re.compile(r"nccl:(\w+)\Z")
_KERNEL: Final = re.compile(r"nccl(?:Dev)?Kernel_([A-Za-z]+)")
_KERNEL_NAMES: Final = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "Broadcast": "broadcast",
    "Reduce": "reduce",
}  # fmt: skip
_CALL_NAMES: Final = {
    "allreduce": "all_reduce", "allgather": "all_gather", "_allgather_base": "all_gather",
    "_all_gather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter", "alltoall": "all_to_all",
    "alltoall_base": "all_to_all", "all_to_allv": "all_to_all", "allreduce_coalesced": "all_reduce",
    "allgather_into_tensor_coalesced": "all_gather", "reduce_scatter_tensor_coalesced": "reduce_scatter",
}  # fmt: skip
_POINT_TO_POINT: Final = frozenset({"send", "recv", "recvAnySource", "send_recv"})
_ANY_SIZE: Final = frozenset({"all_to_all", "all_gather", "gather", "scatter"})
_ITEM_BYTES: Final = {
    "double": 8, "long": 8, "longint": 8, "complexfloat": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2,
    "short": 2, "shortint": 2, "char": 1, "signedchar": 1, "unsignedchar": 1, "byte": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "complexdouble": 16, "unsignedint": 4, "unsignedlong": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Collective:
    """One collective as one rank saw it.

    ``start_ns`` is when this rank came to it and ``end_ns`` when it was done with it (Unix epoch, ns). All-reduces
    end nearly at once on all ranks, so the rank that starts last is the one for which the others wait.
    ``group`` is the process group's name, empty where the trace has none (gloo). ``sequence`` counts from 0 what has
    the same ``kind``: the two find the same collective in another rank's trace, if both traces begin at the same one.
    ``bytes`` is the size of this rank's input, None where no shapes were recorded.
    ``device`` is where it ran: ``host`` for gloo, ``cuda`` for a kernel of NCCL or RCCL.
    """

    name: str
    group: str
    sequence: int
    bytes: int | None
    start_ns: int
    end_ns: int
    device: Literal["host", "cuda"]

    @property
    def duration_ns(self) -> int:
        """Nanoseconds from coming to it until it was done."""
        return self.end_ns - self.start_ns

    @property
    def kind(self) -> tuple[str, str, int | None]:
        """Name, group and size; without the size where each rank may have its own."""
        return _kind(self.name, self.group, self.bytes)


def collectives(trace: Path) -> list[Collective]:
    """Return the collectives of a trace in the order of their starts; those between two ranks alone are left out.

    Sources: torch writes ``gloo:NAME`` around the work of gloo; a device's are the kernels ``ncclDevKernel_*``, named
    by their own arguments (torch >= 2.4), by the ``nccl:NAME`` annotation on their stream, or by the kernel itself. A
    launch whose kernel was not recorded says nothing about when it ran, and is left out.

    Raises:
        ArtifactError: the file is missing or cannot be read.
    """
    found = _Found()
    for event in _events(trace, found):
        found.take(event)
    return _in_order(found)


def collectives_among(spans: Iterable[tuple[str, Lane, Span]]) -> list[Collective]:
    """Return the collectives among events that were read already, as `collectives` does of a trace.

    Args:
        spans: category, lane and event of each that is a collective's; times in ns, as those of the result.
    """
    found = _Found()
    for category, lane, span in spans:
        found.place(category, lane, span)
    return _in_order(found)


def described(annotation: Span, call: Span | None) -> tuple[str, str, int | None]:
    """Return name, group and bytes that an ``nccl:NAME`` annotation and ``record_param_comms`` give a collective."""
    args = call.args if call else {}
    size = _message_bytes(args)
    name = _common(annotation.name.partition(":")[2])
    return name, str(args.get("Process Group Name", "")), _input_bytes(annotation.args) if size is None else size


def _in_order(found: _Found) -> list[Collective]:
    rows = sorted((*found.on_host, *_on_device(found)), key=lambda row: (row.start_ns, row.end_ns))
    counts: Counter[tuple[str, str, int | None]] = Counter()
    result = []
    for row in rows:
        key = _kind(row.name, row.group, row.bytes)
        result.append(
            Collective(row.name, row.group, counts[key], row.bytes, found.base_ns + row.start_ns,
                       found.base_ns + row.end_ns, row.device)
        )  # fmt: skip
        counts[key] += 1
    return result


@dataclass(frozen=True)
class _Row:
    name: str
    group: str
    bytes: int | None
    start_ns: int
    end_ns: int
    device: Literal["host", "cuda"]


@dataclass(frozen=True)
class Span:
    """An event of a collective, with its arguments."""

    start_ns: int
    end_ns: int
    name: str
    args: dict[str, Any]


Lane: TypeAlias = tuple[Any, Any]


@dataclass
class _Found:
    """What the scan of a trace has found so far; times are ns after ``base_ns``."""

    base_ns: int = 0
    on_host: list[_Row] = field(default_factory=list)
    kernels: list[tuple[Lane, Span]] = field(default_factory=list)
    on_streams: dict[Lane, list[Span]] = field(default_factory=dict)
    launches: dict[int, tuple[Lane, Span]] = field(default_factory=dict)
    calls: dict[Lane, list[Span]] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        """Keep what belongs to a collective."""
        args = event.get("args")
        name, category = str(event.get("name")), event.get("cat")
        lane = (_part(event.get("pid")), _part(event.get("tid")))
        start, duration = _nanoseconds(event.get("ts")), _nanoseconds(event.get("dur"))
        if start is None or duration is None or event.get("ph") != "X":
            return
        self.place(str(category), lane, Span(start, start + duration, name, args if isinstance(args, dict) else {}))

    def place(self, category: str, lane: Lane, span: Span) -> None:
        """Keep an event under what it tells of a collective."""
        name = span.name
        if category == "kernel" and name.startswith("nccl"):
            self.kernels.append((lane, span))
        elif category == "gpu_user_annotation" and _ON_DEVICE.match(name):
            self.on_streams.setdefault(lane, []).append(span)
        elif category == "user_annotation" and _ON_DEVICE.match(name):
            self.launches[_whole(span.args.get("External id")) or -1 - len(self.launches)] = (lane, span)
        elif name == "record_param_comms":
            self.calls.setdefault(lane, []).append(span)
        elif (host := _ON_HOST.match(name)) and category == "user_annotation" and host[2] not in _POINT_TO_POINT:
            self.on_host.append(_Row(_common(host[2]), "", _input_bytes(span.args), span.start_ns, span.end_ns, "host"))


def _part(of_lane: Any) -> Any:
    """Return what stands for a process or a thread; what a damaged file has there may be no key."""
    return of_lane if isinstance(of_lane, int | str | None) else str(of_lane)


def _on_device(found: _Found) -> list[_Row]:
    for spans in (*found.on_streams.values(), *found.calls.values()):
        spans.sort(key=lambda span: span.start_ns)
    launched = {_common(span.name.partition(":")[2]) for _, span in found.launches.values()}
    rows = []
    for lane, kernel in found.kernels:
        annotation = _around(found.on_streams.get(lane, []), kernel)
        launch = found.launches.get(_whole(annotation.args.get("External id")) or 0) if annotation else None
        call = _around(found.calls.get(launch[0], []), launch[1]) if launch else None
        own = kernel.args if "Collective name" in kernel.args else call.args if call else {}
        name = _device_name(kernel, annotation, own, launched)
        if name is None:
            continue
        size = _message_bytes(own)
        if size is None and launch:
            size = _input_bytes(launch[1].args)
        rows.append(_Row(name, str(own.get("Process Group Name", "")), size, kernel.start_ns, kernel.end_ns, "cuda"))
    return rows


def _device_name(kernel: Span, annotation: Span | None, own: dict[str, Any], launched: set[str]) -> str | None:
    """Return what a kernel does, or None where it is between two ranks alone or not known."""
    if annotation:
        name = annotation.name.partition(":")[2]
    elif own.get("Collective name"):
        name = str(own["Collective name"])
    else:
        token = _KERNEL.match(kernel.name)
        name = _KERNEL_NAMES.get(token[1], "") if token else ""
        # An all-to-all is made of sends; where the program sends nothing else, they are one.
        if token and token[1] == "SendRecv" and "all_to_all" in launched and not launched & _POINT_TO_POINT:
            name = "all_to_all"
    name = _common(name)
    return None if not name or name in _POINT_TO_POINT else name


def _kind(name: str, group: str, size: int | None) -> tuple[str, str, int | None]:
    return name, group, None if name in _ANY_SIZE else size


def _common(name: str) -> str:
    return _CALL_NAMES.get(name, name)


def _around(spans: list[Span], inner: Span) -> Span | None:
    at = bisect_right(spans, inner.start_ns, key=lambda span: span.start_ns) - 1
    return spans[at] if at >= 0 and spans[at].end_ns >= inner.start_ns else None


def _message_bytes(args: dict[str, Any]) -> int | None:
    count, item = _whole(args.get("In msg nelems")), _item_bytes(args.get("dtype"))
    return None if count is None or item is None else _bounded(count * item)


def _input_bytes(args: dict[str, Any]) -> int | None:
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list):
        return None
    total = 0
    for shape, kind in zip(dims, types, strict=False):
        item = _item_bytes(kind)
        if item is None or not isinstance(shape, list):
            return None
        for size in shape:
            if not isinstance(size, int) or _bounded(item := item * size) is None:
                return None
        total += item
    return _bounded(total)


def _bounded(size: int) -> int | None:
    return size if -_LARGEST < size < _LARGEST else None


def _item_bytes(kind: Any) -> int | None:
    return _ITEM_BYTES.get(str(kind).lower().removeprefix("c10::").replace(" ", ""))


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _nanoseconds(value: Any) -> int | None:
    if not isinstance(value, int | Decimal):
        return None
    return round(value * 1000) if -_LARGEST < value < _LARGEST else None


def _events(trace: Path, found: _Found) -> Iterator[dict[str, Any]]:
    """Yield the events that begin with one of our words; set the trace's base time when it comes by."""
    try:
        with _open(trace) as stream:
            last: dict[str, Any] | None = None
            for text, begin, end in _pieces(stream):
                for at in sorted(_places(text, begin, end)):
                    if base := _BASE.match(text, at):
                        found.base_ns = int(base[1])
                    elif (event := _event_around(text, at)) and event != last:  # its arguments may have a word too
                        last = event
                        yield event
    except _UNREADABLE as error:
        raise ArtifactError(f"{trace}: cannot be read ({error}); copy it again, or record the trace again") from error


def _open(trace: Path) -> IO[bytes]:
    with open_plain(trace) as stream:
        magic = stream.read(2)
    if magic == b"\x1f\x8b":
        compressed: IO[bytes] = igzip.open(trace, "rb")  # type: ignore[no-untyped-call]  # isal ships no types for it
        return compressed
    return trace.open("rb")


def _pieces(stream: IO[bytes]) -> Iterator[tuple[bytes, int, int]]:
    """Yield a text and the part of it to look at, with room for a whole event before and behind."""
    text, begin = b"", 0
    while True:
        data = stream.read(_CHUNK)
        text += data
        end = len(text) - _LONGEST if data else len(text)
        if end > begin:
            yield text, begin, end
            kept = max(0, end - _LONGEST)
            text, begin = text[kept:], end - kept
        if not data:
            return


def _places(text: bytes, begin: int, end: int) -> Iterator[int]:
    for word in _WORDS:
        at = text.find(word, begin, end + len(word) - 1)
        while at >= 0:
            if text[at - 1 : at] != b"\\":  # else it stands inside a string
                yield at
            at = text.find(word, at + 1, end + len(word) - 1)


_DECODE: Final = json.JSONDecoder(parse_float=Decimal, strict=False).raw_decode


def _event_around(text: bytes, at: int) -> dict[str, Any] | None:
    """Return the event in which a word stands; the object around it may be its arguments, then the next one out."""
    opening, limit = at, max(0, at - _LONGEST)
    for _ in range(_OPENINGS_TO_TRY):
        opening = text.rfind(b"{", limit, opening)
        if opening < 0:
            return None
        try:
            event = _DECODE(text[opening : at + _LONGEST].decode(errors="replace"))[0]
        except (ValueError, ArithmeticError, RecursionError):  # a decimal's exponent has more digits than fit
            continue
        if isinstance(event, dict) and "ph" in event:
            return event
    return None
