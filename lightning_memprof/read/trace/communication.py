"""Collectives of a trace: when this rank arrived at each, and when it left.

A trace has a few hundred collectives among millions of events. `collectives` decodes only the pieces of a trace that
have one, 64 KiB each, so that a training process can read its own trace beside its steps: a piece holds the interpreter
for less than a millisecond. `collective_events` takes them from the columns of a trace.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from lightning_memprof.read.trace.columns import COLLECTIVE_NAMES, Lane, TraceColumns, item_bytes
from lightning_memprof.read.trace.events import FullArgs, FullEvent, full_events
from lightning_memprof.read.trace.kernel_names import plain_kernel
from lightning_memprof.read.trace.text import TraceText

_CHUNK: Final = 1 << 16
_WORDS: Final = re.compile(rb'"(?:%b)' % b"|".join(name.encode() for name in COLLECTIVE_NAMES))
_LARGEST: Final = 1 << 53
_start: Final = attrgetter("start_ns")

HOST_BACKENDS: Final = ("gloo:", "mpi:", "ucc:")
"""The beginnings of the names of collectives on the host."""
_ON_HOST: Final = re.compile(r"(gloo|mpi|ucc):(\w+)\Z")
# Until torch 1.9 annotations were operators.
_ANNOTATES: Final = frozenset({"user_annotation", "cpu_op"})
_ON_DEVICE: Final = re.compile(r"(?:nccl|xccl|hccl):(\w+)\Z")
_KERNEL: Final = re.compile(r"[nr]ccl(?:Symk?)?(?:Dev)?Kernel_?([A-Za-z]+)")
# Collectives in the names of calls and kernels, without underscores: `_allgather_base`, `reduce_scatter_tensor`, and
# vLLM's reduction across devices.
_SPELLED: Final = {
    "allreduce": "all_reduce", "crossdevicereduce": "all_reduce", "reducescatter": "reduce_scatter",
    "allgather": "all_gather", "alltoall": "all_to_all",
}  # fmt: skip
_CAMEL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
_UNKNOWN: Final = "unknown"
_GENERIC: Final = "Generic"  # RCCL has one kernel for all collectives
_POINT_TO_POINT: Final = frozenset({"send", "recv", "recvAnySource", "send_recv"})
_ANY_SIZE: Final = frozenset({"all_to_all", "all_gather", "gather", "scatter"})


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """One collective on one rank.

    Attributes:
        name: such as ``all_reduce``.
        group: the process group's name, empty where the trace has none (gloo).
        sequence: the process group's number of it (Kineto's ``Seq``); where that is missing or not unique, the number
            among those of the same ``kind`` in this trace, from 0. With ``kind`` it finds the same collective in
            another rank's trace, without ``Seq`` if both traces begin at the same one.
        bytes: size of this rank's input or output, the larger one; of the input alone where torch recorded only shapes;
            None without both.
        ranks: how many the group has, None where torch recorded no sizes of messages.
        start_ns: when this rank arrived (Unix epoch, ns).
        end_ns: when it was done. All-reduces end nearly at once on all ranks, so the others wait for the rank that
            arrives last.
        device: where it ran: ``host`` for gloo, ``cuda`` for a kernel of NCCL or RCCL.
        row: of its event in the trace's columns, -1 where it was read without them.
    """

    name: str
    group: str
    bytes: int | None
    start_ns: int
    end_ns: int
    device: Literal["host", "cuda"]
    sequence: int = -1
    ranks: int | None = None
    row: int = -1

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
        ArtifactError: the file is missing, damaged or truncated, or no trace.
    """
    found, text = CollectiveEvents(), TraceText(trace)
    for piece in text.pieces(_named_events, _CHUNK, as_written=True):
        for event in piece:
            found.place(event)
    return found.sort().collectives(text.time_origin_ns)


def _named_events(piece: bytes) -> list[FullEvent]:
    """Return the events of a piece that belong to collectives."""
    if _WORDS.search(piece) is None:
        return []
    return [
        event.detached() for event in full_events(piece) if event.ph == "X" and event.name.startswith(COLLECTIVE_NAMES)
    ]


_Events = dict[Lane, list[FullEvent]]
_Message = tuple[str, int | None, int | None]  # group, bytes, ranks
_NO_ARGS: Final = FullArgs()


class CollectiveEvents(msgspec.Struct):
    """The events of collectives that were found in a trace, by thread or stream; times are ns after its origin.

    Attributes:
        on_host: those of gloo, with their rows; ``kernels`` are those of NCCL and RCCL.
        on_streams: annotations around kernels; ``launches`` are those around launches, on the host.
        calls: calls of torch that have the group and the size.
    """

    on_host: list[tuple[int, FullEvent]] = msgspec.field(default_factory=list)
    kernels: list[tuple[int, FullEvent]] = msgspec.field(default_factory=list)
    on_streams: _Events = msgspec.field(default_factory=lambda: defaultdict(list))
    launches: _Events = msgspec.field(default_factory=lambda: defaultdict(list))
    calls: _Events = msgspec.field(default_factory=lambda: defaultdict(list))

    def place(self, event: FullEvent, row: int = -1) -> None:
        """Keep an event by its part in a collective."""
        name, category, lane = event.name, event.cat, (event.pid, event.tid)
        if category == "kernel" and name.startswith("nccl"):
            self.kernels.append((row, event))
        elif category == "gpu_user_annotation" and _ON_DEVICE.match(name):
            self.on_streams[lane].append(event)
        elif category in _ANNOTATES and _ON_DEVICE.match(name):
            self.launches[lane].append(event)
        elif name == "record_param_comms":
            self.calls[lane].append(event)
        elif category == "user_annotation" and (host := _ON_HOST.match(name)) and host[2] not in _POINT_TO_POINT:
            self.on_host.append((row, event))

    def sort(self) -> CollectiveEvents:
        """Sort events by start, once all of them are there."""
        for events in (*self.on_streams.values(), *self.launches.values(), *self.calls.values()):
            events.sort(key=_start)
        return self

    def collectives(self, origin_ns: int) -> list[Collective]:
        """Return the collectives by start, each with its sequence number and its Unix times."""
        rows = sorted((*self._on_host(), *self._on_device()), key=lambda row: (row.start_ns, row.end_ns))
        given: dict[tuple[str, str, int | None], list[int]] = defaultdict(list)
        for row in rows:
            given[row.kind].append(row.sequence)
        numbers = {
            kind: iter(found if min(found) >= 0 and len(set(found)) == len(found) else range(len(found)))
            for kind, found in given.items()
        }
        result = []
        for row in rows:
            start, end = origin_ns + row.start_ns, origin_ns + row.end_ns
            result.append(replace(row, sequence=next(numbers[row.kind]), start_ns=start, end_ns=end))
        return result

    def launched(self, lane: Lane, moment: int) -> tuple[str, str, int | None, int | None] | None:
        """Return name, group, bytes and ranks of the collective that a thread launches; None where that is unknown.

        The name is that of the ``nccl:NAME`` annotation; group and size are those of ``record_param_comms``.
        """
        annotation, call = (_latest(events.get(lane, []), moment) for events in (self.launches, self.calls))
        if annotation is None:
            return None
        return _called(annotation), *_message(call.args if call else _NO_ARGS, annotation)

    def _on_host(self) -> Iterator[Collective]:
        for row, event in self.on_host:
            name = common_name(event.name.partition(":")[2])
            yield _collective(event, row, name, ("", _input_bytes(event.args), None))

    def _on_device(self) -> Iterator[Collective]:
        annotations = [event for events in self.launches.values() for event in events]
        launches = {event.args.external_id: event for event in annotations if event.args.external_id}
        launched = set(map(_called, annotations))
        for row, kernel in self.kernels:
            annotation = _latest(self.on_streams.get((kernel.pid, kernel.tid), []), kernel.start_ns)
            launch = launches.get(annotation.args.external_id) if annotation else None
            call = _latest(self.calls.get((launch.pid, launch.tid), []), launch.start_ns) if launch else None
            args = kernel.args if kernel.args.collective else call.args if call else _NO_ARGS
            name = _device_name(kernel, annotation, args, launched)
            if name is not None:
                yield _collective(kernel, row, name, _message(args, launch), args.number)


def _collective(event: FullEvent, row: int, name: str, message: _Message, sequence: int = -1) -> Collective:
    group, size, ranks = message
    return Collective(
        name=name,
        group=group,
        bytes=size,
        start_ns=event.start_ns,
        end_ns=event.end_ns,
        device="cuda" if event.cat == "kernel" else "host",
        sequence=sequence,
        ranks=ranks,
        row=row,
    )


def _device_name(kernel: FullEvent, annotation: FullEvent | None, args: FullArgs, launched: set[str]) -> str | None:
    """Return the collective of a kernel, or None where it is point-to-point or not known."""
    if annotation:
        name = _called(annotation)
    elif args.collective:
        name = common_name(args.collective)
    else:
        name = _of_kernel(kernel.name) or ""
        # An all-to-all is made of sends; where the program sends nothing else, they are all-to-alls.
        if name == "send_recv" and "all_to_all" in launched and not launched & _POINT_TO_POINT:
            name = "all_to_all"
    return None if not name or name in _POINT_TO_POINT else name


def common_name(name: str) -> str:
    """Return one name for the spellings of a collective."""
    bare = name.lower().replace("_", "")
    return next((common for spelled, common in _SPELLED.items() if spelled in bare), name)


def _called(annotation: FullEvent) -> str:
    return common_name(annotation.name.partition(":")[2])


def _latest(events: list[FullEvent], moment: int) -> FullEvent | None:
    """Return the latest event that started until a moment, if it had not ended before; the events are by start."""
    at = bisect_right(events, moment, key=_start) - 1
    return events[at] if at >= 0 and events[at].end_ns >= moment else None


def _message(args: FullArgs, launch: FullEvent | None) -> _Message:
    """Return a collective's group, its bytes, of a gathered or scattered tensor the whole, and its ranks.

    Without the sizes of messages, the bytes are those of the inputs of its launch.
    """
    count, item = max(args.sent, args.received), item_bytes(args.dtype)
    size = None if count < 0 or item is None else _bounded(count * item)
    ranks = None if size is None or args.ranks < 0 else args.ranks
    return args.group, _input_bytes(launch.args) if size is None and launch else size, ranks


def _input_bytes(args: FullArgs) -> int | None:
    dims, types = (msgspec.json.decode(text) if bytes(text) else None for text in (args.input_dims, args.input_types))
    if not isinstance(dims, list) or not isinstance(types, list):
        return None
    total = 0
    for shape, kind in zip(dims, types, strict=False):
        item = item_bytes(kind)
        if item is None or not isinstance(shape, list):
            return None
        for size in shape:
            if not isinstance(size, int) or _bounded(item := item * size) is None:
                return None
        total += item
    return _bounded(total)


def _bounded(size: int) -> int | None:
    return size if -_LARGEST < size < _LARGEST else None


def collective_events(columns: TraceColumns) -> CollectiveEvents:
    """Return the events of collectives among a trace's columns."""
    found = CollectiveEvents()
    for row, event in columns.collectives.items():
        found.place(event, row)
    return found.sort()


def plain_name(kernel: str) -> str:
    """Return the collective in a kernel's name: `ncclDevKernel_AllReduce_Sum_f32_RING` is an all_reduce."""
    if (name := _of_kernel(kernel)) is not None:
        return name or _UNKNOWN
    return common_name(plain_kernel(kernel).partition("(")[0].partition("<")[0])


def _of_kernel(kernel: str) -> str | None:
    """Return the collective in the name of a kernel of NCCL or RCCL, empty if it has none; None for other kernels."""
    match = _KERNEL.search(kernel)
    return None if match is None else "" if match[1] == _GENERIC else _CAMEL.sub("_", match[1]).lower()
