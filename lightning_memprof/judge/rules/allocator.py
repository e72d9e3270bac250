"""Calls of the allocator to the driver, in an operator trace."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import CollectiveTotals, TraceReport
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    CACHING_ALLOCATOR,
    EXPANDABLE_SEGMENTS,
    FEW_LENGTHS,
    FREE_MEMORY,
    KEEP_PINNED,
    NATIVE_ALLOCATOR,
    NO_EMPTY_CACHE,
    SMALLER_INPUT,
    Remedy,
)
from lightning_memprof.judge.rule import Detail, Fact, Found, Rule
from lightning_memprof.judge.traces import (
    computing,
    device_traces,
    longest_in,
    remedies,
    scaled,
    seen_in,
    shorter_name,
    stretch,
    times,
)
from lightning_memprof.units import format_ns

WAITS: Final = re.compile(r"(?:cuda|hip)Free(?!Async|Host)|(?:cu|hip)Mem(?:Unmap|Release)")
RETURNS: Final = re.compile(rf"{WAITS.pattern}|(?:cuda|hip)FreeAsync")
# The driver keeps returned memory in its pool, in the order of the stream.
POOLS: Final = re.compile(r"(?:cuda|hip)MallocAsync")
PINS: Final = re.compile(r"Host(?:Alloc|Register)|MallocHost")
SHORT: Final[tuple[Remedy, ...]] = (
    EXPANDABLE_SEGMENTS,
    FREE_MEMORY,
    SMALLER_INPUT,
    NO_EMPTY_CACHE,
    FEW_LENGTHS,
)
SHOWN: Final = 3


def allocator_calls(facts: Facts) -> Iterator[Found]:
    """Yield the idle time in calls to the driver, and the collectives that wait meanwhile, those of other ranks too."""
    for trace, ledger in device_traces(facts):
        slow = _slow_collectives(trace)
        waited_ns = sum(collective.max_ns - collective.median_ns for collective in slow)
        calls = ledger.of(Part.IDLE_ALLOCATOR)
        lines = (*calls, *scaled(ledger.of(Part.COLLECTIVE), waited_ns / ledger.steps))
        if lines:
            yield Fact(source=trace, ledger=ledger, lines=lines), _detail(trace, ledger, calls, slow)


def _detail(
    trace: TraceReport, ledger: TimeLedger, calls: tuple[TimeLine, ...], slow: list[CollectiveTotals]
) -> Detail:
    driver = trace.steady_allocations
    freed = sum(call.count for call in driver if RETURNS.match(call.name))
    says, fields, choices = "", dict[str, str](), SHORT
    if calls and PINS.search(calls[0].name):
        choices = (KEEP_PINNED,)
    elif slow:
        says = "Low memory: {name} took {longest} (median {median}) during an allocator call: {share}{rank}."
        fields = {
            "name": shorter_name(slow[0].name),
            "longest": format_ns(slow[0].max_ns),
            "median": format_ns(slow[0].median_ns),
        }
    elif uncached := _uncached(trace, freed):
        says, fields, choices = uncached
    shown = ", ".join(f"{call.name} {times(call.count)} ({format_ns(call.total_ns)})" for call in driver[:SHOWN])
    waits = " Returning memory waits for all kernels." if any(WAITS.match(call.name) for call in driver) else ""
    longest = slow[0] if slow else next((call for call in driver if call.name == calls[0].name), None)
    steps, whole = stretch(trace, ledger)
    return Detail(
        says=says,
        fields=fields,
        measured=f"{format_ns(steps * total(calls))} of {whole}{shown and f': {shown}'}",
        why=waits.strip(),
        remedies=remedies(trace, *choices),
        # The first steps request memory, and many traces contain only a few of those.
        is_note=not freed and not slow and choices is SHORT,
        numbers={
            "calls": {call.name: call.count for call in driver},
            "freed": freed,
            "slow_collectives": [
                {"name": collective.name, "median_ns": collective.median_ns, "max_ns": collective.max_ns}
                for collective in slow
            ],
        },
        evidence=longest_in(trace, longest.longest_start_ns, longest.max_ns) if longest else seen_in(trace),
    )


def _uncached(trace: TraceReport, freed: int) -> tuple[str, dict[str, str], tuple[Remedy, ...]] | None:
    """Return title, fields and remedy for a program without torch's cache, in which each tensor is a call."""
    requests = [call for call in trace.steady_allocations if not RETURNS.match(call.name)]
    count, steps = sum(call.count for call in requests), max(len(trace.steps), 1)
    kernels = sum(kernel.count for kernel in computing(trace))
    if count < POLICY.requests * steps or 2 * freed < count or count < POLICY.requests_per_kernel * kernels:
        return None
    is_pooled = POOLS.match(requests[0].name)
    cause = "Memory from the driver's pool" if is_pooled else "The caching allocator is off"
    fields = {"calls": f"{count / steps:,.0f} {requests[0].name} calls"}
    return (
        f"{cause}: {{calls}} per step take {{share}}{{rank}}.",
        fields,
        (NATIVE_ALLOCATOR if is_pooled else CACHING_ALLOCATOR,),
    )


def _slow_collectives(trace: TraceReport) -> list[CollectiveTotals]:
    """Return the collectives whose longest took many times the median during a call to the driver."""
    found = [
        collective
        for collective in trace.collectives
        if collective.count > 1
        and (start := collective.longest_start_ns) is not None
        and collective.max_ns >= POLICY.multiple * max(collective.median_ns, 1)
        and _touches(trace.allocator_spans, start, start + collective.max_ns)
    ]
    return sorted(found, key=lambda collective: collective.max_ns, reverse=True)


def _touches(spans: tuple[tuple[int, int], ...], start_ns: int, end_ns: int) -> bool:
    # Calls of one process hold a lock: they end in the order in which they begin.
    place = bisect_left(spans, start_ns, key=lambda span: span[1])
    return place < len(spans) and spans[place][0] <= end_ns


ROWS: Final = (
    Rule(
        id="allocator_thrash",
        about=(
            "The device is idle while the allocator requests memory from the driver or returns it (cudaMalloc, "
            "cudaFree, cuMemCreate, hipMalloc, ...). PyTorch caches memory and needs no such call after the first "
            "steps; when memory is short it first returns cached memory, and cudaFree waits for all kernels. All other "
            "ranks then wait in the next collective."
        ),
        when=(
            "Calls of a cold start do not count, and if no memory is returned the finding is `info`: the first "
            f"steps request memory. A collective waits for such a call if it takes {POLICY.multiple} times its "
            "median during one. The caching allocator is off if each step requests memory at least "
            f"{POLICY.requests} times, at least once per four kernels, and returns it at least half as often."
        ),
        trade_off="A smaller batch, or time to recompute activations.",
        of=(Part.IDLE_ALLOCATOR, Part.COLLECTIVE),
        find=allocator_calls,
        says="Allocator calls leave the GPU idle {share}{rank}, mostly {owner}.",
        unnamed="Allocator calls leave the GPU idle {share}{rank}.",
        # Calls that only request memory may remain.
        saves=(0.5, 1.0),
    ),
)
