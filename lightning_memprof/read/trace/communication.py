"""Collectives of a trace: when this rank arrived at each, and when it left.

A trace has a few hundred collectives among millions of events. `collectives` decodes only events that look like one: it
searches the text for the words at the beginning of their names, a piece of 256 KiB at a time, so that a training run
process can read its own trace beside its steps: a piece holds the interpreter for about a millisecond.
`trace_arrivals` takes them from the columns of a trace.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, Final, Literal

import msgspec
from msgspec.structs import replace

from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.trace.columns import Kind, Lane, NamedEvent, TraceColumns
from lightning_memprof.read.trace.kernel_names import plain_kernel
from lightning_memprof.read.trace.text import BASE_TIME, UNREADABLE, open_trace

_CHUNK: Final = 1 << 18
# Longer than any event of a collective: one of 4,096 ranks names its group in 20 kB.
_LONGEST: Final = 1 << 16
_WORDS: Final = (b'"gloo:', b'"mpi:', b'"ucc:', b'"nccl', b'"record_param_comms"', b'"baseTimeNanoseconds"')
_LARGEST: Final = 1 << 53
_start: Final = attrgetter("start_ns")
_OPENINGS_TO_TRY: Final = 6

HOST_BACKENDS: Final = ("gloo:", "mpi:", "ucc:")
"""The beginnings of the names of collectives on the host."""
_ON_HOST: Final = re.compile(r"(gloo|mpi|ucc):(\w+)\Z")
_ON_DEVICE: Final = re.compile(r"(?:nccl|xccl|hccl):(\w+)\Z")
_KERNEL: Final = re.compile(r"[nr]ccl(?:Symk?)?(?:Dev)?Kernel_?([A-Za-z]+)")
# Collectives in the names of other kernels, without underscores; vLLM calls its all-reduce a reduction across devices.
_SPELLED: Final = {
    "allreduce": "all_reduce", "crossdevicereduce": "all_reduce", "reducescatter": "reduce_scatter",
    "allgather": "all_gather", "alltoall": "all_to_all",
}  # fmt: skip
_CAMEL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
_UNKNOWN: Final = "unknown"
_GENERIC: Final = "Generic"  # RCCL has one kernel for all collectives
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


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """One collective on one rank.

    Attributes:
        name: such as ``all_reduce``.
        group: the process group's name, empty where the trace has none (gloo).
        sequence: number among those of the same ``kind``, from 0. The two find the same collective in another rank's
            trace, if both traces begin at the same one.
        bytes: size of this rank's input or output, the larger one; of the input alone where torch recorded only shapes;
            None without both.
        ranks: how many the group has, None where torch recorded no sizes of messages.
        start_ns: when this rank arrived (Unix epoch, ns).
        end_ns: when it was done. All-reduces end nearly at once on all ranks, so the others wait for the rank that
            arrives last.
        device: where it ran: ``host`` for gloo, ``cuda`` for a kernel of NCCL or RCCL.
    """

    name: str
    group: str
    bytes: int | None
    start_ns: int
    end_ns: int
    device: Literal["host", "cuda"]
    sequence: int = 0
    ranks: int | None = None

    @property
    def duration_ns(self) -> int:
        """Time from arrival to end in ns."""
        return self.end_ns - self.start_ns

    @property
    def kind(self) -> tuple[str, str, int | None]:
        """Name, group and size; without the size where each rank may have its own."""
        return self.name, self.group, None if self.name in _ANY_SIZE else self.bytes


def collectives(trace: Path) -> list[Collective]:
    """Return the collectives of a trace by start, without point-to-point operations.

    Sources: torch writes ``gloo:NAME`` around the work of gloo; a device's are the kernels ``ncclDevKernel_*``, named
    by their own arguments (torch >= 2.4), by the ``nccl:NAME`` annotation on their stream, or by the kernel itself. A
    launch without a recorded kernel does not tell when the collective ran, and is skipped.

    Raises:
        ArtifactError: the file is missing or cannot be read.
    """
    found = _Found()
    for event in _scan(trace, found):
        found.take(event)
    return found.collectives()


class _Found(msgspec.Struct):
    """The events found so far in a trace; times are ns after ``base_ns``."""

    base_ns: int = 0
    on_host: list[Collective] = msgspec.field(default_factory=list)
    kernels: list[NamedEvent] = msgspec.field(default_factory=list)
    on_streams: dict[Lane, list[NamedEvent]] = msgspec.field(default_factory=dict)
    launches: dict[int, NamedEvent] = msgspec.field(default_factory=dict)
    calls: dict[Lane, list[NamedEvent]] = msgspec.field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        """Keep an event if it belongs to a collective."""
        start, duration = _nanoseconds(event.get("ts")), _nanoseconds(event.get("dur"))
        if start is None or duration is None or event.get("ph") != "X":
            return
        args = event.get("args")
        self.place(
            NamedEvent(
                name=str(event.get("name")),
                category=str(event.get("cat")),
                lane=(_lane_part(event.get("pid")), _lane_part(event.get("tid"))),
                start_ns=start,
                end_ns=start + duration,
                args=args if isinstance(args, dict) else {},
            )
        )

    def place(self, event: NamedEvent) -> None:
        """Keep an event by its part in a collective."""
        name, category = event.name, event.category
        if category == "kernel" and name.startswith("nccl"):
            self.kernels.append(event)
        elif category == "gpu_user_annotation" and _ON_DEVICE.match(name):
            self.on_streams.setdefault(event.lane, []).append(event)
        elif category == "user_annotation" and _ON_DEVICE.match(name):
            self.launches[_whole(event.args.get("External id")) or -1 - len(self.launches)] = event
        elif name == "record_param_comms":
            self.calls.setdefault(event.lane, []).append(event)
        elif (host := _ON_HOST.match(name)) and category == "user_annotation" and host[2] not in _POINT_TO_POINT:
            self.on_host.append(
                Collective(
                    name=common_name(host[2]),
                    group="",
                    bytes=_input_bytes(event.args),
                    start_ns=event.start_ns,
                    end_ns=event.end_ns,
                    device="host",
                )
            )

    def collectives(self) -> list[Collective]:
        """Return the collectives by start, each with its sequence number."""
        rows = sorted((*self.on_host, *self._on_device()), key=lambda row: (row.start_ns, row.end_ns))
        counts: Counter[tuple[str, str, int | None]] = Counter()
        result = []
        for row in rows:
            start, end = self.base_ns + row.start_ns, self.base_ns + row.end_ns
            result.append(replace(row, sequence=counts[row.kind], start_ns=start, end_ns=end))
            counts[row.kind] += 1
        return result

    def _on_device(self) -> Iterator[Collective]:
        for events in (*self.on_streams.values(), *self.calls.values()):
            events.sort(key=_start)
        launched = {_called(event) for event in self.launches.values()}
        for kernel in self.kernels:
            annotation = _latest(self.on_streams.get(kernel.lane, []), kernel.start_ns)
            launch = self.launches.get(_whole(annotation.args.get("External id")) or 0) if annotation else None
            call = _latest(self.calls.get(launch.lane, []), launch.start_ns) if launch else None
            args = kernel.args if "Collective name" in kernel.args else call.args if call else {}
            name = _device_name(kernel, annotation, args, launched)
            if name is None:
                continue
            size, ranks = _message(args)
            if size is None and launch:
                size = _input_bytes(launch.args)
            yield Collective(
                name=name,
                group=str(args.get("Process Group Name", "")),
                bytes=size,
                start_ns=kernel.start_ns,
                end_ns=kernel.end_ns,
                device="cuda",
                ranks=ranks,
            )


def _lane_part(value: Any) -> Any:
    """Return a process or thread as a key; a damaged file may have a value that is none."""
    return value if isinstance(value, int | str | None) else str(value)


def _device_name(
    kernel: NamedEvent, annotation: NamedEvent | None, args: dict[str, Any], launched: set[str]
) -> str | None:
    """Return the collective of a kernel, or None where it is point-to-point or not known."""
    if annotation:
        name = _called(annotation)
    elif args.get("Collective name"):
        name = common_name(str(args["Collective name"]))
    else:
        name = _of_kernel(kernel.name) or ""
        # An all-to-all is made of sends; where the program sends nothing else, they are all-to-alls.
        if name == "send_recv" and "all_to_all" in launched and not launched & _POINT_TO_POINT:
            name = "all_to_all"
    return None if not name or name in _POINT_TO_POINT else name


def common_name(name: str) -> str:
    """Return one name for the spellings of a collective."""
    return _CALL_NAMES.get(name, name)


def _called(annotation: NamedEvent) -> str:
    return common_name(annotation.name.partition(":")[2])


def _latest(events: list[NamedEvent], moment: int) -> NamedEvent | None:
    """Return the latest event that started until a moment, if it had not ended before; the events are by start."""
    at = bisect_right(events, moment, key=_start) - 1
    return events[at] if at >= 0 and events[at].end_ns >= moment else None


def _message(args: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the bytes of a collective, of a gathered or scattered tensor the whole, and its ranks."""
    counts = [count for part in ("In", "Out") if (count := _whole(args.get(f"{part} msg nelems"))) is not None]
    item = _item_bytes(args.get("dtype"))
    size = None if not counts or item is None else _bounded(max(counts) * item)
    return size, None if size is None else _whole(args.get("Group size"))


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


def _scan(trace: Path, found: _Found) -> Iterator[dict[str, Any]]:
    """Yield the events that contain one of `_WORDS` as a name; set the trace's base time when it is read."""
    try:
        with open_trace(trace) as stream:
            last: dict[str, Any] | None = None
            for text, begin, end in _pieces(stream):
                for at in sorted(_places(text, begin, end)):
                    if base := BASE_TIME.match(text, at):
                        found.base_ns = int(base[1])
                    elif (event := _event_around(text, at)) and event != last:  # its arguments may have a word too
                        last = event
                        yield event
    except UNREADABLE as error:
        raise ArtifactError(f"{trace}: cannot be read ({error}); copy it again, or record the trace again") from error


def _pieces(stream: IO[bytes]) -> Iterator[tuple[bytes, int, int]]:
    """Yield a text and the part to search, with room for a whole event before and after."""
    text, begin = b"", 0
    while True:
        data = stream.read(_CHUNK)
        text += data
        end = len(text) - _LONGEST if data else len(text)
        if end > begin:
            yield text, begin, end
            first = max(0, end - _LONGEST)
            text, begin = text[first:], end - first
        if not data:
            return


def _places(text: bytes, begin: int, end: int) -> Iterator[int]:
    for word in _WORDS:
        at = text.find(word, begin, end + len(word) - 1)
        while at >= 0:
            if text[at - 1 : at] != b"\\":  # else it is part of a string
                yield at
            at = text.find(word, at + 1, end + len(word) - 1)


_DECODE: Final = json.JSONDecoder(parse_float=Decimal, strict=False).raw_decode


def _event_around(text: bytes, at: int) -> dict[str, Any] | None:
    """Return the event around a word; the object around it may be the event's arguments, then the next outer one."""
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


def trace_arrivals(columns: TraceColumns) -> tuple[Collective, ...]:
    """Return the collectives of a trace as :func:`collectives` does, by start."""
    events = _Found(base_ns=columns.origin_ns)
    for event in columns.collectives:
        events.place(event)
    return tuple(events.collectives())


class Launchers:
    """The annotations and calls on the host inside which collectives were launched, by lane."""

    def __init__(self, columns: TraceColumns) -> None:
        self._columns = columns
        self._events: dict[tuple[int, int], list[NamedEvent]] = defaultdict(list)
        for event in sorted(columns.collectives, key=_start):
            self._events[int(columns.lanes[event.row]), int(columns.kinds[event.row])].append(event)

    def describe(self, launch: int) -> tuple[str, str, int | None, int | None] | None:
        """Return name, group, bytes and ranks of the collective that a call launched, None where that is unknown.

        The name is that of the ``nccl:NAME`` annotation; group and size are those of ``record_param_comms``.
        """
        if launch < 0:
            return None
        lane, moment = int(self._columns.lanes[launch]), int(self._columns.starts[launch])
        annotation, call = (self._around(lane, kind, moment) for kind in (Kind.ANNOTATION, Kind.OPERATOR))
        if annotation is None:
            return None
        args = call.args if call else {}
        size, ranks = _message(args)
        if size is None:
            size = _input_bytes(annotation.args)
        return _called(annotation), str(args.get("Process Group Name", "")), size, ranks

    def _around(self, lane: int, kind: int, moment: int) -> NamedEvent | None:
        found = _latest(self._events.get((lane, kind), []), moment)
        return found if found and found.end_ns > moment else None


def plain_name(kernel: str) -> str:
    """Return the collective in a kernel's name: `ncclDevKernel_AllReduce_Sum_f32_RING` is an all_reduce."""
    if (name := _of_kernel(kernel)) is not None:
        return name or _UNKNOWN
    function = plain_kernel(kernel).partition("(")[0].partition("<")[0]
    bare = function.lower().replace("_", "")
    return next((name for spelled, name in _SPELLED.items() if spelled in bare), function)


def _of_kernel(kernel: str) -> str | None:
    """Return the collective in the name of a kernel of NCCL or RCCL, empty if it has none; None for other kernels."""
    match = _KERNEL.search(kernel)
    return None if match is None else "" if match[1] == _GENERIC else _CAMEL.sub("_", match[1]).lower()
