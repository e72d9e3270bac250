"""Work on the devices of a trace: kernels, copies and memory sets of all streams, and their timeline."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import Copies, Kernel, KernelKind
from lightning_memprof.account.trace.spans import Step, launches, loading_intervals, step_spans
from lightning_memprof.read.trace.columns import DEVICE_KINDS, Kind, TraceColumns, read_columns
from lightning_memprof.read.trace.intervals import (
    Column,
    Intervals,
    clip,
    difference,
    intersection,
    length_before,
    length_within,
    union,
)
from lightning_memprof.read.trace.kernel_names import plain_kernel

# Libraries whose kernels contain their name (NCCL, RCCL, oneCCL and XCCL, HCCL, MSCCL++, NVSHMEM, DeepEP), and kernels
# of torch's symmetric memory, vLLM, TensorRT-LLM and others that are named after the collective. A kernel fused by a
# compiler is named after its operators, and a warp or block reduces within itself: no collectives.
_COMMUNICATES: Final = re.compile(
    r"[nrxh]ccl|oneccl|\bccl_|\bhcom_|mscclpp|nvshmem|deep_ep::|cross_device_reduce|symm_mem|multimem_"
    r"|(?<!warp)(?<!warp_)(?<!block)(?<!block_)(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)",
    re.IGNORECASE,
)
_FUSED: Final = "triton_"
EARLIER: Final = int(np.iinfo(np.int64).min)
_COPY: Final = re.compile(r"Memcpy (\w+)(?: \((.*)\))?\Z")

STATES: Final = (Part.COMPUTE, Part.COLLECTIVE, Part.COPY, Part.IDLE_DATA, "idle")
"""The states of a device, the first one that applies: compute hides the rest; an idle device may wait for a batch."""


class DeviceEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Device events by start, and the time in which there were any.

    Attributes:
        rows: ``(n,)`` positions in the trace's columns.
        launched: ``(n,)`` rows of the calls that launched them, -1 where the trace does not have it.
        moments: ``(n,)`` when they were launched: without a known launch their start, ``EARLIER`` before the recording.
        communicates: ``(n,)`` whether it is a collective or a message between devices.
        copies: ``(n,)`` whether it copies or sets memory.
        busy: time in which anything ran; ``compute``, ``communication`` and ``memory_copy`` likewise.
        unrecorded: time in which launched work waits although nothing runs: for work that is not in the trace.
    """

    rows: NDArray[np.int64]
    launched: Column
    moments: Column
    communicates: NDArray[np.bool_]
    copies: NDArray[np.bool_]
    busy: Intervals
    compute: Intervals
    communication: Intervals
    memory_copy: Intervals
    unrecorded: Intervals


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Events by key.

    Attributes:
        keys: ``(k,)`` the keys that occur, sorted.
        counts: ``(k,)`` number of events.
        sums: ``(k,)`` ns, the sum of their durations.
        longest: ``(k,)`` position of the longest.
    """

    keys: NDArray[np.int64]
    counts: NDArray[np.int64]
    sums: Column
    longest: NDArray[np.int64]


class DeviceTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """Bins of equal length from the first device event's start to the last one's end.

    Attributes:
        start_ns: Unix time of the first bin's start.
        stretch_ns: length of a bin in ns.
        shares: by state (``STATES``) the part of each bin's time, 0 to 1; they add up to 1.
        steps: number, start and end of each step in bins: 2.5 is the middle of the third.
    """

    start_ns: int
    stretch_ns: float
    shares: dict[str, list[float]]
    steps: tuple[tuple[int, float, float], ...]


def device_events(columns: TraceColumns) -> DeviceEvents:
    """Return the device events of a trace."""
    rows = columns.rows(*DEVICE_KINDS)
    rows = rows[np.argsort(columns.starts[rows], kind="stable")]
    copying = columns.kinds[rows] != Kind.KERNEL
    by_argument = np.array([event.row for event in columns.collectives if "Collective name" in event.args], np.int64)
    communicates = (columns.named(_communicates)[columns.names[rows]] | np.isin(rows, by_argument)) & ~copying
    launched, busy = launches(columns, rows), columns.when(rows)
    return DeviceEvents(
        rows=rows,
        launched=launched,
        moments=_moments(columns, rows, launched),
        communicates=communicates,
        copies=copying,
        busy=busy,
        compute=columns.when(rows[~copying & ~communicates]),
        communication=columns.when(rows[communicates]),
        memory_copy=columns.when(rows[copying]),
        # A rank that is late keeps the others' devices waiting.
        unrecorded=_unrecorded(columns, rows, launched, clip(busy, 0, 0) if np.any(communicates) else busy),
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


def _communicates(name: str) -> bool:
    if name.startswith(_FUSED):
        return False
    function, _, arguments = plain_kernel(name).partition("<")
    # The arguments of a general kernel name what it computes; only a library's name tells there.
    return _COMMUNICATES.search(function) is not None or "nccl" in arguments


def totals_by(keys: NDArray[np.int32] | NDArray[np.int64], durations: Column) -> Totals:
    """Sum durations by key."""
    order = np.lexsort((durations, keys))
    found, begins, counts = np.unique(keys[order], return_index=True, return_counts=True)
    sums = np.add.reduceat(durations[order], begins) if len(order) else durations[:0]
    return Totals(keys=found.astype(np.int64), counts=counts, sums=sums, longest=order[begins + counts - 1])


def kernels(columns: TraceColumns, device: DeviceEvents) -> tuple[Kernel, ...]:
    """Return all launches by kernel, longest first."""
    kinds: tuple[KernelKind, ...] = ("compute", "communication", "memory_copy")
    number = np.where(device.copies, 2, np.where(device.communicates, 1, 0))
    keys = columns.names[device.rows].astype(np.int64) * len(kinds) + number
    durations = columns.ends[device.rows] - columns.starts[device.rows]
    found = totals_by(keys, durations)
    rows = [
        Kernel(
            name=columns.name_of[key // len(kinds)],
            kind=kinds[key % len(kinds)],
            count=int(count),
            total_ns=int(total),
            max_ns=int(durations[longest]),
        )
        for key, count, total, longest in zip(found.keys, found.counts, found.sums, found.longest, strict=True)
    ]
    return tuple(sorted(rows, key=lambda kernel: (-kernel.total_ns, kernel.name)))


def copies(columns: TraceColumns, device: DeviceEvents) -> tuple[Copies, ...]:
    """Return the copies by kind, longest first: Kineto names them ``Memcpy HtoD (Pageable -> Device)``."""
    rows = columns.rows(Kind.MEMORY_COPY)
    running = _either(device.compute, device.communication)
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
        return name, None
    places = (match[2] or "").lower()
    return match[1], True if "pageable" in places else False if "pinned" in places else None


def device_timeline(path: Path, stretches: int = 400) -> DeviceTimeline | None:
    """Read a trace once; None where nothing ran on a device.

    Raises:
        ArtifactError: the file is missing, damaged or truncated, or no trace.
    """
    columns = read_columns(path)
    device = device_events(columns)
    if not len(device.busy.starts):
        return None
    start, end = int(device.busy.starts[0]), int(device.busy.ends[-1])
    length = (end - start) / stretches
    window = Intervals(np.array([start], np.int64), np.array([end], np.int64))
    idle = difference(window, device.busy)
    loading = intersection(idle, loading_intervals(columns))
    parts = {
        Part.COMPUTE: device.compute,
        Part.COLLECTIVE: difference(device.communication, device.compute),
        Part.COPY: difference(device.memory_copy, _either(device.compute, device.communication)),
        Part.IDLE_DATA: loading,
        "idle": difference(idle, loading),
    }
    edges = np.rint(np.linspace(start, end, stretches + 1)).astype(np.int64)
    widths = np.maximum(1, np.diff(edges))
    return DeviceTimeline(
        start_ns=columns.origin_ns + start,
        stretch_ns=length,
        shares={state: (np.diff(length_before(part, edges)) / widths).tolist() for state, part in parts.items()},
        steps=tuple(
            (step.number, (step.start - start) / length, (step.end - start) / length) for step in step_spans(columns)
        ),
    )


def _either(first: Intervals, second: Intervals) -> Intervals:
    return union(np.append(first.starts, second.starts), np.append(first.ends, second.ends))
