"""The device's time in the steps outside windows: recording slows the host, so that the device waits longer for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from lightning_memprof.account.ledger.model import TimeLine, total
from lightning_memprof.account.parts import BUSY, Part
from lightning_memprof.account.trace.model import IdleCause, Steady, TraceReport

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
    if ledger is None or window is None or not trace.steps or step_ns <= 0:
        return trace
    kept = {cause.cause: 1 - _of_recorder(trace, cause) / cause.total_ns for cause in trace.idle if cause.total_ns}
    waits = [
        replace(line, ns=line.ns * kept.get(Part.IDLE_PYTHON, 1.0)) if line.part == Part.IDLE_PYTHON else line
        for line in ledger.lines
        if line.part not in (*BUSY, *_NOT_OF_PASSES)
    ]
    busy_ns, data_ns = ledger.ns(*BUSY), ledger.ns(Part.IDLE_DATA)
    recorded_ns = busy_ns + total(waits) + data_ns
    if not busy_ns:
        return trace
    busy = step_ns / recorded_ns if recorded_ns <= step_ns else min(step_ns / busy_ns, 1.0)
    idle_ns = max(step_ns - busy * busy_ns, 0.0)
    others_ns = min(others_ns, idle_ns) if waits else idle_ns
    driver_ns = total(line for line in waits if line.part == Part.IDLE_ALLOCATOR)
    driver, idle = _factors(driver_ns, total(waits) - driver_ns, idle_ns - others_ns)
    lines = [
        *(replace(line, ns=busy * line.ns) for line in ledger.of(*BUSY)),
        *(replace(line, ns=(driver if line.part == Part.IDLE_ALLOCATOR else idle) * line.ns) for line in waits),
        TimeLine(part=Part.IDLE_DATA, name=_OTHERS, ns=others_ns),
    ]
    # The time from the first kernel to the last has another idle share than the steps, of the same causes.
    working = busy * busy_ns / step_ns
    rest_ns = round(window.busy_ns * (1 - working) / working)
    causes, scale = _scaled(trace.idle, kept, rest_ns, rest_ns * others_ns / idle_ns if idle_ns else 0.0)
    return replace(
        trace,
        steady=Steady(step_ns=round(step_ns), busy_ns=round(busy * busy_ns), others_ns=round(others_ns)),
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
        idle=causes,
        synchronizations=tuple(replace(call, gap_ns=round(scale * call.gap_ns)) for call in trace.synchronizations),
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


def _scaled(
    recorded: Iterable[IdleCause], kept: Mapping[Part, float], idle_ns: float, others_ns: float
) -> tuple[tuple[IdleCause, ...], float]:
    """Return causes that sum to ``idle_ns``, with one of ``others_ns`` for loading, and the factor of the others."""
    causes = [cause for cause in recorded if cause.cause != Part.IDLE_DATA and cause.total_ns]
    driver_ns = sum(cause.total_ns for cause in causes if cause.cause == Part.IDLE_ALLOCATOR)
    sum_ns = sum(kept[cause.cause] * cause.total_ns for cause in causes)
    driver, idle = _factors(driver_ns, sum_ns - driver_ns, idle_ns - others_ns)
    found = []
    for cause in causes:
        scale = driver if cause.cause == Part.IDLE_ALLOCATOR else idle
        of_cause = round(scale * kept[cause.cause] * cause.total_ns)
        found.append(
            replace(
                cause,
                total_ns=of_cause,
                longest_ns=round(scale * cause.longest_ns),
                long_ns=round(scale * cause.long_ns),
            )
        )
    others = IdleCause(cause=Part.IDLE_DATA, total_ns=round(others_ns), count=0, longest_ns=0, example=_OTHERS)
    return tuple(sorted([*found, *([others] if others_ns else [])], key=lambda cause: -cause.total_ns)), idle


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
