"""The time in the collectives of a trace: how long each takes, and for how much of it no device computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Final

import msgspec
import numpy as np

from lightning_memprof.account.trace.device import DeviceEvents
from lightning_memprof.account.trace.model import CollectiveTotals
from lightning_memprof.read.trace.columns import Kind, TraceColumns
from lightning_memprof.read.trace.communication import (
    HOST_BACKENDS,
    Collective,
    Launchers,
    plain_name,
    trace_arrivals,
)
from lightning_memprof.read.trace.intervals import Column, Intervals, length_within, union

# How often the share (n - 1) / n of the data crosses each link between n ranks.
_BUS_SHARES: Final = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


class CollectiveCall(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of a trace; times are ns after the trace's origin, ``row`` is the kernel's, -1 on the host."""

    name: str
    group: str
    bytes: int | None
    start: int
    end: int
    row: int = -1
    ranks: int | None = None

    @property
    def on_device(self) -> bool:
        """Whether it ran on a device."""
        return self.row >= 0


def collective_calls(columns: TraceColumns, device: DeviceEvents) -> Iterator[CollectiveCall]:
    """Yield the collectives and point-to-point operations of a trace."""
    launchers = Launchers(columns)
    known: dict[tuple[int, int], Collective] = {}
    for row in trace_arrivals(columns):
        start, end = row.start_ns - columns.origin_ns, row.end_ns - columns.origin_ns
        if row.device == "host":
            yield CollectiveCall(name=row.name, group=row.group, bytes=row.bytes, start=start, end=end)
        else:
            known[start, end] = row
    rows = device.rows[device.communicates]
    for kernel, launch in zip(rows.tolist(), device.launched[device.communicates].tolist(), strict=True):
        start, end = int(columns.starts[kernel]), int(columns.ends[kernel])
        found = known.get((start, end))
        described = (found.name, found.group, found.bytes, found.ranks) if found else None
        if found is None or found.bytes is None:
            described = launchers.describe(launch) or described
        name, group, size, ranks = described or (plain_name(columns.name(kernel)), "", None, None)
        yield CollectiveCall(name=name, group=group, bytes=size, start=start, end=end, row=kernel, ranks=ranks)


def trace_collectives(
    columns: TraceColumns, device: DeviceEvents, found: list[CollectiveCall]
) -> tuple[CollectiveTotals, ...]:
    """Return the totals of collectives and of point-to-point operations, longest first.

    A collective on a device is exposed where no device computes. A collective on the host (gloo) is exposed where, in
    addition, no other thread is inside an operator.
    """
    exposed = _exposed(columns, device, found)
    kinds: dict[tuple[str, str, int | None], list[int]] = defaultdict(list)
    for i, call in enumerate(found):
        kinds[call.name, call.group, call.bytes].append(i)
    result = []
    for (name, group, size), members in kinds.items():
        durations = [found[i].end - found[i].start for i in members]
        longest = max(members, key=lambda i: found[i].end - found[i].start)
        result.append(
            CollectiveTotals(
                name=name,
                group=group,
                bytes_each=size,
                count=len(members),
                total_ns=sum(durations),
                median_ns=round(median(durations)),
                max_ns=max(durations),
                exposed_ns=sum(int(exposed[i]) for i in members),
                bus_bytes_per_s=_bus_bytes_per_s(found[members[0]], min(durations)),
                longest_start_ns=columns.origin_ns + found[longest].start,
            )
        )
    return tuple(sorted(result, key=lambda row: (-row.total_ns, row.name, row.group)))


def _bus_bytes_per_s(call: CollectiveCall, ns: int) -> float | None:
    """Return the bus bandwidth in bytes/s (``PERFORMANCE.md`` of nccl-tests), None where it is unknown."""
    share, ranks = _BUS_SHARES.get(call.name, 0), call.ranks or 0
    return (
        share * (ranks - 1) / ranks * call.bytes * 1e9 / ns if share and call.bytes and ranks > 1 and ns > 0 else None
    )


def _exposed(columns: TraceColumns, device: DeviceEvents, found: list[CollectiveCall]) -> Column:
    starts = np.array([call.start for call in found], np.int64)
    ends = np.array([call.end for call in found], np.int64)
    on_device = np.array([call.on_device for call in found], np.bool_)
    anywhere = device.compute if np.all(on_device) else _computing_anywhere(columns, device)
    hidden = (length_within(when, starts, ends) for when in (device.compute, anywhere))
    exposed: Column = ends - starts - np.where(on_device, *hidden)
    return exposed


def _computing_anywhere(columns: TraceColumns, device: DeviceEvents) -> Intervals:
    """Return the time in which a device computes, or a thread without collectives is inside an operator of torch."""
    communicating = [event.row for event in columns.collectives if event.name.startswith(HOST_BACKENDS)]
    lanes = np.unique(columns.lanes[np.array(communicating, np.int64)])
    rows = columns.rows_named(lambda name: name.startswith("aten::"), Kind.OPERATOR)
    rows = rows[~np.isin(columns.lanes[rows], lanes)]
    starts = np.append(device.compute.starts, columns.starts[rows])
    return union(starts, np.append(device.compute.ends, columns.ends[rows]))
