"""A program that makes the host wait for the device, and then the device for the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Finding, Severity
from lightning_memprof.analysis.findings.trace_parts import (
    idle_ns,
    is_short,
    longest_in,
    on_rank,
    severity_of,
    shorter_name,
    times,
)
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.trace.model import Synchronization, TraceReport

__all__ = ["synchronization"]

# One value read in each step for a progress bar costs about this, and many programs want it.
NOTABLE_SHARE: Final = 0.02
# One call may be the program's end, or the profiler's own.
MIN_CALLS: Final = 2
READS: Final = (
    "Keep values on the device: loss.detach() instead of loss.item(), torch.where instead of if, "
    "self.log(name, tensor) with Trainer(log_every_n_steps=50)."
)
ADVICE: Final = {
    "aten::item": READS,
    "aten::_local_scalar_dense": READS,
    "aten::is_nonzero": "Do not branch on a tensor's value in a step: torch.where instead of if, or every N steps.",
    "aten::nonzero": "Sizes that depend on values stop the host: mask with torch.where instead of indexing by a mask.",
    "aten::masked_select": "Sizes that depend on values stop the host: torch.where instead of masked_select.",
    "aten::unique": "Sizes that depend on values stop the host: do it in the DataLoader's workers.",
    "aten::to": "Copy without waiting: tensor.to(device, non_blocking=True) from DataLoader(pin_memory=True).",
    "aten::copy_": "Copy without waiting: tensor.copy_(other, non_blocking=True) from and to pinned memory.",
    "cudaDeviceSynchronize": "Take torch.cuda.synchronize() out of the steps: time them with torch.cuda.Event.",
    "cudaEventSynchronize": "Ask for event times after some steps, not in each: event.synchronize() stops the host.",
}
FIND: Final = 'Find the calls: torch.cuda.set_sync_debug_mode("warn") names the line of each.'


def synchronization(trace: TraceReport) -> list[Finding]:
    """Say that the device idles after calls that made the host wait for it, and which ones."""
    window = trace.gpu_window
    calls = [call for call in trace.synchronizations if call.gap_ns > 0]
    if window is None or not window.window_ns or not calls:
        return []
    gap_ns = min(sum(call.gap_ns for call in calls), window.idle_ns - idle_ns(trace, "data_loading"))
    count = sum(call.count for call in calls)
    share = gap_ns / window.window_ns
    if share <= NOTABLE_SHARE or count < MIN_CALLS:
        return []
    worst = max(calls, key=lambda call: call.gap_ns)
    steps = len(trace.steps)
    often = f"{times(round(count / steps))} a step" if count >= steps > 1 else times(count)
    return [
        Finding(
            rule="synchronization",
            severity=Severity.INFO if is_short(trace) else severity_of(share),
            sentence=(
                f"The host waits for the GPU {often}{on_rank(trace)}, and the GPU then idles "
                f"{percent(share)} of the time."
            ),
            why=(
                f"After such calls the device has nothing queued: {format_ns(gap_ns)} of {format_ns(window.window_ns)}"
                f"; {_named(calls)}."
            ),
            next_steps=(
                *dict.fromkeys(ADVICE[call.name] for call in _worst_first(calls) if call.name in ADVICE),
                FIND,
            ),
            evidence=longest_in(trace, worst.longest_start_ns, worst.longest_gap_ns),
            numbers={
                "gap_share": share,
                "gap_ns": gap_ns,
                "waiting_ns": sum(call.total_ns for call in calls),
                "calls": count,
                "by_name": {call.name: {"calls": call.count, "gap_ns": call.gap_ns} for call in _worst_first(calls)},
            },
            weight=share,
        )
    ]


def _worst_first(calls: list[Synchronization]) -> list[Synchronization]:
    return sorted(calls, key=lambda call: call.gap_ns, reverse=True)


def _named(calls: list[Synchronization]) -> str:
    shown = _worst_first(calls)[:2]
    return ", ".join(
        f"{format_ns(call.gap_ns)} after {shorter_name(call.name)} ({times(call.count)})" for call in shown
    )
