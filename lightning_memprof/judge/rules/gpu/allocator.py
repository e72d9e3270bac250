"""Calls of the allocator to the driver, in an operator trace."""

from __future__ import annotations

from typing import Final

from lightning_memprof.judge.finding import Finding, Severity, titled
from lightning_memprof.judge.remedies import (
    CACHING_ALLOCATOR,
    EXPANDABLE_SEGMENTS,
    FREE_MEMORY,
    FREE_MEMORY_OF_BATCH,
    KEEP_CACHE,
    NATIVE_ALLOCATOR,
)
from lightning_memprof.judge.traces import (
    NOTABLE_SHARE,
    SAVED,
    SEVERE_SHARE,
    computing,
    longest_in,
    on_rank,
    recovered_ns,
    remedies,
    shorter_name,
    slow_collectives,
    steps_ns,
    times,
    waited_ns,
)
from lightning_memprof.read.trace.model import (
    CollectiveTotals,
    RuntimeCall,
    TraceReport,
)
from lightning_memprof.units import format_ns, percent

# The caching allocator calls the driver in the first steps only, unless it lacks memory.
NOTABLE_CALLS: Final = 0.02
MIN_PASSES: Final = 2
# Returned memory was needed elsewhere: the allocator retried, or the program emptied its cache.
WAITING: Final = frozenset({"cudaFree", "hipFree", "cuMemUnmap", "cuMemRelease", "hipMemUnmap"})
RETURNING: Final = WAITING | {"cudaFreeAsync", "hipFreeAsync"}
# The driver keeps returned memory in its pool, in the order of the stream: these calls wait for no kernel.
POOLED: Final = frozenset({"cudaMallocAsync", "hipMallocAsync"})
REQUESTING: Final = POOLED | {"cudaMalloc", "hipMalloc", "cuMemCreate", "cuMemMap", "hipMemCreate", "hipMemMap"}
THRASH_NEXT: Final = (
    EXPANDABLE_SEGMENTS,
    FREE_MEMORY,
    FREE_MEMORY_OF_BATCH,
    KEEP_CACHE,
)
# Without the cache each tensor is a call: with it, a step that empties the cache requests a few segments.
MANY_REQUESTS: Final = 50
REQUESTS_PER_KERNEL: Final = 0.25
SHOWN: Final = 3


def allocator_thrash(trace: TraceReport) -> Finding | None:
    """Find steps in which the allocator calls the driver, and the collectives that wait meanwhile.

    Recovers half to all of the device's idle time in these calls: those that only request memory may remain. Where
    collectives wait for them, those of the other ranks too.
    """
    calls, window_ns = _allocator_calls(trace), steps_ns(trace)
    freed = sum(call.count for call in calls if _bare(call.name) in RETURNING)
    slow = slow_collectives(trace)
    share = allocator_share(trace)
    if share <= NOTABLE_CALLS:
        return None
    calls_ns = sum(call.total_ns for call in calls)
    uncached, is_pooled = _uncached(trace, calls, freed), any(_bare(call.name) in POOLED for call in calls)
    chosen = (NATIVE_ALLOCATOR,) if is_pooled else (CACHING_ALLOCATOR,) if uncached else THRASH_NEXT
    longest = slow[0] if slow else max(calls, key=lambda call: call.total_ns)
    return Finding(
        rule="allocator_thrash",
        severity=_severity_of_calls(share, freed, slow),
        title=uncached or _sentence_on_calls(trace, calls_ns / window_ns, freed, slow),
        why=_why_calls(calls, slow, window_ns),
        remedies=remedies(trace, *chosen),
        evidence=longest_in(trace, longest.longest_start_ns, longest.max_ns),
        numbers={
            "share": share,
            "allocator_ns": calls_ns,
            "window_ns": window_ns,
            "calls": {call.name: call.count for call in calls},
            "freed": freed,
            "is_cached": uncached is None or is_pooled,
            "slow_collectives": [
                {"name": collective.name, "median_ns": collective.median_ns, "max_ns": collective.max_ns}
                for collective in slow
            ],
            "waited_ns": waited_ns(slow),
        },
        weight=share,
        recovers=recovered_ns(
            trace.device_ledger,
            SAVED,
            "idle_allocator",
            *(("collective",) if slow else ()),
            recorded_ns=share * window_ns,
        ),
    )


def _allocator_calls(trace: TraceReport) -> list[RuntimeCall]:
    """Return the calls of a steady state; a single pass that only requests memory may be the first one."""
    calls = [call for call in trace.steady_allocations if _bare(call.name) in RETURNING | REQUESTING]
    is_first = len(trace.steps) < MIN_PASSES and not any(_bare(call.name) in RETURNING for call in calls)
    return [] if is_first else calls


def allocator_share(trace: TraceReport) -> float:
    """Return the share of the steps in calls to the driver, and in collectives that wait for them."""
    calls_ns, window_ns = sum(call.total_ns for call in _allocator_calls(trace)), steps_ns(trace)
    if not calls_ns or not window_ns:
        return 0.0
    return min((calls_ns + waited_ns(slow_collectives(trace))) / window_ns, 1.0)


def _uncached(trace: TraceReport, calls: list[RuntimeCall], freed: int) -> str | None:
    """Return the sentence for a program without torch's cache, in which each tensor is a call to the driver."""
    requests = [call for call in calls if _bare(call.name) in REQUESTING]
    count, steps = sum(call.count for call in requests), max(len(trace.steps), 1)
    kernels = sum(kernel.count for kernel in computing(trace))
    if count < MANY_REQUESTS * steps or 2 * freed < count or count < REQUESTS_PER_KERNEL * kernels:
        return None
    share = sum(call.total_ns for call in calls) / steps_ns(trace)
    often = f"{count / steps:,.0f} {requests[0].name} calls per step"
    cause = "Memory is from the driver's pool" if _bare(requests[0].name) in POOLED else "The caching allocator is off"
    return f"{cause}: {often} take {percent(share)}{on_rank(trace)}."


def _bare(name: str) -> str:
    """Return a call without CUDA's version suffix: ``cudaMallocAsync_ptsz``, ``cudaFree_v2``."""
    return name.partition("_")[0]


def _severity_of_calls(share: float, freed: int, slow: list[CollectiveTotals]) -> Severity:
    if not freed and not slow:
        # First steps do this too, and many traces contain only a few of those.
        return Severity.WARNING if share > SEVERE_SHARE else Severity.INFO
    if share > SEVERE_SHARE:
        return Severity.CRITICAL
    return Severity.WARNING if share > NOTABLE_SHARE or slow else Severity.INFO


def _sentence_on_calls(trace: TraceReport, share: float, freed: int, slow: list[CollectiveTotals]) -> str:
    if slow:
        longest, median = format_ns(slow[0].max_ns), format_ns(slow[0].median_ns)
        return titled(
            f"Low memory{on_rank(trace)}: {{name}} took {longest} (median {median}) during an allocator call.",
            name=shorter_name(slow[0].name),
        )
    doing = "requests and returns" if freed else "requests"
    return f"The allocator {doing} driver memory for {percent(share)} of the time{on_rank(trace)}."


def _why_calls(calls: list[RuntimeCall], slow: list[CollectiveTotals], window_ns: int) -> str:
    shown = sorted(calls, key=lambda call: call.total_ns, reverse=True)[:SHOWN]
    named = ", ".join(f"{call.name} {times(call.count)} ({format_ns(call.total_ns)})" for call in shown)
    parts = [f"In {format_ns(window_ns)}: {named}"]
    parts += [f"collectives that waited meanwhile, on all ranks: {len(slow)}"] if slow else []
    parts += ["returning memory waits for all kernels"] if any(_bare(call.name) in WAITING for call in calls) else []
    return "; ".join(parts) + "."
