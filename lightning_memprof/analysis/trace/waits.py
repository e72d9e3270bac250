"""Where the host of a trace waited for the device, and what that cost the device."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_memprof.analysis.trace.calls import WAITS
from lightning_memprof.analysis.trace.columns import Kind, TraceColumns
from lightning_memprof.analysis.trace.device import DeviceEvents
from lightning_memprof.analysis.trace.intervals import Column, Intervals, length_before
from lightning_memprof.analysis.trace.model import Synchronization
from lightning_memprof.analysis.trace.steps import launches, loading_intervals

__all__ = ["synchronizations"]

# The clocks of host and device agree to some microseconds: a gap may seem to begin this much after the wait's end.
_SLACK_NS: Final = 5_000


def synchronizations(columns: TraceColumns, device: DeviceEvents) -> tuple[Synchronization, ...]:
    """Return the waits by what asked for them, those that cost the device most first.

    A wait is a call that returns when the device is done, or a copy from the device to pageable memory.
    """
    rows = _waits(columns, device)
    gaps = Intervals(device.busy.ends[:-1], device.busy.starts[1:])
    places = np.searchsorted(columns.starts[rows], gaps.starts + _SLACK_NS, side="right") - 1
    caused = places >= 0
    if len(rows):
        behind = launches(columns, device.rows[np.searchsorted(columns.starts[device.rows], gaps.ends)])
        # What was launched before the wait began was queued: its gap is not the wait's.
        caused &= (behind >= 0) & (columns.starts[behind] >= columns.starts[rows[places]])
        caused &= columns.ends[rows[places]] + _SLACK_NS >= gaps.starts
    # A batch that is loaded after a wait is waited for without it too.
    loading = loading_intervals(columns)
    lengths = gaps.ends - gaps.starts - (length_before(loading, gaps.ends) - length_before(loading, gaps.starts))
    cost, worst = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    np.add.at(cost, places[caused], lengths[caused])
    np.maximum.at(worst, places[caused], lengths[caused])
    around = _outermost(columns, rows)
    members: dict[str, list[int]] = defaultdict(list)
    for i, (row, operator) in enumerate(zip(rows.tolist(), around.tolist(), strict=True)):
        members[columns.name_of[columns.names[operator if operator >= 0 else row]]].append(i)
    result = []
    for name, mine in members.items():
        chosen = rows[mine]
        longest = mine[
            int(np.argmax(worst[mine] if np.any(worst[mine]) else columns.ends[chosen] - columns.starts[chosen]))
        ]
        asked = np.where(around[mine] >= 0, around[mine], chosen)
        result.append(
            Synchronization(
                name=name,
                count=len(np.unique(asked)),
                total_ns=int((columns.ends[chosen] - columns.starts[chosen]).sum()),
                gap_ns=int(cost[mine].sum()),
                longest_gap_ns=int(worst[mine].max()),
                longest_start_ns=columns.origin_ns + int(columns.starts[rows[longest]]),
            )
        )
    return tuple(sorted(result, key=lambda each: (-each.gap_ns, -each.total_ns, each.name)))


def _waits(columns: TraceColumns, device: DeviceEvents) -> NDArray[np.int64]:
    waits = np.array([WAITS.match(name) is not None for name in columns.name_of] or [False])
    to_host = np.array([name.startswith("Memcpy DtoH") and "Pageable" in name for name in columns.name_of] or [False])
    called = columns.rows(Kind.RUNTIME)
    copied = launches(columns, device.rows[to_host[columns.names[device.rows]]])
    rows = np.unique(np.append(called[waits[columns.names[called]]], copied[copied >= 0]))
    return rows[np.argsort(columns.starts[rows], kind="stable")]


def _outermost(columns: TraceColumns, rows: NDArray[np.int64]) -> Column:
    """Return the row of the outermost operator around each event on its thread, -1 for none."""
    found = np.full(len(rows), -1, np.int64)
    operators = columns.rows(Kind.OPERATOR)
    for lane in np.unique(columns.lanes[rows]).tolist():
        mine = operators[columns.lanes[operators] == lane]
        mine = mine[np.lexsort((-columns.ends[mine], columns.starts[mine]))]
        if not len(mine):
            continue
        reach = np.maximum.accumulate(columns.ends[mine])
        mine = mine[np.append(True, columns.starts[mine][1:] >= reach[:-1])]
        places = np.flatnonzero(columns.lanes[rows] == lane)
        at = np.searchsorted(columns.starts[mine], columns.starts[rows[places]], side="right") - 1
        inside = (at >= 0) & (columns.ends[mine[at]] >= columns.ends[rows[places]])
        found[places[inside]] = mine[at[inside]]
    return found
