"""A device that waits, in an operator trace: for launches, for the host after a synchronization, for copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Finding, Severity
from lightning_memprof.analysis.findings.traces import (
    NOTABLE_SHARE,
    computing,
    idle_ns,
    is_short,
    longest_in,
    on_rank,
    seen_in,
    severity_of,
    shorter_name,
    times,
    total_ns,
)
from lightning_memprof.units import format_bytes, format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.trace.model import Cause, Copies, IdleCause, Synchronization, TraceReport

__all__ = ["blocking_transfers", "gpu_idle", "synchronization"]

# Other rules report these.
REPORTED_ELSEWHERE: Final[tuple[Cause, ...]] = ("data_loading", "allocator")
LAUNCHING: Final[tuple[Cause, ...]] = ("python", "operators", "launch")
# A launch takes as long as a kernel below this, so that a device can wait for each launch.
SHORT_KERNEL_NS: Final = 20_000
# A cause with this share of the idle time explains it.
MAIN_PART: Final = 0.5
DOING: Final[dict[Cause, str]] = {
    "data_loading": "the host loads batches",
    "synchronization": "the host waits for the GPU",
    "allocator": "the allocator calls the driver",
    "garbage": "the host is in GC pauses",
    "python": "the host runs Python outside operators",
    "operators": "the host is inside operators",
    "launch": "the host launches kernels",
    "queue": "the next kernel is queued and does not start",
}
NEXT: Final[dict[Cause, str]] = {
    "synchronization": (
        "Read no device values in a step (.item(), .cpu(), print, if tensor): "
        "self.log(name, tensor) with Trainer(log_every_n_steps=50)."
    ),
    "garbage": "Collect garbage between steps: gc.freeze() after setup, gc.disable(), gc.collect() every 100 steps.",
    "python": (
        "Record the Python stacks with ExtendedPyTorchProfiler(with_stack=True), then move that code out of the step."
    ),
}
QUEUE_NEXT: Final = (
    "Merge the traces of all ranks and see which stream, copy or late rank the queued kernels wait for: "
    "lightning-memprof merge."
)
LAUNCH_NEXT: Final = (
    'Launch fewer and longer kernels: torch.compile(model), or torch.compile(model, mode="reduce-overhead").',
    "Give each step more work: a larger batch instead of gradient accumulation.",
    "Update all parameters in one kernel: torch.optim.AdamW(..., fused=True).",
)
# The causes come from launch calls, which torch records with the activity of the device.
UNKNOWN_NEXT: Final = ("Record the host too: activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA].",)


def gpu_idle(trace: TraceReport) -> list[Finding]:
    """Find an idle device, whether the host cannot launch fast enough, and the host's activity meanwhile."""
    window = trace.gpu_window
    if window is None or not window.window_ns:
        return []
    rest_ns = window.idle_ns - idle_ns(trace, *REPORTED_ELSEWHERE)
    share = rest_ns / window.window_ns
    if share <= NOTABLE_SHARE:
        return []
    causes = [cause for cause in trace.idle if cause.cause not in REPORTED_ELSEWHERE and cause.total_ns > 0]
    causes.sort(key=lambda cause: cause.total_ns, reverse=True)
    main = causes[0] if causes else None
    kernels = sum(kernel.count for kernel in computing(trace))
    mean_ns = round(total_ns(computing(trace)) / kernels) if kernels else 0
    is_launching = idle_ns(trace, *LAUNCHING) >= MAIN_PART * rest_ns
    launch_bound = is_launching and bool(kernels) and mean_ns <= SHORT_KERNEL_NS
    return [
        Finding(
            rule="gpu_idle",
            severity=Severity.INFO if is_short(trace) else severity_of(share),
            sentence=_sentence(trace, share, main, launch_bound=launch_bound),
            why=_why(trace, causes, f"; {kernels:,} kernels take {format_ns(mean_ns)} on average" if kernels else ""),
            next_steps=_next_steps(main, launch_bound=launch_bound),
            evidence=longest_in(trace, main.longest_start_ns, main.longest_ns) if main else seen_in(trace),
            numbers={
                "idle_share": window.idle_ns / window.window_ns,
                "idle_ns": window.idle_ns,
                "window_ns": window.window_ns,
                "launch_bound": launch_bound,
                "causes_ns": {cause.cause: cause.total_ns for cause in trace.idle},
                "main_cause": main.cause if main else None,
                "kernels": kernels,
                "mean_kernel_ns": mean_ns,
            },
            weight=share,
        )
    ]


def _sentence(trace: TraceReport, share: float, main: IdleCause | None, *, launch_bound: bool) -> str:
    apart = ", not counting data loading" if idle_ns(trace, "data_loading") else ""
    idle = f"he GPU is idle {percent(share)} of the time{on_rank(trace)}{apart}"
    if launch_bound:
        return f"Launch-bound: t{idle}, while the host prepares kernels."
    return f"T{idle}, mostly while {DOING[main.cause]}." if main is not None else f"T{idle}."


def _why(trace: TraceReport, causes: list[IdleCause], kernels: str) -> str:
    window = trace.gpu_window
    span = f"{format_ns(window.idle_ns)} of {format_ns(window.window_ns)}" if window else ""
    named = [
        f"; {format_ns(cause.total_ns)} while {DOING[cause.cause]}"
        + (f" (mostly {shorter_name(cause.example)})" if cause.example else "")
        for cause in causes[:2]
    ]
    stacks = " Recording Python stacks slows the host." if "with_stack" in trace.recorded_with else ""
    short = " The trace is short." if is_short(trace) else ""
    return f"The GPU is idle for {span}{''.join(named)}{kernels}.{stacks}{short}"


def _next_steps(main: IdleCause | None, *, launch_bound: bool) -> tuple[str, ...]:
    if launch_bound:
        return LAUNCH_NEXT
    if main is None:
        return UNKNOWN_NEXT
    if main.cause == "queue":
        return (QUEUE_NEXT,)
    return (NEXT[main.cause], LAUNCH_NEXT[0]) if main.cause in NEXT else LAUNCH_NEXT


# One value read per step for a progress bar costs about this much, and many programs want it.
NOTABLE_GAP: Final = 0.02
# A single call may be the program's end, or the profiler's.
MIN_CALLS: Final = 2
READS: Final = (
    "Keep values on the device: loss.detach() instead of loss.item(), torch.where instead of if, "
    "self.log(name, tensor) with Trainer(log_every_n_steps=50)."
)
ADVICE: Final = {
    "aten::item": READS,
    "aten::_local_scalar_dense": READS,
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


def synchronization(trace: TraceReport) -> list[Finding]:
    """Find gaps on the device after calls that make the host wait for it, and the calls."""
    window = trace.gpu_window
    calls = [call for call in trace.synchronizations if call.gap_ns > 0]
    if window is None or not window.window_ns or not calls:
        return []
    calls.sort(key=lambda call: call.gap_ns, reverse=True)
    gap_ns = min(sum(call.gap_ns for call in calls), window.idle_ns - idle_ns(trace, "data_loading"))
    count = sum(call.count for call in calls)
    share = gap_ns / window.window_ns
    if share <= NOTABLE_GAP or count < MIN_CALLS:
        return []
    steps = len(trace.steps)
    often = f"{times(round(count / steps))} per step" if count >= steps > 1 else times(count)
    return [
        Finding(
            rule="synchronization",
            severity=Severity.INFO if is_short(trace) else severity_of(share),
            sentence=(
                f"The host waits for the GPU {often}{on_rank(trace)}; the GPU then idles {percent(share)} of the time."
            ),
            why=(
                f"After these calls the GPU's queue is empty for {format_ns(gap_ns)} of {format_ns(window.window_ns)}: "
                f"{_named(calls)}."
            ),
            next_steps=(*dict.fromkeys(ADVICE[call.name] for call in calls if call.name in ADVICE), FIND),
            evidence=longest_in(trace, calls[0].longest_start_ns, calls[0].longest_gap_ns),
            numbers={
                "gap_share": share,
                "gap_ns": gap_ns,
                "waiting_ns": sum(call.total_ns for call in calls),
                "calls": count,
                "by_name": {call.name: {"calls": call.count, "gap_ns": call.gap_ns} for call in calls},
            },
            weight=share,
        )
    ]


def _named(calls: list[Synchronization]) -> str:
    return ", ".join(
        f"{format_ns(call.gap_ns)} after {shorter_name(call.name)} ({times(call.count)})" for call in calls[:2]
    )


# Below 1%, pinned memory, which takes time to allocate and cannot be swapped, does not pay off.
NOTABLE_COPIES: Final = 0.01
COPY_NEXT: Final = {
    "HtoD": (
        "Pin the batches: DataLoader(pin_memory=True); Lightning then copies them without blocking.",
        "Pin the program's own tensors: tensor.pin_memory().to(device, non_blocking=True).",
    ),
    "DtoH": (
        "Move results to the host less often: .cpu() every N steps, self.log(name, tensor) instead of a list.",
        "Copy into pinned memory: torch.empty(shape, pin_memory=True).copy_(x, non_blocking=True).",
    ),
}
DIRECTIONS: Final = {"HtoD": "to the GPU", "DtoH": "from the GPU"}


def blocking_transfers(trace: TraceReport) -> list[Finding]:
    """Find copies from or to pageable memory that no computation overlaps, by direction."""
    window = trace.gpu_window
    if window is None or not window.window_ns:
        return []
    found = [
        _transfer(trace, copies, window.window_ns)
        for kind in DIRECTIONS
        for copies in trace.copies
        if copies.kind == kind and copies.is_pageable
    ]
    return [finding for finding in found if finding is not None]


def _transfer(trace: TraceReport, copies: Copies, window_ns: int) -> Finding | None:
    # A copy from pageable memory blocks the host until it ends: without the overlap its total time counts.
    share = (copies.total_ns if copies.exposed_ns is None else copies.exposed_ns) / window_ns
    if share <= NOTABLE_COPIES:
        return None
    size = f"{format_bytes(copies.bytes)} in " if copies.bytes is not None else ""
    rate = f", {format_bytes(copies.bytes * 1e9 / copies.total_ns)}/s" if copies.bytes and copies.total_ns else ""
    return Finding(
        rule="blocking_transfers",
        severity=severity_of(share),
        sentence=f"Blocking copies {DIRECTIONS[copies.kind]} take {share:.1%} of the time{on_rank(trace)}.",
        why=(
            f"{times(copies.count).capitalize()}, {size}{format_ns(copies.total_ns)}{rate}: pageable memory is copied "
            "twice, and the call blocks until the copy ends."
        ),
        next_steps=COPY_NEXT[copies.kind],
        evidence=longest_in(trace, copies.longest_start_ns, copies.total_ns // max(copies.count, 1)),
        numbers={
            "kind": copies.kind,
            "share": share,
            "exposed_ns": copies.exposed_ns,
            "total_ns": copies.total_ns,
            "count": copies.count,
            "bytes": copies.bytes,
            "window_ns": window_ns,
        },
        weight=share,
    )
