"""Device memory that is got from the driver and given back in the middle of the steps."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Finding, Severity
from lightning_memprof.analysis.findings.trace_parts import (
    NOTABLE_SHARE,
    SEVERE_SHARE,
    longest_in,
    on_rank,
    shorter_name,
    times,
)
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.trace.model import CollectiveTotals, RuntimeCall, TraceReport

__all__ = ["allocator_thrash"]

# The caching allocator asks the driver in the first steps only; later ones that do need memory that is not there.
NOTABLE_PART: Final = 0.02
# Memory that is given back was wanted by something else: the allocator retried, or the program emptied its cache.
GIVING_BACK: Final = frozenset({"cudaFree", "cudaFreeAsync", "hipFree", "cuMemUnmap", "cuMemRelease", "hipMemUnmap"})
GETTING: Final = frozenset(
    {"cudaMalloc", "cudaMallocAsync", "hipMalloc", "cuMemCreate", "cuMemMap", "hipMemCreate", "hipMemMap"}
)
# The same collective takes the same time: many times as long while memory is given back, it waited for that.
SLOW_FACTOR: Final = 10
NEXT: Final = (
    "Let segments grow instead of being returned: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    "Leave more memory free: a smaller batch, activation checkpointing, Trainer(accumulate_grad_batches=...).",
    "Do not call torch.cuda.empty_cache() in steps, and keep the shapes of batches alike (pad to a few lengths).",
)


def allocator_thrash(trace: TraceReport) -> list[Finding]:
    """Say that the driver is asked for memory in the steps, and which collectives took long meanwhile."""
    window = trace.gpu_window
    calls = [call for call in trace.runtime_calls if _bare(call.name) in GIVING_BACK | GETTING]
    if window is None or not window.window_ns or not calls:
        return []
    total_ns = sum(call.total_ns for call in calls)
    freed = sum(call.count for call in calls if _bare(call.name) in GIVING_BACK)
    slow = _slow_collectives(trace)
    waited_ns = sum(slow_collective.max_ns - slow_collective.median_ns for slow_collective in slow)
    share = min((total_ns + waited_ns) / window.window_ns, 1.0)
    if share <= NOTABLE_PART:
        return []
    worst = max(calls, key=lambda call: call.total_ns)
    return [
        Finding(
            rule="allocator_thrash",
            severity=_severity(share, freed, slow),
            sentence=_sentence(trace, total_ns / window.window_ns, freed, slow),
            why=_why(calls, slow, window.window_ns),
            next_steps=NEXT,
            evidence=longest_in(
                trace,
                slow[0].longest_start_ns if slow else worst.longest_start_ns,
                slow[0].max_ns if slow else worst.max_ns,
            ),
            numbers={
                "share": share,
                "allocator_ns": total_ns,
                "window_ns": window.window_ns,
                "calls": {call.name: call.count for call in calls},
                "freed": freed,
                "slow_collectives": [
                    {
                        "name": slow_collective.name,
                        "median_ns": slow_collective.median_ns,
                        "max_ns": slow_collective.max_ns,
                    }
                    for slow_collective in slow
                ],
                "waited_ns": waited_ns,
            },
            weight=share,
        )
    ]


def _bare(name: str) -> str:
    """Return the call without the version that CUDA hangs on: ``cudaMallocAsync_ptsz``, ``cudaFree_v2``."""
    return name.partition("_")[0]


def _severity(share: float, freed: int, slow: list[CollectiveTotals]) -> Severity:
    if not freed and not slow:
        # First steps do this too, and a few of them are all that many traces hold.
        return Severity.WARNING if share > SEVERE_SHARE else Severity.INFO
    if share > SEVERE_SHARE:
        return Severity.CRITICAL
    return Severity.WARNING if share > NOTABLE_SHARE or slow else Severity.INFO


def _slow_collectives(trace: TraceReport) -> list[CollectiveTotals]:
    """Return the collectives whose longest took many times the median while the allocator was with the driver."""
    return sorted(
        (
            collective
            for collective in trace.collectives
            if collective.count > 1
            and collective.longest_start_ns is not None
            and collective.max_ns >= SLOW_FACTOR * max(collective.median_ns, 1)
            and _touches(
                trace.allocator_spans, collective.longest_start_ns, collective.longest_start_ns + collective.max_ns
            )
        ),
        key=lambda collective: collective.max_ns,
        reverse=True,
    )


def _touches(spans: tuple[tuple[int, int], ...], start_ns: int, end_ns: int) -> bool:
    # Calls of one process hold a lock, so that they end in the order in which they begin.
    place = bisect_left(spans, start_ns, key=lambda span: span[1])
    return place < len(spans) and spans[place][0] <= end_ns


def _sentence(trace: TraceReport, share: float, freed: int, slow: list[CollectiveTotals]) -> str:
    rank = on_rank(trace)
    if slow:
        return (
            f"Memory is short{rank}: {shorter_name(slow[0].name)} took {format_ns(slow[0].max_ns)} instead of "
            f"{format_ns(slow[0].median_ns)} while the allocator was with the driver."
        )
    doing = "gets memory from the driver and gives it back" if freed else "gets memory from the driver"
    return f"The allocator {doing} in the steps{rank}, {percent(share)} of the time."


def _why(calls: list[RuntimeCall], slow: list[CollectiveTotals], window_ns: int) -> str:
    shown = sorted(calls, key=lambda call: call.total_ns, reverse=True)[:3]
    named = ", ".join(f"{call.name} {times(call.count)} ({format_ns(call.total_ns)})" for call in shown)
    text = f"In {format_ns(window_ns)}: {named}"
    if slow:
        text += f"; {len(slow)} kind{'s' * (len(slow) > 1)} of collective waited meanwhile, on all ranks"
    if any(_bare(call.name) in GIVING_BACK for call in calls):
        text += "; giving memory back waits for all kernels"
    return text + "."
