"""A trace whose recording took so much time that its idle times say little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Finding, Severity
from lightning_memprof.analysis.findings.trace_parts import NOTABLE_SHARE, idle_ns, on_rank, seen_in, times
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.trace.model import TraceReport

__all__ = ["recording_overhead"]

# torch's profiler takes 0.6 us of the host for a Python function and 2 us or more for an operator: measured on a CPU.
EVENT_NS: Final = 1_000
# Where the host prepares kernels for less than this part of the time, a slower host changes nothing.
HOST_MATTERS: Final = 0.10
# Kineto files under the same category what the driver does for the program.
OTHERS: Final = frozenset(
    {"Driver Compiler", "Lazy Function Loading", "Runtime Triggered Module Loading", "Command Buffer Full"}
)
LESS: Final = {
    "with_stack": "ExtendedPyTorchProfiler(with_stack=False)",
    "profile_memory": "profile_memory=False",
    "record_shapes": "record_shapes=False",
}


def recording_overhead(trace: TraceReport) -> list[Finding]:
    """Say that the profiler's own work, or the number of what it recorded, is a large part of what the trace shows."""
    window = trace.gpu_window
    if window is None or not window.window_ns:
        return []
    own_ns = sum(cost.total_ns for cost in trace.profiler_overhead if cost.name not in OTHERS)
    span_ns = max(trace.end_ns - trace.start_ns, window.window_ns)
    host_ns = idle_ns(trace, "python", "operators", "launch")
    estimated_ns = min(trace.events * EVENT_NS, span_ns) if host_ns > HOST_MATTERS * window.window_ns else 0
    share = min(max(own_ns, estimated_ns) / span_ns, 1.0)
    if share <= NOTABLE_SHARE:
        return []
    named = own_ns >= estimated_ns
    return [
        Finding(
            rule="recording_overhead",
            # It says nothing of the program: it says how far the other findings can be believed.
            severity=Severity.WARNING if named and window.idle_ns > HOST_MATTERS * window.window_ns else Severity.INFO,
            sentence=(
                f"The profiler itself takes {'' if named else 'about '}{percent(share)} of the recorded time"
                f"{on_rank(trace)}: without it the GPU idles less than this trace shows."
            ),
            why=_why(trace, own_ns, span_ns, named=named),
            next_steps=_next_steps(trace),
            evidence=seen_in(trace),
            numbers={
                "share": share,
                "profiler_ns": own_ns,
                "estimated_ns": estimated_ns,
                "events": trace.events,
                "span_ns": span_ns,
                "recorded_with": list(trace.recorded_with),
            },
            weight=share,
        )
    ]


def _why(trace: TraceReport, own_ns: int, span_ns: int, *, named: bool) -> str:
    if named:
        shown = ", ".join(
            f"{cost.name} {times(cost.count)}" for cost in trace.profiler_overhead if cost.name not in OTHERS
        )
        return f"{format_ns(own_ns)} of {format_ns(span_ns)} are its own work: {shown}."
    options = f", recorded with {', '.join(trace.recorded_with)}" if trace.recorded_with else ""
    return f"{trace.events:,} events in {format_ns(span_ns)}{options}, at about {format_ns(EVENT_NS)} of the host each."


def _next_steps(trace: TraceReport) -> tuple[str, ...]:
    less = [LESS[name] for name in LESS if name in trace.recorded_with]
    steps = (f"Record less of each step: {', '.join(less)}.",) if less else ()
    return (*steps, "Compare with the steps that were not recorded before acting on idle times; the pulse has them.")
