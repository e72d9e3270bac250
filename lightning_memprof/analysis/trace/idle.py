"""Idle time of the device and its causes: runtime calls, waits of the host, and the gaps in the device's work.

Each gap in the device's work ends with an event, and a call on some thread launched that event. The call, and the
latency of a launch after it, is ``launch``; where the event starts later still, the device waits (``queue``): for
another stream, a copy, or another rank. Before the call, the cause is whatever the thread did then. Where a thread of
autograd had not begun yet, it is whatever the training thread did.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_memprof.analysis.trace.columns import (
    STEP_NAME,
    Kind,
    TraceColumns,
    is_loading,
    launches,
    loading_intervals,
)
from lightning_memprof.analysis.trace.device import DeviceEvents, totals_by
from lightning_memprof.analysis.trace.intervals import (
    Column,
    Intervals,
    difference,
    intersection,
    length_before,
    outermost,
    union,
)
from lightning_memprof.analysis.trace.model import Cause, IdleCause, RuntimeCall, Synchronization

__all__ = ["allocator_spans", "calls", "idle_causes", "synchronizations"]

# Calls that return when the device is done, and calls that get or return memory.
_WAITS: Final = re.compile(r"(?:cuda|hip|cu)\w*Synchronize\w*\Z|(?:cuda|hip)Memcpy(?:WithStream|2D|3D)?\Z")
_ALLOCATES: Final = re.compile(
    r"(?:cuda|hip|cu)(?:Ext)?(?:Host|Mem)?"
    r"(?:Malloc|Free|Alloc|Create|Release|Map|Unmap|AddressReserve|AddressFree)(?!\w*Event)\w*\Z"
)
# An operator that reads a number back to the host: its wait may be inside a copy without a runtime call.
_READS_BACK: Final = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"})
_OF_HOST_MEMORY: Final = re.compile("Host|Managed")
_MOST_SPANS: Final = 10_000
_COLLECTS: Final = re.compile(r"Python GC|<built-in (?:function|method) collect>|gc\.collect", re.IGNORECASE)

_CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
# Where several of them run at once, the first one is the cause.
_FIRST_OF: Final[tuple[Cause, ...]] = (
    "garbage", "data_loading", "synchronization", "allocator", "launch", "operators",
)  # fmt: skip
# A kernel starts 3 to 8 µs after its launch has returned, if nothing keeps it.
_LATENCY_NS: Final = 20_000
# The clocks of host and device agree to some microseconds: a gap may seem to begin this much after the wait's end.
_SLACK_NS: Final = 5_000


def calls(columns: TraceColumns, kind: int) -> tuple[RuntimeCall, ...]:
    """Return the events of a kind by name, longest first."""
    rows = columns.rows(kind)
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


def allocator_spans(columns: TraceColumns) -> tuple[tuple[int, int], ...]:
    """Return start and end (Unix ns) of the calls that get or return device memory; the longest 10,000, by start."""
    rows = columns.rows(Kind.RUNTIME)
    rows = rows[columns.named(_allocates_on_device)[columns.names[rows]]]
    rows = rows[np.argsort(columns.starts[rows] - columns.ends[rows], kind="stable")[:_MOST_SPANS]]
    rows = rows[np.argsort(columns.starts[rows], kind="stable")]
    starts, ends = columns.origin_ns + columns.starts[rows], columns.origin_ns + columns.ends[rows]
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


def _allocates_on_device(call: str) -> bool:
    return _ALLOCATES.match(call) is not None and not _OF_HOST_MEMORY.search(call)


def synchronizations(columns: TraceColumns, device: DeviceEvents) -> tuple[Synchronization, ...]:
    """Return the waits by the operator that made them, those that cost the device most first.

    A wait is a call that returns when the device is done, or a copy from the device to pageable memory.
    """
    rows = _waits(columns, device)
    gaps = Intervals(device.busy.ends[:-1], device.busy.starts[1:])
    places = np.searchsorted(columns.starts[rows], gaps.starts + _SLACK_NS, side="right") - 1
    caused = places >= 0
    if len(rows):
        behind = launches(columns, device.rows[np.searchsorted(columns.starts[device.rows], gaps.ends)])
        # Work launched before the wait began was queued: its gap is not the wait's.
        caused &= (behind >= 0) & (columns.starts[behind] >= columns.starts[rows[places]])
        caused &= columns.ends[rows[places]] + _SLACK_NS >= gaps.starts
    # The host would wait for a batch that is loaded after a wait in any case.
    loading = loading_intervals(columns)
    lengths = gaps.ends - gaps.starts - (length_before(loading, gaps.ends) - length_before(loading, gaps.starts))
    cost, worst = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    np.add.at(cost, places[caused], lengths[caused])
    np.maximum.at(worst, places[caused], lengths[caused])
    around = _operators_around(columns, rows)
    members: dict[str, list[int]] = defaultdict(list)
    for i, (row, operator) in enumerate(zip(rows.tolist(), around.tolist(), strict=True)):
        members[columns.name_of[columns.names[operator if operator >= 0 else row]]].append(i)
    result = []
    for name, mine in members.items():
        chosen = rows[mine]
        durations = columns.ends[chosen] - columns.starts[chosen]
        longest = rows[mine[int(np.argmax(worst[mine] if np.any(worst[mine]) else durations))]]
        result.append(
            Synchronization(
                name=name,
                count=len(np.unique(np.where(around[mine] >= 0, around[mine], chosen))),
                total_ns=int(durations.sum()),
                gap_ns=int(cost[mine].sum()),
                longest_gap_ns=int(worst[mine].max()),
                longest_start_ns=columns.origin_ns + int(columns.starts[longest]),
            )
        )
    return tuple(sorted(result, key=lambda wait: (-wait.gap_ns, -wait.total_ns, wait.name)))


def _waits(columns: TraceColumns, device: DeviceEvents) -> NDArray[np.int64]:
    waits = columns.named(_WAITS.match)
    to_host = columns.named(lambda name: name.startswith("Memcpy DtoH") and "Pageable" in name)
    called = columns.rows(Kind.RUNTIME)
    copied = launches(columns, device.rows[to_host[columns.names[device.rows]]])
    rows = np.unique(np.append(called[waits[columns.names[called]]], copied[copied >= 0]))
    return rows[np.argsort(columns.starts[rows], kind="stable")]


def _operators_around(columns: TraceColumns, rows: NDArray[np.int64]) -> Column:
    """Return the row of the outermost operator around each event on its thread, -1 for none."""
    found = np.full(len(rows), -1, np.int64)
    operators = columns.rows(Kind.OPERATOR)
    for lane in np.unique(columns.lanes[rows]).tolist():
        mine = operators[columns.lanes[operators] == lane]
        mine = mine[outermost(columns.starts[mine], columns.ends[mine])]
        if not len(mine):
            continue
        places = np.flatnonzero(columns.lanes[rows] == lane)
        at = np.searchsorted(columns.starts[mine], columns.starts[rows[places]], side="right") - 1
        inside = (at >= 0) & (columns.ends[mine[at]] >= columns.ends[rows[places]])
        found[places[inside]] = mine[at[inside]]
    return found


def idle_causes(columns: TraceColumns, device: DeviceEvents) -> tuple[IdleCause, ...]:
    """Return the causes, longest first; they add up to the idle time of the GPU window."""
    if len(device.busy.starts) < 2:
        return ()
    gaps = Intervals(device.busy.ends[:-1], device.busy.starts[1:])
    first_behind = device.rows[np.searchsorted(columns.starts[device.rows], gaps.ends)]
    launched = launches(columns, first_behind)
    known = launched >= 0
    moments = np.clip(np.where(known, columns.starts[launched], gaps.ends), gaps.starts, gaps.ends)
    tally = _Tally(columns, gaps)
    started = np.clip(np.where(known, columns.ends[launched] + _LATENCY_NS, gaps.ends), moments, gaps.ends)
    tally.add("launch", Intervals(moments[known], started[known]), launched[known])
    tally.add("queue", Intervals(started[known], gaps.ends[known]), first_behind[known])
    threads = _Threads(columns)
    lanes = np.where(known, columns.lanes[launched], threads.training)
    for lane in np.unique(lanes).tolist():
        mine = lanes == lane
        left = Intervals(gaps.starts[mine], moments[mine])
        left = Intervals(*(column[left.ends > left.starts] for column in left))
        for thread in dict.fromkeys((lane, threads.training)):
            for cause, when, rows in threads.causes(thread):
                tally.add(cause, intersection(left, when), rows)
                left = difference(left, when)
        tally.add("python", left, threads.ranges(threads.training))
    return tally.causes()


class _Threads:
    """The activity of each thread, by the rows of its events."""

    def __init__(self, columns: TraceColumns) -> None:
        self._columns = columns
        self._codes = _codes(columns)
        runtime = columns.rows(Kind.RUNTIME)
        steps = columns.rows(Kind.ANNOTATION)
        is_step = columns.named(STEP_NAME.match)
        steps = steps[is_step[columns.names[steps]]]
        chosen = columns.lanes[steps if len(steps) else runtime]
        self.training = int(np.argmax(np.bincount(chosen))) if len(chosen) else -1
        self._plain = ~is_step

    def causes(self, lane: int) -> list[tuple[Cause, Intervals, Column]]:
        """Return the causes that a thread shows, with their times and rows, in the order of `_FIRST_OF`."""
        found = []
        columns = self._columns
        rows = np.flatnonzero(columns.lanes == lane)
        for number, cause in enumerate(_FIRST_OF):
            chosen = rows[self._codes[rows] == number]
            if len(chosen):
                found.append((cause, union(columns.starts[chosen], columns.ends[chosen]), chosen))
        return found

    def ranges(self, lane: int) -> Column:
        """Return the rows of the thread's annotations, except steps."""
        columns = self._columns
        rows = np.flatnonzero((columns.lanes == lane) & (columns.kinds == Kind.ANNOTATION))
        plain: Column = rows[self._plain[columns.names[rows]]]
        return plain


class _Tally:
    """Idle time by cause, for each gap and for each name."""

    def __init__(self, columns: TraceColumns, gaps: Intervals) -> None:
        self._columns, self._gaps = columns, gaps
        self._by_gap: dict[Cause, Column] = {cause: np.zeros(len(gaps.starts), np.int64) for cause in _CAUSES}
        self._by_name: dict[Cause, Counter[int]] = {cause: Counter() for cause in _CAUSES}

    def add(self, cause: Cause, when: Intervals, rows: Column) -> None:
        """Add times within the gaps; the events at `rows` ran then."""
        kept = when.ends > when.starts
        when = Intervals(when.starts[kept], when.ends[kept])
        if not len(when.starts):
            return
        gap = np.searchsorted(self._gaps.starts, when.starts, side="right") - 1
        np.add.at(self._by_gap[cause], gap, when.ends - when.starts)
        columns = self._columns
        shares = length_before(when, columns.ends[rows]) - length_before(when, columns.starts[rows])
        names, places = np.unique(columns.names[rows], return_inverse=True)
        sums = np.zeros(len(names), np.int64)
        np.add.at(sums, places, shares)
        for name, share in zip(names.tolist(), sums.tolist(), strict=True):
            if share > 0:
                self._by_name[cause][name] += share

    def causes(self) -> tuple[IdleCause, ...]:
        """Return the sums, longest first."""
        found = []
        for cause, by_gap in self._by_gap.items():
            total = int(by_gap.sum())
            if not total:
                continue
            names = self._by_name[cause].most_common(1)
            found.append(
                IdleCause(
                    cause=cause,
                    total_ns=total,
                    count=int(np.count_nonzero(by_gap)),
                    longest_ns=int(by_gap.max()),
                    example=self._columns.name_of[names[0][0]] if names else "",
                    longest_start_ns=self._columns.origin_ns + int(self._gaps.starts[np.argmax(by_gap)]),
                )
            )
        return tuple(sorted(found, key=lambda row: (-row.total_ns, row.cause)))


def _codes(columns: TraceColumns) -> NDArray[np.int8]:
    """Return the cause that each event on the host shows, by its place in `_FIRST_OF`; -1 for none."""
    number = {cause: place for place, cause in enumerate(_FIRST_OF)}
    names = columns.name_of or ("",)
    by_kind = {
        Kind.RUNTIME: [number[_runtime_cause(name)] for name in names],
        Kind.OPERATOR: [number["synchronization" if name in _READS_BACK else "operators"] for name in names],
        Kind.ANNOTATION: [number["data_loading"] if is_loading(name) else -1 for name in names],
    }
    codes = np.full(len(columns.names), -1, np.int8)
    for kind, of_name in by_kind.items():
        rows = columns.rows(kind)
        codes[rows] = np.array(of_name, np.int8)[columns.names[rows]]
    codes[columns.named(_COLLECTS.search)[columns.names] & (columns.kinds >= Kind.OPERATOR)] = number["garbage"]
    return codes


def _runtime_cause(call: str) -> Cause:
    if _WAITS.match(call):
        return "synchronization"
    return "allocator" if _ALLOCATES.match(call) else "launch"
