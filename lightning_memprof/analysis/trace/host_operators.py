"""Of what operators a step of a trace is made on the host, and how much of it passes in calling them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_memprof.analysis.trace.columns import Kind, TraceColumns
from lightning_memprof.analysis.trace.intervals import Column
from lightning_memprof.analysis.trace.model import HostOperators
from lightning_memprof.analysis.trace.steps import STEP_NAME, Step

__all__ = ["host_operators"]

# To find, check and call an operator takes 1 to 10 us: in one that takes no longer, little is computed.
_SMALL_NS: Final = 10_000
# Python goes from one operator to the next in 1 to 10 us, through a module with hooks in 50: longer is something else.
_NEAR_NS: Final = 50_000
# torch names the call of each backward function so, and the function again inside it.
_BACKWARD: Final = "autograd::engine::evaluate_function: "
_LIGHTNING: Final = re.compile(r"\A\[pl\]\[(?:profile|module)\](?:\[\w+\])?")
# What torch's profiler calls the modules that it saw with stacks.
_MODULE: Final = "nn.Module: "
_MOST_NAMES: Final = 5


class _Trail(NamedTuple):
    """One step as the stretches between its moments: its start, operators that begin or end, and its end.

    ``stretches`` are ns, one more than there are moments of operators; ``inside`` says in which some operator ran, and
    ``innermost`` which are all of an operator that called no other. ``rows`` are the operators by start.
    """

    start: int
    end: int
    stretches: Column
    inside: NDArray[np.bool_]
    innermost: NDArray[np.bool_]
    rows: Column


def host_operators(columns: TraceColumns, steps: list[Step]) -> HostOperators | None:
    """Return what the thread with most operators does in a typical step; None where no step has operators.

    Of the steps that call the same operators in the same order each stretch counts with its lower median: where another
    program on a busy machine interrupts one step, it does not interrupt the next.
    """
    operators = columns.rows(Kind.OPERATOR)
    if not len(operators) or not steps:
        return None
    lane = int(np.argmax(np.bincount(columns.lanes[operators])))
    trails = list(_trails(columns, operators[columns.lanes[operators] == lane], steps))
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
    outermost = _outermost(columns, first.rows)
    recorded = np.flatnonzero(columns.lanes == lane)
    recorded = recorded[(columns.starts[recorded] >= first.start) & (columns.starts[recorded] < first.end)]
    called = [columns.name_of[name].removeprefix(_BACKWARD) for name in columns.names[outermost].tolist()]
    return HostOperators(
        steps=len(chosen),
        step_ns=int(typical.sum()),
        operators=int(np.count_nonzero(own)),
        median_ns=int(np.median(typical[own])),
        small_ns=int(typical[small].sum()),
        between_ns=int(typical[near].sum()),
        events=len(recorded),
        names=tuple(Counter(called).most_common(_MOST_NAMES)),
        places=_places(columns, recorded, outermost),
    )


def _trails(columns: TraceColumns, operators: Column, steps: list[Step]) -> Iterator[_Trail]:
    """Yield the steps; what two of them have in common, which is no program's doing, belongs to the first."""
    operators = operators[np.lexsort((-columns.ends[operators], columns.starts[operators]))]
    starts, reached = columns.starts[operators], steps[0].start
    for step in steps:
        begin = max(step.start, reached)
        if begin < step.end:
            rows = operators[np.searchsorted(starts, begin) : np.searchsorted(starts, step.end)]
            yield _trail(columns, rows[columns.ends[rows] <= step.end], begin, step.end)
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


def _outermost(columns: TraceColumns, rows: Column) -> Column:
    """Return those of the operators, sorted by start, that run in no other."""
    reach = np.maximum.accumulate(columns.ends[rows])
    outermost: Column = rows[np.append(True, columns.starts[rows][1:] >= reach[:-1])]
    return outermost


def _places(columns: TraceColumns, recorded: Column, outermost: Column) -> tuple[tuple[str, int], ...]:
    """Count the operators by the innermost module, or range that the program named, around them."""
    modules = np.array([name.startswith(_MODULE) for name in columns.name_of])
    others = np.array([STEP_NAME.match(name) is None for name in columns.name_of])
    names, kinds = columns.names[recorded], columns.kinds[recorded]
    rows = recorded[((kinds == Kind.ANNOTATION) & others[names]) | ((kinds == Kind.PYTHON) & modules[names])]
    rows = rows[np.lexsort((-columns.ends[rows], columns.starts[rows]))]
    starts, ends, named = columns.starts[rows].tolist(), columns.ends[rows].tolist(), columns.names[rows].tolist()
    found: Counter[int] = Counter()
    around: list[int] = []
    opened = 0
    for start in columns.starts[outermost].tolist():
        while opened < len(starts) and starts[opened] <= start:
            around.append(opened)
            opened += 1
        while around and ends[around[-1]] <= start:
            around.pop()
        if around:
            found[named[around[-1]]] += 1
    shown: Counter[str] = Counter()
    for name, count in found.items():
        shown[_LIGHTNING.sub("", columns.name_of[name]).removeprefix(_MODULE)] += count
    return tuple(shown.most_common(_MOST_NAMES))
