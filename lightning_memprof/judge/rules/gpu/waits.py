"""Waits of the host that leave the device without work, and copies that kernels wait for, in an operator trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightning_memprof.account.parts import Part
from lightning_memprof.judge.finding import Finding, Severity
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    COPY_FEWER_BYTES,
    COPY_FROM_PINNED,
    COPY_IN_STREAM,
    COPY_INTO_PINNED,
    FIND_SYNC_CALLS,
    KEEP_ON_DEVICE,
    MOVE_RESULTS_LESS_OFTEN,
    NO_BOOLEAN_INDEX,
    NO_BRANCH,
    NO_MASKED_SELECT,
    NO_SYNCHRONIZE,
    NON_BLOCKING_COPY,
    NON_BLOCKING_TO,
    PIN_BATCHES,
    PIN_OWN_TENSORS,
    READ_EVENTS_LATER,
    STAY_ON_GPU,
    UNIQUE_IN_WORKERS,
    Remedy,
)
from lightning_memprof.judge.traces import (
    BESIDE_THE_STEP,
    CAUSES,
    NOTABLE_SHARE,
    after_waits,
    is_brief,
    longest_in,
    on_rank,
    recovered_ns,
    remedies,
    severity_of,
    shorter_name,
    times,
)
from lightning_memprof.read.trace.model import Copies, Synchronization, TraceReport
from lightning_memprof.units import format_bytes, format_ns, percent

READS: Final = (KEEP_ON_DEVICE,)
# A gap after a wait: the end of the call, and what the host then does up to the next launch.
AFTER_WAITS: Final = tuple(part for part in CAUSES if part != Part.IDLE_DATA)
ADVICE: Final[Mapping[str, tuple[Remedy, ...]]] = {
    "aten::item": READS,
    "aten::_local_scalar_dense": READS,
    "aten::is_nonzero": (NO_BRANCH,),
    "aten::nonzero": (NO_BOOLEAN_INDEX,),
    "aten::masked_select": (NO_MASKED_SELECT,),
    "aten::unique": (UNIQUE_IN_WORKERS,),
    "aten::to": (NON_BLOCKING_TO,),
    "aten::copy_": (NON_BLOCKING_COPY,),
    "cudaDeviceSynchronize": (NO_SYNCHRONIZE,),
    "cudaEventSynchronize": (READ_EVENTS_LATER,),
}


def synchronization(trace: TraceReport) -> Finding | None:
    """Find gaps on the device after calls that make the host wait for it, and the calls.

    Recovers at most the gaps, and the time that the host waits; nothing where the host prepares work for longer than
    the device takes for it.
    """
    window, found = trace.window, after_waits(trace)
    if window is None or found is None:
        return None
    calls, gap_ns, count = found.calls, found.gap_ns, found.number
    share, own = gap_ns / window.window_ns, found.own_ns / window.window_ns
    steps = len(trace.steps)
    often = f"{times(round(count / steps))} per step" if count >= steps > 1 else times(count)
    return Finding(
        rule="synchronization",
        severity=Severity.INFO if is_brief(trace) else severity_of(own),
        title=(f"The host waits for the GPU {often}{on_rank(trace)}; the GPU then idles {percent(share)} of the time."),
        why=(
            f"After these calls the GPU's queue is empty for {format_ns(gap_ns)} of {format_ns(window.window_ns)}: "
            f"{_named(calls)}."
        ),
        remedies=remedies(trace, *(step for call in calls for step in _advice(call.name)), FIND_SYNC_CALLS),
        evidence=longest_in(trace, calls[0].longest_start_ns, calls[0].longest_gap_ns),
        numbers={
            "gap_share": share,
            "gap_ns": gap_ns,
            "waiting_ns": sum(call.total_ns for call in calls),
            "calls": count,
            "by_name": {call.name: {"calls": call.count, "gap_ns": call.gap_ns} for call in calls},
        },
        weight=own,
        recovers=recovered_ns(trace.device_ledger, (0.0, 1.0), *AFTER_WAITS, recorded_ns=found.own_ns),
    )


def _advice(name: str) -> tuple[Remedy, ...]:
    return ADVICE.get(name, (COPY_FROM_PINNED,) if "Memcpy" in name else ())


def _named(calls: tuple[Synchronization, ...]) -> str:
    return ", ".join(
        f"{format_ns(call.gap_ns)} after {shorter_name(call.name)} ({times(call.count)})" for call in calls[:2]
    )


COPY_NEXT: Final = {
    "HtoD": (PIN_BATCHES, PIN_OWN_TENSORS),
    "DtoH": (MOVE_RESULTS_LESS_OFTEN, COPY_INTO_PINNED),
}
DIRECTIONS: Final = {"HtoD": "to the GPU", "DtoH": "from the GPU"}
# Copies of as many bytes in both directions are of the same tensors.
SAME: Final = 0.1


def blocking_transfers(trace: TraceReport) -> list[Finding]:
    """Find copies from or to pageable memory that no computation overlaps, by direction.

    Recovers half to all of their exposed time: from pinned memory they are faster, and run beside kernels.
    """
    found = [_transfer(trace, copies) for copies in trace.copies if copies.kind in DIRECTIONS and copies.is_pageable]
    return [finding for finding in found if finding is not None]


def _transfer(trace: TraceReport, copies: Copies) -> Finding | None:
    share = _exposed_share(trace, copies)
    if share <= POLICY.note:
        return None
    is_round_trip = any(_is_return(copies, other) for other in trace.copies)
    return Finding(
        rule="blocking_transfers",
        severity=severity_of(share),
        title=(
            f"Blocking copies {DIRECTIONS[copies.kind]} take {percent(share)} of the time{on_rank(trace)}"
            f"{': as many bytes move back and forth' if is_round_trip else ''}."
        ),
        why=f"{_amount(copies)}: pageable memory is copied twice, and the call blocks until the copy ends.",
        # The same number of bytes may be a batch and an output of its size.
        remedies=((STAY_ON_GPU,) if is_round_trip else ()) + remedies(trace, *COPY_NEXT[copies.kind]),
        **_of_copies(trace, copies, share, share),
    )


# One direction that is more of the time than all else decides how long it takes.
MOST: Final = 0.5


def exposed_copies(trace: TraceReport) -> list[Finding]:
    """Find copies from or to pinned memory that no kernel overlaps, by direction.

    Recovers half to all of what can run beside kernels, or of half of the bytes where that is more.
    """
    return [
        _exposed(trace, copies, share)
        for copies in trace.copies
        if copies.kind in DIRECTIONS
        and copies.is_pageable is False
        and (share := _exposed_share(trace, copies)) > NOTABLE_SHARE
    ]


def _exposed(trace: TraceReport, copies: Copies, share: float) -> Finding:
    window = trace.window
    running = (window.compute_ns + window.communication_exposed_ns) / window.window_ns if window else 0.0
    # Copies beside kernels can hide no longer than these run.
    next_steps = (COPY_FEWER_BYTES, COPY_IN_STREAM) if share > running else (COPY_IN_STREAM, COPY_FEWER_BYTES)
    bound = "Transfer-bound: pinned" if share >= MOST else "Pinned"
    return Finding(
        rule="exposed_copies",
        severity=severity_of(share),
        title=(
            f"{bound} copies {DIRECTIONS[copies.kind]} take {percent(share)} of the time{on_rank(trace)} while no "
            "kernel runs."
        ),
        why=f"{_amount(copies)}; kernels run for {percent(running)} of the time.",
        remedies=next_steps,
        **_of_copies(trace, copies, share, max(share / 2, min(share, running))),
    )


def _exposed_share(trace: TraceReport, copies: Copies) -> float:
    # A copy from pageable memory blocks the host until it ends: without the overlap its total time counts.
    exposed_ns = copies.total_ns if copies.exposed_ns is None else copies.exposed_ns
    return exposed_ns / trace.window.window_ns if trace.window and trace.window.window_ns else 0.0


def _amount(copies: Copies) -> str:
    size = f"{format_bytes(copies.bytes)} in " if copies.bytes is not None else ""
    rate = f", {format_bytes(copies.bytes * 1e9 / copies.total_ns)}/s" if copies.bytes and copies.total_ns else ""
    return f"{times(copies.count).capitalize()}, {size}{format_ns(copies.total_ns)}{rate}"


def _of_copies(trace: TraceReport, copies: Copies, share: float, saved: float) -> dict[str, Any]:
    """Return evidence, numbers and worth of copies: of all time they take ``share``, and a remedy saves ``saved``."""
    window_ns = trace.window.window_ns if trace.window else 0
    return {
        "evidence": longest_in(trace, copies.longest_start_ns, copies.total_ns // max(copies.count, 1)),
        "numbers": {
            "kind": copies.kind,
            "share": share,
            "exposed_ns": copies.exposed_ns,
            "total_ns": copies.total_ns,
            "count": copies.count,
            "bytes": copies.bytes,
            "window_ns": window_ns,
        },
        "weight": share,
        "recovers": recovered_ns(
            trace.device_ledger,
            BESIDE_THE_STEP,
            "copy",
            recorded_ns=saved * window_ns,
            name=f"{copies.kind} ({'pageable' if copies.is_pageable else 'pinned'})",
        ),
    }


def _is_return(copies: Copies, other: Copies) -> bool:
    moved, returned = copies.bytes or 0, other.bytes or 0
    return other.kind != copies.kind and bool(other.is_pageable) and abs(moved - returned) < SAME * moved
