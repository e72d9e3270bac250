"""Idle time of the device and its causes: runtime calls, waits of the host, and the gaps in the device's work.

Each gap in the device's work ends with an event, and a call on some thread launched that event. The call, and the
latency of a launch after it, is a launch; where the event starts later still, the event is queued: it waits for
another stream, a copy, or another rank. Before the call, the cause is whatever the thread did then. Where a thread of
autograd had not begun yet, it is whatever the training thread did.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.device import LATENCY_NS, DeviceEvents, totals_by
from lightning_memprof.account.trace.events import HostEvents
from lightning_memprof.account.trace.model import RuntimeCall, Synchronization
from lightning_memprof.account.trace.spans import loading_intervals
from lightning_memprof.read.trace.columns import Kind, TraceColumns
from lightning_memprof.read.trace.intervals import (
    Column,
    Intervals,
    length_within,
    union,
)

# Calls that return when the device is done, and calls that get or return memory.
_WAITS: Final = re.compile(r"(?:cuda|hip|cu)\w*Synchronize\w*\Z|(?:cuda|hip)Memcpy(?:WithStream|2D|3D)?\Z")
_ALLOCATES: Final = re.compile(
    r"(?:cuda|hip|cu)(?:Ext)?(?:Host|Mem)?"
    r"(?:Malloc|Free|Alloc|Create|Release|Map|Unmap|AddressReserve|AddressFree)(?!\w*Event)\w*\Z"
)
_GRAPHS: Final = re.compile(r"(?:cuda|hip|cu)GraphLaunch\w*\Z")
_BEGINS_CAPTURE: Final = re.compile(r"(?:cuda|hip|cu)(?:Thread)?StreamBeginCapture")
_ENDS_CAPTURE: Final = re.compile(r"(?:cuda|hip|cu)(?:StreamEndCapture|GraphInstantiate)")
_MAKES_GRAPH: Final = re.compile("GraphInstantiate")
_LOADS: Final = re.compile(r"(?:cu|hip)(?:Module|Library)(?:Load|Unload|Get(?!LoadingMode)|Enumerate)\w*\Z")
_WORKS: Final = re.compile("Launch|Memcpy|Memset")
_ASKS: Final = re.compile("Get|Query|Synchroni[sz]e|Create|Destroy|Init|SetDevice", re.IGNORECASE)
LOADING: Final = frozenset({"Lazy Function Loading", "Runtime Triggered Module Loading", "Driver Compiler"})
"""Events of the category ``overhead`` in which the driver loads code for the program."""
# An operator that reads a number back to the host: its wait may be inside a copy without a runtime call.
READS_BACK: Final = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"})
_OF_HOST_MEMORY: Final = re.compile("Host|Managed")
_MOST_SPANS: Final = 10_000
# A wait where the device is done: a copy of one value to the host and its end.
_READ_NS: Final = 20_000
COLLECTS: Final = re.compile(r"Python GC|<built-in (?:function|method) collect>|gc\.collect", re.IGNORECASE)

# Work of torch's compiler: tracing, code generation, tuning, recording of CUDA graphs.
COMPILES: Final = "(dynamo_timed)"
# A first call this long, and this many times as long as the later ones, initialises something.
_COLD_NS: Final = 1_000_000
_COLD_FACTOR: Final = 10
# The first two steps may each compile a program of their own: sizes of tensors become variables in the second.
_FEW_STEPS: Final = 4

# The clocks of host and device agree to some microseconds: a gap may seem to begin this much after the wait's end.
_SLACK_NS: Final = 5_000


def calls(columns: TraceColumns, rows: Column) -> tuple[RuntimeCall, ...]:
    """Return events by name, longest first."""
    found = totals_by(columns.names[rows], columns.ends[rows] - columns.starts[rows])
    result = []
    for key, count, total, longest in zip(found.keys, found.counts, found.sums, rows[found.longest], strict=True):
        result.append(
            RuntimeCall(
                name=columns.name_of[key],
                count=int(count),
                total_ns=int(total),
                max_ns=int(columns.ends[longest] - columns.starts[longest]),
                longest_start_ns=columns.origin_ns + int(columns.starts[longest]),
            )
        )
    return tuple(sorted(result, key=lambda call: (-call.total_ns, call.name)))


def cold_calls(columns: TraceColumns, device: DeviceEvents, ranges: Sequence[tuple[int, int]]) -> Column:
    """Return the rows of the calls and operators that initialise something.

    They begin in the first step or before it, and take much longer than later ones of their name; or they get memory,
    and later steps hardly do. A wait for the device is none. The compiler's work is one in any step, if not in most.
    """
    end = ranges[0][1]
    waits = columns.named(lambda name: name in READS_BACK or call_part(name) == Part.IDLE_SYNCHRONIZATION)
    called = np.isin(columns.kinds, (Kind.RUNTIME, Kind.OPERATOR)) & ~waits[columns.names]
    durations = columns.ends - columns.starts
    candidates = np.flatnonzero(called & (columns.starts < end) & (durations >= _COLD_NS))
    found = [_first_allocations(columns, ranges), _compilations(columns, ranges)]
    for name in np.unique(columns.names[candidates]).tolist():
        mine = np.flatnonzero(called & (columns.names == name))
        later = mine[columns.starts[mine] >= end]
        rows = candidates[columns.names[candidates] == name]
        if len(mine) > 1:
            usual = np.median(durations[later if len(later) else mine])
            cold = rows[durations[rows] >= _COLD_FACTOR * usual]
        else:
            cold = rows[(columns.kinds[rows] == Kind.RUNTIME) & (columns.starts[rows] < columns.starts[device.rows[0]])]
        # A kernel's first launch loads it; an operator starts its library once.
        of_call = columns.kinds[cold] == Kind.RUNTIME
        found += [cold[of_call], cold[~of_call & (columns.starts[cold] == np.min(columns.starts[mine]))]]
    return np.unique(np.concatenate(found))


def _compilations(columns: TraceColumns, ranges: Sequence[tuple[int, int]]) -> Column:
    rows = np.flatnonzero(columns.named(_compiles)[columns.names])
    return rows if _is_rare(columns, rows, ranges) else rows[:0]


def _is_rare(columns: TraceColumns, rows: Column, ranges: Sequence[tuple[int, int]]) -> bool:
    """Return whether at most half of the steps have one of these events, or there are too few steps to tell."""
    steps = np.unique(np.searchsorted([start for start, _ in ranges], columns.starts[rows], side="right"))
    return len(ranges) < _FEW_STEPS or 2 * len(steps) <= len(ranges)


def _compiles(name: str) -> bool:
    return name.endswith(COMPILES)


def _first_allocations(columns: TraceColumns, ranges: Sequence[tuple[int, int]]) -> Column:
    rows = _device_allocations(columns)
    first = rows[columns.starts[rows] < ranges[0][1]]
    later = np.count_nonzero(columns.starts[rows] < ranges[-1][1]) - len(first)
    return first if len(ranges) > 1 and later * _COLD_FACTOR <= len(first) * (len(ranges) - 1) else first[:0]


def _device_allocations(columns: TraceColumns) -> Column:
    return columns.rows_named(_allocates_on_device, Kind.RUNTIME)


def steady_allocations(
    columns: TraceColumns, ranges: Sequence[tuple[int, int]], cold: Column
) -> tuple[RuntimeCall, ...]:
    """Return the calls that get or return device memory within the steps, without those of a cold start."""
    rows = _device_allocations(columns)
    rows = rows[(columns.starts[rows] >= ranges[0][0]) & (columns.starts[rows] < ranges[-1][1])]
    return calls(columns, rows[~np.isin(rows, cold)])


def allocator_spans(columns: TraceColumns) -> tuple[tuple[int, int], ...]:
    """Return start and end (Unix ns) of the calls that get or return device memory; the longest 10,000, by start."""
    rows = _device_allocations(columns)
    rows = rows[np.argsort(columns.starts[rows] - columns.ends[rows], kind="stable")[:_MOST_SPANS]]
    rows = rows[np.argsort(columns.starts[rows], kind="stable")]
    starts, ends = columns.origin_ns + columns.starts[rows], columns.origin_ns + columns.ends[rows]
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


def _allocates_on_device(call: str) -> bool:
    return _ALLOCATES.match(call) is not None and not _OF_HOST_MEMORY.search(call)


def synchronizations(columns: TraceColumns, device: DeviceEvents, host: HostEvents) -> tuple[Synchronization, ...]:
    """Return the waits by the operator that made them, those that cost the device most first.

    A wait is a call that returns when the device is done, or a copy from the device to pageable memory.
    """
    rows = _waits(columns, device)
    gaps = Intervals(device.busy.ends[:-1], device.busy.starts[1:])
    places = np.searchsorted(columns.starts[rows], gaps.starts + _SLACK_NS, side="right") - 1
    caused = places >= 0
    if len(rows):
        behind = device.launched[np.searchsorted(columns.starts[device.rows], gaps.ends)]
        # Work launched before the wait began was queued: its gap is not the wait's.
        caused &= (behind >= 0) & (columns.starts[behind] >= columns.starts[rows[places]])
        caused &= columns.ends[rows[places]] + _SLACK_NS >= gaps.starts
    # The host would wait for a batch that is loaded after a wait in any case.
    others = union(*map(np.append, loading_intervals(columns), device.unrecorded))
    lengths = gaps.ends - gaps.starts - length_within(others, gaps.starts, gaps.ends)
    cost, worst = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    np.add.at(cost, places[caused], lengths[caused])
    np.maximum.at(worst, places[caused], lengths[caused])
    durations = columns.ends[rows] - columns.starts[rows]
    busy = length_within(device.busy, columns.starts[rows], columns.ends[rows])
    own = _hidden(np.maximum(busy, np.minimum(durations, _READ_NS)), cost)
    around = host.outermost_operators(rows)
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


def _waits(columns: TraceColumns, device: DeviceEvents) -> NDArray[np.int64]:
    to_host = columns.named(lambda name: name.startswith("Memcpy DtoH") and "Pageable" in name)
    copied = device.launched[to_host[columns.names[device.rows]]]
    rows = np.unique(np.append(columns.rows_named(_WAITS.match, Kind.RUNTIME), copied[copied >= 0]))
    return rows[np.argsort(columns.starts[rows], kind="stable")]


class GapEnds(NamedTuple):
    """How the gaps in a device's work end: each with an event, and a call launched that event.

    Attributes:
        events: ``(n,)`` rows of the first device events behind the gaps, -1 for none.
        calls: ``(n,)`` rows of the calls that launched them, -1 where the trace does not have it.
        called: ``(n,)`` start of the call, within the gap; the gap's end where the call is unknown.
        ready: ``(n,)`` when the event could have started; from then to the gap's end it was queued.
    """

    events: Column
    calls: Column
    called: Column
    ready: Column


def gap_ends(columns: TraceColumns, device: DeviceEvents, gaps: Intervals) -> GapEnds:
    """Return the end of each gap."""
    at = np.searchsorted(columns.starts[device.rows], gaps.ends)
    events = np.append(device.rows, -1)[at]
    launched = np.append(device.launched, -1)[at]
    known = launched >= 0
    called = np.clip(np.where(known, columns.starts[launched], gaps.ends), gaps.starts, gaps.ends)
    ready = np.clip(np.where(known, columns.ends[launched] + LATENCY_NS, gaps.ends), called, gaps.ends)
    return GapEnds(events, launched, called, ready)


def graph_captures(
    columns: TraceColumns, gaps: Intervals, ranges: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """Return the recordings of graphs of kernels: the row of a call of each, its start, and when the graph is made.

    Calls that launch work are recorded meanwhile, and nothing runs. One without a recorded begin has the whole gap in
    the device's work before it. Recordings in most steps are part of the steps, and left out.
    """
    begins = columns.rows_named(_BEGINS_CAPTURE.search, Kind.RUNTIME)
    ends = columns.rows_named(_ENDS_CAPTURE.search, Kind.RUNTIME)
    rows = np.append(begins, ends)
    if not _is_rare(columns, rows, ranges):
        return []
    rows = rows[np.argsort(columns.starts[rows], kind="stable")]
    found: list[tuple[int, int, int]] = []
    is_open = False
    for row, is_end in zip(rows.tolist(), np.isin(rows, ends).tolist(), strict=True):
        start, end, makes = int(columns.starts[row]), int(columns.ends[row]), _MAKES_GRAPH.search(columns.name(row))
        if not is_end:
            found.append((row, start, end))
        elif is_open:
            found[-1] = (*found[-1][:2], end)
        elif makes:
            at = int(np.searchsorted(gaps.starts, start, side="right")) - 1
            found.append((row, int(gaps.starts[at]) if at >= 0 else start, end))
        is_open = not is_end or (is_open and not makes)
    return found


def call_part(call: str) -> Part:
    """Return what a device waits for while the host is in a call of the driver or its runtime."""
    if _WAITS.match(call):
        return Part.IDLE_SYNCHRONIZATION
    if _ALLOCATES.match(call):
        return Part.IDLE_ALLOCATOR
    if _GRAPHS.match(call):
        return Part.IDLE_GRAPH
    return Part.IDLE_LOADING if _LOADS.match(call) else Part.IDLE_LAUNCH


def gives_work(call: str) -> bool:
    """Return whether a call gives a device something to do; a program of the CPU may ask for properties of a GPU."""
    return bool(_WORKS.search(call) if call.startswith(("cu", "hip")) else not _ASKS.search(call))
