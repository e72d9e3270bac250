"""The device's time in the steps outside windows: recording slows the host, so that the device waits longer for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.trace.model import Steady

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lightning_memprof.analysis.ledger.model import TimeLedger, TimeLine, TimePart
    from lightning_memprof.analysis.trace.model import Cause, IdleCause, TraceReport

_BUSY: Final[tuple[TimePart, ...]] = ("compute", "collective", "copy")


def in_steady_state(trace: TraceReport, step_ns: float) -> TraceReport:
    """Return a trace whose device ledger, idle times and gaps are those of a step outside windows.

    The device's work takes as long while it is recorded; it is idle for the rest of ``step_ns``, for the recorded
    causes in their recorded proportion. Where recorded steps are no longer than the others, their shares stay as they
    are. A cold start is not part of a steady state, and neither is what collectors do between two recorded steps.

    Args:
        trace: of a run.
        step_ns: the median duration of the steps outside windows.
    """
    ledger, window = trace.device_ledger, trace.gpu_window
    if ledger is None or window is None or not trace.steps or step_ns <= 0:
        return trace
    kept = {cause.cause: 1 - _of_recorder(trace, cause) / cause.total_ns for cause in trace.idle if cause.total_ns}
    lines = [
        replace(line, ns=line.ns * kept.get("python", 1.0)) if line.part == "idle_python" else line
        for line in ledger.lines
        if line.part != "cold_start"
    ]
    busy_ns = ledger.ns(*_BUSY)
    waits_ns = sum(line.ns for line in lines) - busy_ns
    if busy_ns + waits_ns <= step_ns:
        busy = idle = step_ns / (busy_ns + waits_ns)
    else:
        busy = min(step_ns / busy_ns, 1.0) if busy_ns else 1.0
        idle = max(step_ns - busy_ns, 0.0) / waits_ns
    # The time from the first kernel to the last has another idle share than the steps, of the same causes.
    working = busy * busy_ns / step_ns
    rest_ns = round(window.busy_ns * (1 - working) / working) if working else window.idle_ns
    recorded_ns = sum(kept[cause.cause] * cause.total_ns for cause in trace.idle if cause.total_ns)
    scale = rest_ns / recorded_ns if recorded_ns else 0.0
    return replace(
        trace,
        steady=Steady(step_ns=round(step_ns), busy_ns=round(busy * busy_ns), recorded_ns=round(ledger.step_ns)),
        device_ledger=_scaled(ledger, busy, idle, step_ns, lines),
        gpu_window=replace(window, idle_ns=rest_ns, window_ns=window.busy_ns + rest_ns),
        idle=_scaled_causes(trace.idle, scale, kept),
        synchronizations=tuple(replace(call, gap_ns=round(scale * call.gap_ns)) for call in trace.synchronizations),
    )


def _of_recorder(trace: TraceReport, cause: IdleCause) -> int:
    """Return the idle time in which collectors worked between recorded steps: the longest gap, if a step ends in it."""
    start = cause.longest_start_ns
    ends = [step.start_ns + step.duration_ns for step in trace.steps[:-1]]
    if cause.cause != "python" or start is None or not any(start <= end <= start + cause.longest_ns for end in ends):
        return 0
    return min(len(ends) * cause.longest_ns, cause.total_ns)


def _scaled(ledger: TimeLedger, busy: float, idle: float, step_ns: float, lines: list[TimeLine]) -> TimeLedger:
    scaled = [replace(line, ns=line.ns * (busy if line.part in _BUSY else idle)) for line in lines]
    return replace(
        ledger,
        step_ns=step_ns,
        median_ns=step_ns,
        basis=f"{ledger.basis}, as long as the steps outside windows",
        lines=tuple(sorted(scaled, key=lambda line: -line.ns)),
        communication=tuple(replace(line, ns=line.ns * busy) for line in ledger.communication),
    )


def _scaled_causes(causes: Iterable[IdleCause], scale: float, kept: Mapping[Cause, float]) -> tuple[IdleCause, ...]:
    found = [
        replace(
            cause,
            total_ns=round(scale * kept.get(cause.cause, 1.0) * cause.total_ns),
            longest_ns=round(scale * cause.longest_ns),
        )
        for cause in causes
    ]
    return tuple(sorted(found, key=lambda cause: -cause.total_ns))
