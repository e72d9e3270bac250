"""The host's events of a trace by name: operators, calls of the device's runtime, and waits for the device."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.cold import device_allocations
from lightning_memprof.account.trace.device import totals_by
from lightning_memprof.account.trace.events import HostEvents
from lightning_memprof.account.trace.model import Operator, RuntimeCall, Synchronization
from lightning_memprof.account.trace.table import EventTable
from lightning_memprof.read.trace.columns import Kind, TraceColumns
from lightning_memprof.read.trace.intervals import Column, Intervals, length_within, union

_WORKS: Final = re.compile("Launch|Memcpy|Memset")
_ASKS: Final = re.compile("Get|Query|Synchroni[sz]e|Create|Destroy|Init|SetDevice", re.IGNORECASE)
# A wait where the device is done: a copy of one value to the host and its end.
_READ_NS: Final = 20_000
# The clocks of host and device agree to some microseconds: a gap may seem to begin this much after the wait's end.
_SLACK_NS: Final = 5_000


def operators(columns: TraceColumns, host: HostEvents) -> tuple[Operator, ...]:
    """Return the operators by name, most self time first; all threads count, and may run at once."""
    rows, durations = columns.rows(Kind.OPERATOR), columns.ends - columns.starts
    self_ns = durations.copy()
    for lane in np.unique(columns.lanes[rows]).tolist():
        own, parents, _ = host.thread(lane)
        callers = np.where(parents >= 0, host.operator[own[parents]], -1)
        called = (callers >= 0) & (columns.kinds[own] == Kind.OPERATOR)
        np.subtract.at(self_ns, callers[called], durations[own[called]])
    names, self_ns, durations = columns.names[rows], np.maximum(self_ns[rows], 0), durations[rows]
    found = (
        Operator(
            name=columns.name_of[whole.key],
            count=whole.calls,
            self_ns=alone.ns,
            total_ns=whole.ns,
            max_ns=whole.max_ns,
        )
        for alone, whole in zip(*(totals_by(names, ns) for ns in (self_ns, durations)), strict=True)
    )
    return tuple(sorted(found, key=lambda operator: (-operator.self_ns, operator.name)))


def calls(columns: TraceColumns, rows: Column) -> tuple[RuntimeCall, ...]:
    """Return events by name, longest first."""
    found = (
        RuntimeCall(
            name=columns.name_of[total.key],
            count=total.calls,
            total_ns=total.ns,
            max_ns=total.max_ns,
            longest_start_ns=columns.origin_ns + int(columns.starts[rows[total.longest]]),
        )
        for total in totals_by(columns.names[rows], columns.ends[rows] - columns.starts[rows])
    )
    return tuple(sorted(found, key=lambda call: (-call.total_ns, call.name)))


def steady_allocations(table: EventTable) -> tuple[RuntimeCall, ...]:
    """Return the calls that get or return device memory within the steps, without those of a cold start."""
    columns, ranges = table.columns, table.ranges
    rows = device_allocations(columns, table.part)
    rows = rows[(columns.starts[rows] >= ranges[0].start) & (columns.starts[rows] < ranges[-1].end)]
    return calls(columns, rows[~np.isin(rows, table.cold)])


def synchronizations(table: EventTable) -> tuple[Synchronization, ...]:
    """Return the waits by the operator that made them, those that cost the device most first.

    A wait is a call that returns when the device is done, or a copy from the device to pageable memory.
    """
    columns, device, rows = table.columns, table.device, _waits(table)
    gaps = Intervals(device.busy.ends[:-1], device.busy.starts[1:])
    places = np.searchsorted(columns.starts[rows], gaps.starts + _SLACK_NS, side="right") - 1
    caused = places >= 0
    if len(rows):
        behind = device.launched[np.searchsorted(columns.starts[device.rows], gaps.ends)]
        # Work launched before the wait began was queued: its gap is not the wait's.
        caused &= (behind >= 0) & (columns.starts[behind] >= columns.starts[rows[places]])
        caused &= columns.ends[rows[places]] + _SLACK_NS >= gaps.starts
    # The host would wait for a batch that is loaded after a wait in any case.
    others = union(*map(np.append, table.loading, device.unrecorded))
    lengths = gaps.ends - gaps.starts - length_within(others, gaps.starts, gaps.ends)
    cost, worst = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    np.add.at(cost, places[caused], lengths[caused])
    np.maximum.at(worst, places[caused], lengths[caused])
    durations = columns.ends[rows] - columns.starts[rows]
    busy = length_within(device.busy, columns.starts[rows], columns.ends[rows])
    own = _hidden(np.maximum(busy, np.minimum(durations, _READ_NS)), cost)
    around = table.host.outermost_operators(rows)
    members: dict[str, list[int]] = defaultdict(list)
    for i, (row, operator) in enumerate(zip(rows.tolist(), around.tolist(), strict=True)):
        members[columns.name_of[columns.names[operator if operator >= 0 else row]]].append(i)
    result = []
    for name, mine in members.items():
        longest = rows[mine[int(np.argmax(worst[mine] if np.any(worst[mine]) else durations[mine]))]]
        result.append(
            Synchronization(
                name=name,
                count=len(np.unique(np.where(around[mine] >= 0, around[mine], rows[mine]))),
                total_ns=int(durations[mine].sum()),
                gap_ns=int(cost[mine].sum()),
                longest_gap_ns=int(worst[mine].max()),
                longest_start_ns=columns.origin_ns + int(columns.starts[longest]),
                busy_ns=int(busy[mine].sum()),
                own_ns=int(own[mine].sum()),
            )
        )
    return tuple(sorted(result, key=lambda wait: (-wait.gap_ns, -wait.total_ns, wait.name)))


def _hidden(saved: Column, gaps: Column) -> Column:
    """Return the part of the gap after each wait that work queued ahead would hide if no wait held the host.

    Without a wait the host is ahead by the time that it saves there, and by the rest of its lead from before.

    Args:
        saved: ``(n,)`` ns that the host would save at each wait, by start.
        gaps: ``(n,)`` ns that the device is idle after each.
    """
    change = np.cumsum(saved - gaps)
    lead = change - np.minimum(np.minimum.accumulate(change), 0)
    hidden: Column = np.append(0, lead)[:-1] + saved - lead
    return hidden


def _waits(table: EventTable) -> NDArray[np.int64]:
    columns, device = table.columns, table.device
    to_host = columns.named(lambda name: name.startswith("Memcpy DtoH") and "Pageable" in name)
    copied = device.launched[to_host[columns.names[device.rows]]]
    waits = (table.part == Part.IDLE_SYNCHRONIZATION.number) & (columns.kinds == Kind.RUNTIME)
    rows = np.unique(np.append(np.flatnonzero(waits), copied[copied >= 0]))
    return rows[np.argsort(columns.starts[rows], kind="stable")]


def gives_work(call: str) -> bool:
    """Return whether a call gives a device something to do; a program of the CPU may ask for properties of a GPU."""
    return bool(_WORKS.search(call) if call.startswith(("cu", "hip")) else not _ASKS.search(call))
