"""Waits of the host that leave the device without work, and copies that kernels wait for, in an operator trace."""

from __future__ import annotations

from typing import Any, Final

from lightning_memprof.account.parts import Part
from lightning_memprof.judge.finding import Finding, Severity
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.traces import (
    BESIDE_THE_STEP,
    CAUSES,
    NOTABLE_SHARE,
    Remedy,
    after_waits,
    is_brief,
    longest_in,
    on_rank,
    recovered_ns,
    remedies,
    remedy,
    severity_of,
    shorter_name,
    times,
)
from lightning_memprof.read.trace.model import Copies, Synchronization, TraceReport
from lightning_memprof.units import format_bytes, format_ns, percent

KEEP: Final = "Keep values on the device: loss.detach() instead of loss.item(), torch.where instead of if"
READS: Final = (
    remedy(f"{KEEP}, self.log(name, tensor) with Trainer(log_every_n_steps=50).", "lightning"),
    remedy(f"{KEEP}; read them every 50 steps.", "other program"),
)
COPY: Final = "Copy from pinned memory without blocking: tensor.pin_memory().to(device, non_blocking=True)."
# A gap after a wait: the end of the call, and what the host then does up to the next launch.
AFTER_WAITS: Final = tuple(part for part in CAUSES if part != Part.IDLE_DATA)
ADVICE: Final = {
    "aten::is_nonzero": "Do not branch on a tensor's value in a step: torch.where instead of if.",
    "aten::nonzero": "Avoid value-dependent sizes, which stop the host: torch.where instead of a boolean index.",
    "aten::masked_select": "Avoid value-dependent sizes, which stop the host: torch.where instead of masked_select.",
    "aten::unique": "Avoid value-dependent sizes, which stop the host: call unique in the DataLoader's workers.",
    "aten::to": "Copy without blocking: tensor.to(device, non_blocking=True) from DataLoader(pin_memory=True).",
    "aten::copy_": "Copy without blocking: tensor.copy_(other, non_blocking=True) with pinned memory.",
    "cudaDeviceSynchronize": "Remove torch.cuda.synchronize() from the steps: time them with torch.cuda.Event.",
    "cudaEventSynchronize": "Read event times after several steps, not in each: event.synchronize() stops the host.",
}
FIND: Final = 'Find the calls: torch.cuda.set_sync_debug_mode("warn") prints the line of each.'


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
        remedies=remedies(trace, *(step for call in calls for step in _advice(call.name)), FIND),
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


def _advice(name: str) -> tuple[Remedy | str, ...]:
    if name in {"aten::item", "aten::_local_scalar_dense"}:
        return READS
    return (ADVICE[name],) if name in ADVICE else (COPY,) if "Memcpy" in name else ()


def _named(calls: tuple[Synchronization, ...]) -> str:
    return ", ".join(
        f"{format_ns(call.gap_ns)} after {shorter_name(call.name)} ({times(call.count)})" for call in calls[:2]
    )


COPY_NEXT: Final = {
    "HtoD": (
        remedy(
            "Pin the batches: DataLoader(pin_memory=True); Lightning then copies them without blocking.", "lightning"
        ),
        remedy("Pin the batches: DataLoader(pin_memory=True), batch.to(device, non_blocking=True).", "other program"),
        "Pin the program's own tensors: tensor.pin_memory().to(device, non_blocking=True).",
    ),
    "DtoH": (
        remedy(
            "Move results to the host less often: .cpu() every N steps, self.log(name, tensor) instead of a list.",
            "lightning",
        ),
        remedy("Move results to the host less often: .cpu() every N steps.", "other program"),
        "Copy into pinned memory: torch.empty(shape, pin_memory=True).copy_(x, non_blocking=True).",
    ),
}
DIRECTIONS: Final = {"HtoD": "to the GPU", "DtoH": "from the GPU"}
# Copies of as many bytes in both directions are of the same tensors.
SAME: Final = 0.1
STAY: Final = "Leave it on the GPU: remove the .to(device) and .cpu() of a module or tensor from the steps."


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
        remedies=((STAY,) if is_round_trip else ()) + remedies(trace, *COPY_NEXT[copies.kind]),
        **_of_copies(trace, copies, share, share),
    )


# One direction that is more of the time than all else decides how long it takes.
MOST: Final = 0.5
SEND_LESS: Final = "Copy fewer bytes: uint8 images, bfloat16 tensors, int32 indices; keep what fits on the GPU."
SIDE: Final = (
    "Overlap copies with kernels: start each copy early in a torch.cuda.Stream(), and wait for its event before using "
    "it."
)


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
    next_steps = (SEND_LESS, SIDE) if share > running else (SIDE, SEND_LESS)
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
