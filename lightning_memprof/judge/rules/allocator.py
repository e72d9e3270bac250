"""Calls of the allocator to the driver, in an operator trace."""

from __future__ import annotations

import re
from typing import Final

from lightning_memprof.account.ledger.model import TimeLedger, total
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.out_of_memory import GROWING_SEGMENTS, HALF_BATCH
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.rule import Detail, InTrace, Rule
from lightning_memprof.judge.traces import (
    computing,
    longest_in,
    remedies,
    stretch,
    times,
)
from lightning_memprof.units import format_ns

WAITS: Final = re.compile(r"(?:cuda|hip)Free(?!Async|Host)|(?:cu|hip)Mem(?:Unmap|Release)")
RETURNS: Final = re.compile(rf"{WAITS.pattern}|(?:cuda|hip)FreeAsync")
PINS: Final = re.compile(r"Host(?:Alloc|Register)|MallocHost")
SHORT: Final[tuple[Remedy, ...]] = (
    GROWING_SEGMENTS,
    HALF_BATCH,
    do.SMALLER_INPUT,
    do.NO_EMPTY_CACHE,
    do.FEW_SHAPES,
)
SHOWN: Final = 3


def allocator_calls(trace: TraceReport, ledger: TimeLedger) -> InTrace | None:
    """Return the idle time in calls to the driver."""
    if not (calls := ledger.of(Part.IDLE_ALLOCATOR)):
        return None
    driver = trace.steady_allocations
    freed = sum(call.count for call in driver if RETURNS.match(call.name))
    says, fields, choices = "", dict[str, str](), SHORT
    if PINS.search(calls[0].name):
        choices = (do.KEEP_PINNED,)
    elif calls_per_step := _uncached(trace, freed):
        says = "The driver allocates each tensor: {calls} calls per step take {share}{rank}."
        fields, choices = {"calls": f"{calls_per_step:,.0f}"}, (do.CACHING_ALLOCATOR,)
    shown = ", ".join(f"{call.name} {times(call.count)} ({format_ns(call.total_ns)})" for call in driver[:SHOWN])
    waits = " Returning memory waits for all kernels." if any(WAITS.match(call.name) for call in driver) else ""
    longest = next((call for call in driver if call.name == calls[0].name), None)
    steps, whole = stretch(trace, ledger)
    return calls, Detail(
        says=says,
        fields=fields,
        measured=f"{format_ns(steps * total(calls))} of {whole}{shown and f': {shown}'}",
        why=waits.strip(),
        remedies=remedies(trace, *choices),
        # The first steps request memory, and many traces contain only a few of those.
        is_note=not freed and choices is SHORT,
        numbers={
            "calls": {call.name: call.count for call in driver},
            "freed": freed,
        },
        evidence=longest_in(trace, longest.longest_start_ns, longest.max_ns) if longest else (),
    )


def _uncached(trace: TraceReport, freed: int) -> float:
    """Return the requests per step of a program without torch's cache, in which each tensor is a call; else 0."""
    count = sum(call.count for call in trace.steady_allocations if not RETURNS.match(call.name))
    steps, kernels = max(len(trace.steps), 1), sum(kernel.count for kernel in computing(trace))
    is_off = count >= max(POLICY.requests * steps, POLICY.requests_per_kernel * kernels) and 2 * freed >= count
    return count / steps if is_off else 0.0


ROWS: Final = (
    Rule(
        id="allocator_thrash",
        about=(
            "The device is idle while the allocator requests memory from the driver or returns it (cudaMalloc, "
            "cudaFree). PyTorch caches memory and needs no such call after the first steps; when memory is short it "
            "first returns cached memory, and cudaFree waits for all kernels."
        ),
        when=(
            "Calls of a cold start do not count, and if no memory is returned the finding is `info`. Torch's cache is "
            f"off if each step requests memory at least {POLICY.requests} times, and once per four kernels."
        ),
        trade_off="A smaller batch, or time to recompute activations.",
        of=(Part.IDLE_ALLOCATOR,),
        in_trace=allocator_calls,
        says="Allocator calls leave the GPU idle {share}{rank}, mostly {owner}.",
        unnamed="Allocator calls leave the GPU idle {share}{rank}.",
        # Calls that only request memory may remain.
        saves=(0.5, 1.0),
    ),
)
