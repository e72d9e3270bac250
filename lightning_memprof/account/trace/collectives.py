"""The time in the collectives of a trace: how long each takes, and for how much of it no device computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

import numpy as np

from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.device import DeviceEvents
from lightning_memprof.account.trace.model import CollectiveTotals
from lightning_memprof.read.trace.columns import Kind, TraceColumns
from lightning_memprof.read.trace.communication import HOST_BACKENDS, Collective, CollectiveEvents, plain_name
from lightning_memprof.read.trace.intervals import Column, Intervals, length_within, union

# How often the share (n - 1) / n of the data crosses each link between n ranks.
_BUS_SHARES: Final = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def collective_calls(
    columns: TraceColumns, device: DeviceEvents, events: CollectiveEvents, arrivals: Sequence[Collective]
) -> Iterator[Collective]:
    """Yield the collectives and point-to-point operations of a trace; ``arrivals`` are those that all ranks join."""
    yield from (call for call in arrivals if call.device == "host")
    known = {call.row: call for call in arrivals}
    communicates = device.part == Part.COLLECTIVE.number
    rows, launched = device.rows[communicates], device.launched[communicates]
    for kernel, launch in zip(rows.tolist(), launched.tolist(), strict=True):
        found = known.get(kernel)
        described = (found.name, found.group, found.bytes, found.ranks) if found else None
        if launch >= 0 and (found is None or found.bytes is None):
            lane = columns.lane_of[columns.lanes[launch]]
            described = events.launched(lane, int(columns.starts[launch])) or described
        name, group, size, ranks = described or (plain_name(columns.name(kernel)), "", None, None)
        yield Collective(
            name=name,
            group=group,
            bytes=size,
            start_ns=columns.origin_ns + int(columns.starts[kernel]),
            end_ns=columns.origin_ns + int(columns.ends[kernel]),
            device="cuda",
            row=kernel,
            ranks=ranks,
        )


def host_collectives(columns: TraceColumns) -> Column:
    """Return the rows of collectives of the host: threads of their backend run them."""
    return columns.rows_named(lambda name: name.startswith(HOST_BACKENDS), Kind.ANNOTATION)


def trace_collectives(
    columns: TraceColumns, device: DeviceEvents, found: Sequence[Collective]
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
        durations = [found[i].duration_ns for i in members]
        longest = max(members, key=lambda i: found[i].duration_ns)
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
                longest_start_ns=found[longest].start_ns,
            )
        )
    return tuple(sorted(result, key=lambda row: (-row.total_ns, row.name, row.group)))


def _bus_bytes_per_s(call: Collective, ns: int) -> float | None:
    """Return the bus bandwidth in bytes/s (``PERFORMANCE.md`` of nccl-tests), None where it is unknown."""
    share, ranks = _BUS_SHARES.get(call.name, 0), call.ranks or 0
    return (
        share * (ranks - 1) / ranks * call.bytes * 1e9 / ns if share and call.bytes and ranks > 1 and ns > 0 else None
    )


def _exposed(columns: TraceColumns, device: DeviceEvents, found: Sequence[Collective]) -> Column:
    starts, ends = (
        np.array([getattr(call, end) for call in found], np.int64) - columns.origin_ns for end in ("start_ns", "end_ns")
    )
    on_device = np.array([call.device != "host" for call in found], np.bool_)
    anywhere = device.compute if np.all(on_device) else _computing_anywhere(columns, device)
    hidden = (length_within(when, starts, ends) for when in (device.compute, anywhere))
    exposed: Column = ends - starts - np.where(on_device, *hidden)
    return exposed


def _computing_anywhere(columns: TraceColumns, device: DeviceEvents) -> Intervals:
    """Return the time in which a device computes, or a thread without collectives is inside an operator of torch."""
    lanes = np.unique(columns.lanes[host_collectives(columns)])
    rows = columns.rows_named(lambda name: name.startswith("aten::"), Kind.OPERATOR)
    rows = rows[~np.isin(columns.lanes[rows], lanes)]
    starts = np.append(device.compute.starts, columns.starts[rows])
    return union(starts, np.append(device.compute.ends, columns.ends[rows]))
