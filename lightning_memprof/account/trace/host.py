"""Operators on the host: their self times, and the operators of a typical step without a device."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_memprof.account.ledger.table import NODE
from lightning_memprof.account.trace.device import totals_by
from lightning_memprof.account.trace.events import HostEvents
from lightning_memprof.account.trace.model import HostOperators, Operator
from lightning_memprof.account.trace.spans import Step
from lightning_memprof.read.trace.columns import STEP_NAME, Kind, TraceColumns
from lightning_memprof.read.trace.intervals import Column, innermost_at, nest, nesting_order, outermost

# Finding, checking and calling an operator takes 1 to 10 µs: one that takes no longer computes little.
_SMALL_NS: Final = 10_000
# Python goes from one operator to the next in 1 to 10 µs, through a module with hooks in 50: longer is something else.
_NEAR_NS: Final = 50_000
_LIGHTNING: Final = re.compile(r"\A\[pl\]\[(?:profile|module)\](?:\[\w+\])?")
# The prefix of modules that torch's profiler saw with stacks.
_MODULE: Final = "nn.Module: "
_MOST_NAMES: Final = 5


def operators(columns: TraceColumns, host: HostEvents) -> tuple[Operator, ...]:
    """Return the operators by name, most self time first; all threads count, and may run at once."""
    rows = columns.rows(Kind.OPERATOR)
    durations = columns.ends[rows] - columns.starts[rows]
    callers = host.callers(rows)
    inner = callers >= 0
    self_ns = durations.copy()
    np.subtract.at(self_ns, np.searchsorted(rows, callers[inner]), durations[inner])
    np.maximum(self_ns, 0, out=self_ns)
    alone, whole = totals_by(columns.names[rows], self_ns), totals_by(columns.names[rows], durations)
    result = [
        Operator(
            name=columns.name_of[key],
            count=int(whole.counts[at]),
            self_ns=int(alone.sums[at]),
            total_ns=int(whole.sums[at]),
            max_ns=int(durations[whole.longest[at]]),
        )
        for at, key in enumerate(whole.keys)
    ]
    return tuple(sorted(result, key=lambda operator: (-operator.self_ns, operator.name)))


class _Trail(NamedTuple):
    """One step, divided at its start, at each begin and end of an operator, and at its end.

    Attributes:
        start: of the step in ns after the trace's origin; ``end`` likewise.
        stretches: ns, one more than there are begins and ends of operators.
        inside: whether some operator runs in each stretch.
        innermost: whether the stretch is the whole of an operator that called no other.
        rows: the operators by start.
    """

    start: int
    end: int
    stretches: Column
    inside: NDArray[np.bool_]
    innermost: NDArray[np.bool_]
    rows: Column


def host_operators(columns: TraceColumns, steps: list[Step]) -> HostOperators | None:
    """Return a typical step of the thread with most operators; None where no step has operators.

    Of the steps that call the same operators in the same order, each stretch counts with its lower median: if another
    program on a busy machine interrupts one step, it does not interrupt the next.
    """
    called = columns.rows(Kind.OPERATOR)
    if not len(called) or not steps:
        return None
    lane = int(np.argmax(np.bincount(columns.lanes[called])))
    trails = list(_trails(columns, called[columns.lanes[called] == lane], steps))
    alike: dict[tuple[bytes, bytes], list[int]] = defaultdict(list)
    for place, trail in enumerate(trails):
        if len(trail.rows):
            alike[columns.names[trail.rows].tobytes(), trail.innermost.tobytes()].append(place)
    if not alike:
        return None
    # Where each step calls others, the shortest was interrupted least.
    chosen = max(alike.values(), key=lambda places: (len(places), -min(trails[at].stretches.sum() for at in places)))
    first = trails[chosen[0]]
    typical = np.sort(np.stack([trails[at].stretches for at in chosen]), axis=0)[(len(chosen) - 1) // 2]
    small, near = first.inside & (typical <= _SMALL_NS), ~first.inside & (typical <= _NEAR_NS)
    own = first.innermost if np.any(first.innermost) else first.inside
    if not np.any(own):
        return None
    outer = first.rows[outermost(columns.starts[first.rows], columns.ends[first.rows])]
    recorded = np.flatnonzero(columns.lanes == lane)
    recorded = recorded[(columns.starts[recorded] >= first.start) & (columns.starts[recorded] < first.end)]
    names = Counter(columns.name(row).removeprefix(NODE) for row in outer)
    return HostOperators(
        steps=len(chosen),
        step_ns=int(typical.sum()),
        operators=int(np.count_nonzero(own)),
        median_ns=int(np.median(typical[own])),
        small_ns=int(typical[small].sum()),
        between_ns=int(typical[near].sum()),
        events=len(recorded),
        names=tuple(names.most_common(_MOST_NAMES)),
        places=_places(columns, recorded, outer),
    )


def _trails(columns: TraceColumns, rows: Column, steps: list[Step]) -> Iterator[_Trail]:
    """Yield the steps; where two overlap, which a program does not do, the overlap belongs to the first."""
    rows = rows[nesting_order(columns.starts[rows], columns.ends[rows])]
    starts, reached = columns.starts[rows], steps[0].start
    for step in steps:
        begin = max(step.start, reached)
        if begin < step.end:
            inside = rows[np.searchsorted(starts, begin) : np.searchsorted(starts, step.end)]
            yield _trail(columns, inside[columns.ends[inside] <= step.end], begin, step.end)
            reached = step.end


def _trail(columns: TraceColumns, rows: Column, start: int, end: int) -> _Trail:
    moments = np.concatenate((columns.starts[rows], columns.ends[rows]))
    begins = np.repeat(np.array([1, -1], np.int8), len(rows))
    order = np.lexsort((begins, moments))
    moments, begins = moments[order], begins[order]
    depth = np.cumsum(begins, dtype=np.int64)
    return _Trail(
        start=start,
        end=end,
        stretches=np.diff(np.concatenate(([start], moments, [end]))),
        inside=np.append(False, depth > 0),
        innermost=np.concatenate(([False], (begins[:-1] > 0) & (begins[1:] < 0), [False] * bool(len(begins)))),
        rows=rows,
    )


def _places(columns: TraceColumns, recorded: Column, outer: Column) -> tuple[tuple[str, int], ...]:
    """Count operators by the innermost module, or annotation of the program, around them."""
    modules = columns.named(lambda name: name.startswith(_MODULE))
    steps = columns.named(STEP_NAME.match)
    names, kinds = columns.names[recorded], columns.kinds[recorded]
    rows = recorded[((kinds == Kind.ANNOTATION) & ~steps[names]) | ((kinds == Kind.PYTHON) & modules[names])]
    starts = columns.starts[rows]
    around = innermost_at(nest(starts, columns.ends[rows]), starts, columns.starts[outer])
    found: Counter[str] = Counter()
    for name, count in Counter(columns.names[rows[around[around >= 0]]].tolist()).items():
        found[_LIGHTNING.sub("", columns.name_of[name]).removeprefix(_MODULE)] += count
    return tuple(found.most_common(_MOST_NAMES))
