"""The device's time in the steps outside windows: recording slows the host, so that the device waits longer for it."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from lightning_memprof.account.ledger.model import TimeLine
from lightning_memprof.account.parts import BUSY, Part
from lightning_memprof.account.trace.model import IdleCause, TraceReport

_NOT_OF_PASSES: Final = (Part.IDLE_DATA, Part.COLD_START)
_OTHERS: Final = "other work in the step"


def in_steady_state(trace: TraceReport, step_ns: float, others_ns: float = 0.0) -> TraceReport:
    """Return a trace whose device ledger, idle times and gaps are those of a step outside windows.

    The device's work takes as long while it is recorded; it is idle for the rest of ``step_ns``, for the recorded
    causes in their recorded proportion; calls to the driver for memory take as long as recorded. Where recorded
    steps are no longer than the others, their shares stay as they are. A cold start is not part of a steady state, and
    neither is what collectors do between two recorded steps.
    What the host does in a step beside the passes and the optimizer is the first cause, and one line ``idle_data``.

    Args:
        trace: of a run.
        step_ns: the median duration of the steps outside windows.
        others_ns: of it, waiting for data, transfers, hooks, callbacks and logging.
    """
    ledger, window = trace.device_ledger, trace.gpu_window
    busy_ns = ledger.ns(*BUSY) if ledger is not None else 0.0
    if ledger is None or window is None or not trace.steps or step_ns <= 0 or not busy_ns:
        return trace
    factors: dict[Part, float] = {line.part: 1.0 for line in ledger.lines if line.part not in (*BUSY, *_NOT_OF_PASSES)}
    factors |= {cause.cause: 1 - _of_recorder(trace, cause) / cause.total_ns for cause in trace.idle if cause.total_ns}
    waits_ns: dict[Part, float] = {
        part: factor * ledger.ns(part) for part, factor in factors.items() if part not in _NOT_OF_PASSES
    }
    recorded_ns = busy_ns + sum(waits_ns.values()) + ledger.ns(Part.IDLE_DATA)
    busy = step_ns / recorded_ns if recorded_ns <= step_ns else min(step_ns / busy_ns, 1.0)
    idle_ns = max(step_ns - busy * busy_ns, 0.0)
    others_ns = min(others_ns, idle_ns) if sum(waits_ns.values()) else idle_ns
    driver_ns = waits_ns.pop(Part.IDLE_ALLOCATOR, 0.0)
    driver, idle = _factors(driver_ns, sum(waits_ns.values()), idle_ns - others_ns)
    scales: dict[Part, float] = {part: idle * factors[part] for part in waits_ns} | {Part.IDLE_ALLOCATOR: driver}
    scales |= dict.fromkeys(BUSY, busy)
    lines = [replace(line, ns=scales.get(line.part, 0.0) * line.ns) for line in ledger.lines]
    lines.append(TimeLine(part=Part.IDLE_DATA, name=_OTHERS, ns=others_ns))
    causes = [_scaled(cause, scale) for cause in trace.idle if (scale := scales.get(cause.cause))]
    if others := round(others_ns * ledger.steps):
        causes.append(IdleCause(cause=Part.IDLE_DATA, total_ns=others, count=0, longest_ns=0, example=_OTHERS))
    # The time from the first kernel to the last has another idle share than the steps.
    rest_ns = round(window.busy_ns * idle_ns / (step_ns - idle_ns))
    return replace(
        trace,
        is_steady=True,
        device_ledger=replace(
            ledger,
            step_ns=step_ns,
            median_ns=step_ns,
            basis=f"{ledger.basis}, as long as the steps outside windows",
            lines=tuple(sorted((line for line in lines if line.ns), key=lambda line: -line.ns)),
            communication=tuple(replace(line, ns=busy * line.ns) for line in ledger.communication),
            passes=tuple(replace(line, ns=busy * line.ns) for line in ledger.passes),
        ),
        gpu_window=replace(window, idle_ns=rest_ns, window_ns=window.busy_ns + rest_ns),
        idle=tuple(sorted(causes, key=lambda cause: -cause.total_ns)),
        synchronizations=tuple(replace(call, gap_ns=round(idle * call.gap_ns)) for call in trace.synchronizations),
    )


def _of_recorder(trace: TraceReport, cause: IdleCause) -> int:
    """Return the idle time in which collectors worked between recorded steps: the longest gap, if a step ends in it."""
    start = cause.longest_start_ns
    ends = [step.start_ns + step.duration_ns for step in trace.steps[:-1]]
    if cause.cause != Part.IDLE_PYTHON or start is None:
        return 0
    if not any(start <= end <= start + cause.longest_ns for end in ends):
        return 0
    return min(len(ends) * cause.longest_ns, cause.total_ns)


def _scaled(cause: IdleCause, scale: float) -> IdleCause:
    """Return a cause whose gaps are shorter or longer by a factor."""
    times = ("total_ns", "longest_ns", "apart_ns", "long_ns")
    return replace(cause, **{name: round(scale * getattr(cause, name)) for name in times})


def _factors(driver_ns: float, slowed_ns: float, idle_ns: float) -> tuple[float, float]:
    """Return the factors of calls to the driver and of other idle time that make their sum ``idle_ns``.

    Recording slows Python and operators; the driver takes as long for memory, if the idle time has room for that.
    """
    recorded_ns = driver_ns + slowed_ns
    if not recorded_ns:
        return 0.0, 0.0
    if recorded_ns <= idle_ns or not slowed_ns:
        return idle_ns / recorded_ns, idle_ns / recorded_ns
    kept_ns = min(driver_ns, idle_ns)
    return (kept_ns / driver_ns if driver_ns else 0.0), (idle_ns - kept_ns) / slowed_ns
