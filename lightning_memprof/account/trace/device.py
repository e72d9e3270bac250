"""Work on the devices of a trace: kernels, copies and memory sets of all streams."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_memprof.account.parts import BUSY, PARTS, Part
from lightning_memprof.account.trace.model import Copies, Kernel, KernelKind
from lightning_memprof.account.trace.spans import Step, launches
from lightning_memprof.read.trace.columns import DEVICE_KINDS, Kind, TraceColumns
from lightning_memprof.read.trace.intervals import Column, Intervals, clip, length_within, union

EARLIER: Final = int(np.iinfo(np.int64).min)
_COPY: Final = re.compile(r"Memcpy (\w+)(?: \((.*)\))?\Z")
# The names of ROCm's tracer and of XPU's, by the first letters of source and destination; M is memory of the host.
_COPY_ELSEWHERE: Final = re.compile(r"Copy(Host|Device)To(Host|Device)\Z|.*Memory ?Copy\w*\(([MHD])2([MHD])\)\Z")
_FILL_ELSEWHERE: Final = re.compile(r"FillBuffer\Z|.*MemoryFill\b")


class DeviceEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Device events by start, and the time in which there were any.

    Attributes:
        rows: ``(n,)`` positions in the trace's columns.
        launched: ``(n,)`` rows of the calls that launched them, -1 where the trace does not have it.
        moments: ``(n,)`` when they were launched: without a known launch their start, ``EARLIER`` before the recording.
        part: ``(n,)`` `Part.number` of each, one of ``BUSY``: messages between devices are collectives.
        busy: time in which anything ran; ``compute``, ``communication`` and ``memory_copy`` likewise.
        unrecorded: time in which nothing runs, but work may that is not in the trace: launched work waits for it, or it
            began before the recording; from the first step on, as long as the longest event.
    """

    rows: NDArray[np.int64]
    launched: Column
    moments: Column
    part: NDArray[np.int8]
    busy: Intervals
    compute: Intervals
    communication: Intervals
    memory_copy: Intervals
    unrecorded: Intervals


class Total(NamedTuple):
    """The events of one key: their number, the sum of their durations, the longest one and its position."""

    key: int
    calls: int
    ns: int
    max_ns: int
    longest: int


def device_events(columns: TraceColumns, parts: NDArray[np.int8], steps: list[Step]) -> DeviceEvents:
    """Return the device events of a trace with these steps, whose events have these parts."""
    rows = columns.rows(*DEVICE_KINDS)
    rows = rows[np.argsort(columns.starts[rows], kind="stable")]
    part = parts[rows]
    launched, busy = launches(columns, rows), columns.when(rows)
    compute, communication, copied = (columns.when(rows[part == each.number]) for each in BUSY)
    return DeviceEvents(
        rows=rows,
        launched=launched,
        moments=_moments(columns, rows, launched),
        part=part,
        busy=busy,
        compute=compute,
        communication=communication,
        memory_copy=copied,
        # A rank that is late keeps the others' devices waiting.
        unrecorded=either(
            _before(columns, rows, steps),
            _unrecorded(columns, rows, launched, clip(busy, 0, 0) if len(communication.starts) else busy),
        ),
    )


LATENCY_NS: Final = 20_000
"""A kernel starts 3 to 8 µs after its launch has returned, if nothing keeps it."""
# Launched work starts sooner on a device without other work. Before a copy, the host may pin or copy its memory.
_KEPT_NS: Final = 1_000_000
_PREPARED: Final = 10


def _unrecorded(columns: TraceColumns, rows: Column, launched: Column, busy: Intervals) -> Intervals:
    """Return the gaps in the device's work in which the next event was launched long before, from its launch on.

    If that is most of a gap, the whole gap is returned: the start of the unrecorded work is unknown.
    """
    gaps = Intervals(busy.ends[:-1], busy.starts[1:])
    at = np.searchsorted(columns.starts[rows], gaps.ends)
    events, calls = rows[at], launched[at]
    # A call that copies and blocks ends after its copy.
    blocks = columns.ends[calls] >= columns.ends[events]
    ready = np.where(blocks, columns.starts[calls], columns.ends[calls]) + LATENCY_NS
    begins = np.maximum(ready, gaps.starts)
    kept = gaps.ends - begins
    copied = _PREPARED * (columns.ends[events] - columns.starts[events])
    is_kept = (calls >= 0) & (kept >= _KEPT_NS) & (~blocks | (kept >= copied))
    begins = np.where(2 * kept >= gaps.ends - gaps.starts, gaps.starts, begins)
    return Intervals(begins[is_kept], gaps.ends[is_kept])


def _before(columns: TraceColumns, rows: Column, steps: list[Step]) -> Intervals:
    """Return the time in the steps in which an event may run that began before the recording."""
    starts = columns.starts[rows]
    begins = np.array([step.start for step in steps[:1] if len(rows)], np.int64)
    longest = np.max(columns.ends[rows] - starts, initial=0)
    return union(begins, np.minimum(begins + longest, starts[: len(begins)]))


def _moments(columns: TraceColumns, rows: Column, launched: Column) -> Column:
    # A device that is behind first works off what was launched before the recording.
    starts = columns.starts[rows]
    is_known = launched >= 0
    moments = np.where(is_known, columns.starts[np.maximum(launched, 0)], starts)
    if np.any(is_known):
        moments[~is_known & (starts < np.min(starts[is_known]))] = EARLIER
    return moments


# Work that is left to a device when the steps of the host end: less is the usual end of a step.
_LEFT: Final = 0.1


def device_steps(columns: TraceColumns, device: DeviceEvents, steps: list[Step]) -> list[Step]:
    """Return the steps as long as the device works for them, if that takes longer than the steps take on the host.

    A host that does not wait ends its steps before the device begins most of their work. The first step begins with its
    work, and not before the device has done earlier work. Where the host takes longer, and yet leaves much of its last
    steps' work to the device, these last until it is done.
    """
    if not steps or not len(device.rows):
        return steps
    begins = np.array([step.start for step in steps], np.int64)
    moments, ends = device.moments, columns.ends[device.rows]
    last = max(step.end for step in steps)
    inside, earlier = (moments >= begins[0]) & (moments < last), moments < begins[0]
    if not np.any(inside):
        return steps
    start = max(int(np.min(columns.starts[device.rows[inside]])), int(np.max(ends[earlier], initial=EARLIER)))
    bounds = np.full(len(steps) + 1, start, np.int64)
    np.maximum.at(bounds, np.searchsorted(begins, moments[inside], side="right"), ends[inside])
    bounds = np.maximum.accumulate(bounds)
    if bounds[-1] - start <= last - begins[0]:
        if bounds[-1] - last <= _LEFT * (last - begins[0]):
            return steps
        bounds = np.maximum.accumulate(np.maximum(bounds, [begins[0], *(step.end for step in steps)]))
        bounds[0] = begins[0]
    return [
        Step(int(begin), int(end), step.number) for step, begin, end in zip(steps, bounds[:-1], bounds[1:], strict=True)
    ]


def totals_by(keys: NDArray[np.int32] | NDArray[np.int64], durations: Column) -> list[Total]:
    """Sum ``(n,)`` durations in ns by key; the keys are sorted."""
    order = np.lexsort((durations, keys))
    found, begins, counts = np.unique(keys[order], return_index=True, return_counts=True)
    sums = np.add.reduceat(durations[order], begins) if len(order) else durations[:0]
    longest = order[begins + counts - 1]
    columns = (found, counts, sums, durations[longest], longest)
    return [Total(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def kernels(columns: TraceColumns, device: DeviceEvents) -> tuple[Kernel, ...]:
    """Return all launches by kernel, longest first."""
    kinds: dict[Part, KernelKind] = dict(zip(BUSY, ("compute", "communication", "memory_copy"), strict=True))
    keys = columns.names[device.rows].astype(np.int64) * len(PARTS) + device.part
    rows = (
        Kernel(
            name=columns.name_of[total.key // len(PARTS)],
            kind=kinds[PARTS[total.key % len(PARTS)]],
            count=total.calls,
            total_ns=total.ns,
            max_ns=total.max_ns,
        )
        for total in totals_by(keys, columns.ends[device.rows] - columns.starts[device.rows])
    )
    return tuple(sorted(rows, key=lambda kernel: (-kernel.total_ns, kernel.name)))


def copies(columns: TraceColumns, device: DeviceEvents) -> tuple[Copies, ...]:
    """Return the copies by kind, longest first: Kineto names them ``Memcpy HtoD (Pageable -> Device)``."""
    rows = columns.rows(Kind.MEMORY_COPY)
    running = either(device.compute, device.communication)
    found: dict[tuple[str, bool | None], list[int]] = defaultdict(list)
    for row, name in zip(rows.tolist(), columns.names[rows].tolist(), strict=True):
        found[copy_kind(columns.name_of[name])].append(row)
    result = []
    for (kind, is_pageable), members in found.items():
        starts, ends = columns.starts[members], columns.ends[members]
        hidden = length_within(running, starts, ends)
        sizes = [columns.copied.get(row) for row in members]
        known = [size for size in sizes if size is not None]
        total = int((ends - starts).sum())
        result.append(
            Copies(
                kind=kind,
                is_pageable=is_pageable,
                count=len(members),
                total_ns=total,
                bytes=sum(known) if len(known) == len(sizes) else None,
                exposed_ns=total - int(hidden.sum()),
                longest_start_ns=columns.origin_ns + int(starts[np.argmax(ends - starts)]),
            )
        )
    return tuple(sorted(result, key=lambda row: (-row.total_ns, row.kind)))


def copy_kind(name: str) -> tuple[str, bool | None]:
    """Return the kind of a copy by its name, and whether it is pageable, None where the name does not tell."""
    match = _COPY.match(name)
    if match is None:
        if elsewhere := _COPY_ELSEWHERE.match(name):
            return "to".join(place[0].replace("M", "H") for place in elsewhere.groups() if place), None
        return "Memset" if _FILL_ELSEWHERE.match(name) else name, None
    places = (match[2] or "").lower()
    return match[1], True if "pageable" in places else False if "pinned" in places else None


def either(first: Intervals, second: Intervals) -> Intervals:
    """Return the time in at least one of two sets."""
    return union(np.append(first.starts, second.starts), np.append(first.ends, second.ends))
