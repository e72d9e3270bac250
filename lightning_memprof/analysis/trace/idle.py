"""Why the device was idle: what the thread did that launched what came next.

Each gap in the device's work ends with an event, and that event was launched by a call on some thread. The call, and
what a launch takes behind it, is ``launch``; where the event starts later than that, it is the device that waits
(``queue``): for another stream, a copy, or another rank. Before the call the thread was doing something else. Where a
thread of autograd had not begun yet, the training thread tells what held it up.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_memprof.analysis.trace.calls import ALLOCATES, READS_BACK, WAITS
from lightning_memprof.analysis.trace.columns import Kind, TraceColumns
from lightning_memprof.analysis.trace.device import DeviceEvents
from lightning_memprof.analysis.trace.intervals import (
    Column,
    Intervals,
    difference,
    intersection,
    length_before,
    union,
)
from lightning_memprof.analysis.trace.model import Cause, IdleCause
from lightning_memprof.analysis.trace.steps import STEP_NAME, is_loading, launches

__all__ = ["idle_causes"]

_COLLECTS: Final = re.compile(r"Python GC|<built-in (?:function|method) collect>|gc\.collect", re.IGNORECASE)

_CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
# A kernel starts 3 to 8 us after its launch has returned, if nothing keeps it.
_LATENCY_NS: Final = 20_000
# Where several are going on at once, the first of them is what the thread did.
_FIRST_OF: Final[tuple[Cause, ...]] = (
    "garbage", "data_loading", "synchronization", "allocator", "launch", "operators",
)  # fmt: skip


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
            for cause, when, rows in threads.doing(thread):
                tally.add(cause, intersection(left, when), rows)
                left = difference(left, when)
        tally.add("python", left, threads.ranges(threads.training))
    return tally.causes()


class _Threads:
    """What each thread did, by the rows of its events."""

    def __init__(self, columns: TraceColumns) -> None:
        self._columns = columns
        self._codes = _codes(columns)
        calls = columns.rows(Kind.RUNTIME)
        steps = columns.rows(Kind.ANNOTATION)
        is_step = np.array([STEP_NAME.match(name) is not None for name in columns.name_of] or [False])
        steps = steps[is_step[columns.names[steps]]]
        chosen = columns.lanes[steps if len(steps) else calls]
        self.training = int(np.argmax(np.bincount(chosen))) if len(chosen) else -1
        self._plain = ~is_step

    def doing(self, lane: int) -> list[tuple[Cause, Intervals, Column]]:
        """Return what the thread did by cause, the first ones first."""
        found = []
        columns = self._columns
        rows = np.flatnonzero(columns.lanes == lane)
        for number, cause in enumerate(_FIRST_OF):
            chosen = rows[self._codes[rows] == number]
            if len(chosen):
                found.append((cause, union(columns.starts[chosen], columns.ends[chosen]), chosen))
        return found

    def ranges(self, lane: int) -> Column:
        """Return what the program itself has named on the thread, its steps aside."""
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
        """Add times within the gaps, during which the events at `rows` tell what was done."""
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
        """Return what was added, longest first."""
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
        return tuple(sorted(found, key=lambda each: (-each.total_ns, each.cause)))


def _codes(columns: TraceColumns) -> NDArray[np.int8]:
    """Number what each event on the host says its thread does, as `_FIRST_OF` does; -1 for nothing."""
    number = {cause: place for place, cause in enumerate(_FIRST_OF)}
    names = columns.name_of or ("",)
    by_call = [_call(name) for name in names]
    by_kind = {
        Kind.RUNTIME: [number[cause] for cause in by_call],
        Kind.OPERATOR: [number["synchronization" if name in READS_BACK else "operators"] for name in names],
        Kind.ANNOTATION: [number["data_loading"] if is_loading(name) else -1 for name in names],
    }
    collects = np.array([_COLLECTS.search(name) is not None for name in names])
    codes = np.full(len(columns.names), -1, np.int8)
    for kind, of_name in by_kind.items():
        rows = columns.rows(kind)
        codes[rows] = np.array(of_name, np.int8)[columns.names[rows]]
    codes[collects[columns.names] & (columns.kinds >= Kind.OPERATOR)] = number["garbage"]
    return codes


def _call(name: str) -> Cause:
    if WAITS.match(name):
        return "synchronization"
    return "allocator" if ALLOCATES.match(name) else "launch"
