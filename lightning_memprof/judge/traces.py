"""Measures and evidence that the rules about operator traces share."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final, NamedTuple

from lightning_memprof.account.ledger.model import TimeLedger, total
from lightning_memprof.account.parts import Part
from lightning_memprof.judge.finding import Evidence, Recovery, Severity
from lightning_memprof.judge.optimizers import FOREACH, FUSED
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    MORE_OF_TRACE,
    OPEN_TRACE,
    RECORD_LATER,
    RECORD_REPLAY,
    SLOW_BATCH,
    WORKERS,
    Need,
    Remedy,
    applicable,
)
from lightning_memprof.read.trace.idle import COMPILES
from lightning_memprof.read.trace.kernel_names import kernel_name, kernel_names
from lightning_memprof.read.trace.model import (
    CollectiveTotals,
    IdleCause,
    Kernel,
    Synchronization,
    TraceReport,
)
from lightning_memprof.units import quoted

# Of exposed loading, and of copies from pageable memory: both can run beside the step.
BESIDE_THE_STEP: Final = (0.5, 1.0)
# Some of the work before launches and in calls stays.
SAVED: Final = (0.5, 1.0)
# A remedy for less than 10% makes the program less than 1.12 times as fast.
NOTABLE_SHARE: Final = 0.10
# From 30% on, it decides how long the run takes: the program would be 1.4x as fast or faster without it.
SEVERE_SHARE: Final = 0.30
# A cause with this share of the idle time explains it.
MAIN_PART: Final = 0.5
# Fetching a batch that is ready takes less, and with a device less than the second.
MIN_COST_NS: Final = 2_000_000
MIN_DEVICE_COST_NS: Final = 1_000_000
# In a trace with a single step, a loader that starts its workers looks like a slow loader.
MIN_TRACE_STEPS: Final = 2
# A shorter recording is a sample: the first launch alone takes milliseconds.
SHORT_WINDOW_NS: Final = 1_000_000
LONGEST_NAME: Final = 72

# Of the names of kernels that send numbers of 16 bits.
HALF: Final = re.compile(r"_b?f16|bfloat16|half", re.IGNORECASE)
LATER: Final = (RECORD_LATER,)


def remedies(trace: TraceReport, *choices: Remedy) -> tuple[Remedy, ...]:
    """Return the next steps that apply to the recorded program; if none does, the step is to open the trace."""
    return fitting(trace, *choices) or (OPEN_TRACE.filled(file=quoted(trace.file)),)


def fitting(trace: TraceReport, *choices: Remedy) -> tuple[Remedy, ...]:
    """Return the next steps that apply to the recorded program, with its optimizer and profiler."""
    program = trace.program
    several = (trace.world_size or 1) > 1 or bool(trace.collectives)
    stacks = program.has_stacks or "with_stack" in trace.recorded_with
    holds: set[Need] = {
        "lightning" if program.is_lightning else "other program",
        "training" if program.trains else "inference",
        "compiled" if program.is_compiled else "eager",
        "stacks" if stacks else "no stacks",
        "ranks" if several else "one rank",
    }
    holds |= set() if program.has_graphs else {"no graphs"}
    sent = [kernel.name for kernel in trace.kernels if kernel.kind == "communication"]
    holds |= set() if any(map(HALF.search, sent)) else {"sends float32"}
    optimizer = program.loop_optimizer
    holds |= {"optimizer loop"} if optimizer in FOREACH else set()
    values = {
        "optimizer": optimizer,
        "kernels": "fused" if optimizer in FUSED else "foreach",
        "profiler": profiler_of(trace),
        "mode": ', mode="reduce-overhead"' if has_graphs(trace) else "",
    }
    # Others have their values, in which a brace is a brace.
    steps = (
        choice.filled(**values) if any(f"{{{name}}}" in choice.text for name in values) else choice
        for choice in applicable(holds, *choices)
    )
    return tuple(dict.fromkeys(steps))


def profiler_of(trace: TraceReport) -> str:
    """Return the class that records the program."""
    return "ExtendedPyTorchProfiler" if trace.program.is_lightning else "torch.profiler.profile"


def has_graphs(trace: TraceReport) -> bool:
    """Return whether the device can run graphs of kernels: one of NVIDIA or AMD, which torch calls ``cuda``."""
    return not trace.runtime_calls or any(call.name.startswith(("cu", "hip")) for call in trace.runtime_calls)


def seen_in(trace: TraceReport, start_ns: int | None = None, duration_ns: int = 0) -> tuple[Evidence, ...]:
    """Return the trace as evidence: the whole file, or ``duration_ns`` from ``start_ns`` and the steps it overlaps."""
    begin = trace.start_ns if start_ns is None else start_ns
    end = trace.end_ns if start_ns is None else start_ns + duration_ns
    touched = [
        step.number for step in trace.steps if step.start_ns <= end and begin <= step.start_ns + step.duration_ns
    ]
    return (
        Evidence(
            artifact=os.fspath(trace.file),
            rank=trace.rank,
            steps=(min(touched), max(touched)) if touched else None,
            start_ns=begin,
            end_ns=end,
        ),
    )


def longest_in(trace: TraceReport, start_ns: int | None, duration_ns: int) -> tuple[Evidence, ...]:
    """Return the trace as evidence and, if its start is known, the longest single occurrence."""
    return seen_in(trace) if start_ns is None else (*seen_in(trace), *seen_in(trace, start_ns, duration_ns))


def idle_ns(trace: TraceReport, *causes: Part) -> int:
    """Return the idle time of the devices that has one of these causes."""
    return sum(cause.total_ns for cause in trace.idle if cause.cause in causes)


# Causes of idle time that a program can change.
CAUSES: Final = tuple(
    part for part in Part if part.group == "device idle" and part not in {Part.IDLE_UNKNOWN, Part.COLD_START}
)
LAUNCHING: Final = (Part.IDLE_PYTHON, Part.IDLE_OPERATORS, Part.IDLE_LAUNCH, Part.IDLE_GRAPH, Part.IDLE_LOADING)


class IdleTime(NamedTuple):
    """Idle time of the device by cause, longest first, ns: ``total_ns`` in ``span_ns``."""

    total_ns: int
    span_ns: int
    causes: tuple[IdleCause, ...]


def idle_time(trace: TraceReport) -> IdleTime | None:
    """Return the idle time in :attr:`TraceReport.window`; a recording of less than 1 ms does not tell."""
    window = trace.window
    if window is None or not window.window_ns or is_brief(trace):
        return None
    return IdleTime(window.idle_ns, window.window_ns, trace.idle)


_GRAPH: Final = re.compile("StreamBeginCapture|GraphInstantiate")


def cold_start_of(cause: IdleCause) -> str:
    """Return what the program does in a cold start, as a clause."""
    if _GRAPH.search(cause.example):
        return f"the host records a {'HIP' if cause.example.startswith('hip') else 'CUDA'} graph"
    if cause.example.endswith(COMPILES):
        return "torch.compile compiles"
    return f"the host is in {shorter_name(cause.example)}" if cause.example else "the host is in its first calls"


def after_start(trace: TraceReport, cause: IdleCause) -> tuple[Remedy, ...]:
    """Return how to record a program after a cold start."""
    return (RECORD_REPLAY,) if _GRAPH.search(cause.example) else remedies(trace, *LATER)


# A single call may be the program's end, or the profiler's.
MIN_CALLS: Final = 2


class AfterWaits(NamedTuple):
    """Idle time after calls that make the host wait for the device: of ``gap_ns``, the waits cause ``own_ns``.

    For a copy to pageable memory the host waits in any case.
    """

    calls: tuple[Synchronization, ...]
    number: int
    gap_ns: int
    own_ns: int


def after_waits(trace: TraceReport) -> AfterWaits | None:
    """Return the idle time after waits if it is notable, else None."""
    window = trace.window
    calls = sorted((call for call in trace.synchronizations if call.gap_ns > 0), key=lambda call: -call.gap_ns)
    if window is None or not window.window_ns or not calls or is_brief(trace):
        return None
    gap_ns = min(sum(call.gap_ns for call in calls), window.idle_ns - idle_ns(trace, Part.IDLE_DATA))
    number = sum(call.count for call in calls)
    if gap_ns <= POLICY.note * window.window_ns or number < MIN_CALLS:
        return None
    own_ns = sum(call.own_ns for call in calls)
    copied = sum(copies.exposed_ns or 0 for copies in trace.copies if copies.is_pageable and copies.kind == "DtoH")
    return AfterWaits(tuple(calls), number, gap_ns, min(gap_ns, max(own_ns - copied, 0)))


class Loading(NamedTuple):
    """Loading of batches, in ns.

    ``exposed_ns`` is the part of ``total_ns`` that no device work overlaps, ``most_ns`` the part in one step, and
    ``steps`` the number of steps in ``span_ns``; without steps it is the number of loads.
    """

    total_ns: int
    exposed_ns: int
    most_ns: int
    span_ns: int
    steps: int

    @property
    def share(self) -> float:
        """The exposed part, as a share of the span."""
        return self.exposed_ns / self.span_ns


def exposed_loading(trace: TraceReport) -> Loading | None:
    """Return the loading of a trace if so much of it is exposed that the program is input-bound, else None."""
    found = _loading_in_steps(trace) if trace.steps else _loading_without_steps(trace)
    has_device = trace.gpu_window is not None
    if found is None or not found.span_ns or not found.total_ns or found.share <= NOTABLE_SHARE:
        return None
    if found.exposed_ns / found.steps < (MIN_DEVICE_COST_NS if has_device else MIN_COST_NS):
        return None
    is_short = found.span_ns / found.steps < POLICY.short_step_ns or found.steps < MIN_TRACE_STEPS
    return None if is_short and not has_device else found


def _loading_in_steps(trace: TraceReport) -> Loading:
    window = trace.work_window
    total_ns = window.data_loading_ns if window else sum(step.data_loading_ns for step in trace.steps)
    return Loading(
        total_ns=total_ns,
        exposed_ns=_exposed_ns(trace, total_ns),
        most_ns=max(step.data_loading_ns for step in trace.steps),
        span_ns=window.window_ns if window else sum(step.duration_ns for step in trace.steps),
        steps=len(trace.steps),
    )


def _loading_without_steps(trace: TraceReport) -> Loading | None:
    window, loads = trace.gpu_window, trace.loads
    if not loads.count:
        return None
    exposed_ns = loads.total_ns if window is None else idle_ns(trace, Part.IDLE_DATA)
    return Loading(
        total_ns=loads.total_ns if window is None else min(loads.total_ns, window.window_ns),
        exposed_ns=exposed_ns,
        most_ns=loads.max_ns,
        span_ns=trace.end_ns - trace.start_ns if window is None else window.window_ns,
        steps=loads.count,
    )


def _exposed_ns(trace: TraceReport, loading_ns: int) -> int:
    """Return the loading time that no device work overlaps, in nanoseconds."""
    window = trace.work_window
    if window is None:
        return loading_ns
    if trace.idle:
        return min(idle_ns(trace, Part.IDLE_DATA), loading_ns)
    # Without causes of idle time: what is neither busy nor loading can be no longer than the rest.
    known_ns = window.data_loading_exposed_ns
    return min(loading_ns, max(loading_ns - window.busy_ns, 0) if known_ns is None else known_ns)


def computing(trace: TraceReport) -> list[Kernel]:
    """Return the kernels that compute: no copies, no collectives."""
    return [kernel for kernel in trace.kernels if kernel.kind == "compute"]


def total_ns(kernels: Iterable[Kernel]) -> int:
    """Return the device time of kernels in nanoseconds."""
    return sum(kernel.total_ns for kernel in kernels)


def severity_of(share: float) -> Severity:
    """Return the severity of a share of the time that is above a rule's threshold."""
    if share >= SEVERE_SHARE:
        return Severity.CRITICAL
    return Severity.WARNING if share >= NOTABLE_SHARE else Severity.INFO


def share_of_time(trace: TraceReport, ns: float) -> float:
    """Return device time in all steps as a share of the steps' time, 0 to 1; several streams count as one."""
    whole_ns = steps_ns(trace)
    return min(ns / whole_ns, 1.0) if whole_ns else 0.0


def span(trace: TraceReport) -> str:
    """Return what shares of a trace's time are of."""
    return "each step" if trace.steps else "the recorded time"


def is_brief(trace: TraceReport) -> bool:
    """Return whether too little was recorded to say how busy a device is."""
    window = trace.gpu_window
    return trace.steady is None and window is not None and window.window_ns < SHORT_WINDOW_NS


def on_rank(trace: TraceReport) -> str:
    """Return ``" on rank 3"`` if the trace is from one of several ranks, else an empty string."""
    several = trace.rank is not None and (trace.rank > 0 or (trace.world_size or 1) > 1)
    return f" on rank {trace.rank}" if several else ""


def times(count: int) -> str:
    """Return a count as an adverb: ``"once"``, ``"12 times"``."""
    return "once" if count == 1 else f"{count:,} times"


def recovered_ns(
    ledger: TimeLedger | None,
    saves: tuple[float, float],
    *parts: str,
    recorded_ns: float | None = None,
    name: str | None = None,
) -> Recovery | None:
    """Return what a remedy recovers: the min and max share of the time of lines of a ledger.

    Args:
        ledger: of the trace; None returns None.
        saves: the two shares, 0 to 1.
        parts: of the lines.
        recorded_ns: the time of the fault in all steps, where it may be less than that of the lines.
        name: of the lines, if not all.
    """
    if ledger is None:
        return None
    ns = total(line for line in ledger.of(*parts) if name in {None, line.name})
    ns = ns if recorded_ns is None else min(ns, max(recorded_ns, 0) / ledger.steps)
    return Recovery(unit="ns", min=ns * saves[0], max=ns * saves[1], whole=ledger.step_ns) if ns else None


def listed(counted: Iterable[tuple[str, int]]) -> str:
    """Return names with their counts: ``"aten::add (800), aten::mul (20)"``."""
    found = list(counted)
    names = kernel_names(name for name, _ in found)
    return ", ".join(f"{_cut(name)} ({count:,})" for name, (_, count) in zip(names, found, strict=True))


def shorter_name(name: str) -> str:
    """Return a name that fits a sentence: of a kernel, its function and operation."""
    return _cut(kernel_name(name))


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


# The same collective takes the same time: if it takes this many times as long during a return, it waits for that.
SLOW_FACTOR: Final = 10


def slow_collectives(trace: TraceReport) -> list[CollectiveTotals]:
    """Return the collectives whose longest took many times the median during a call to the driver."""
    found = [
        collective
        for collective in trace.collectives
        if collective.count > 1
        and (start := collective.longest_start_ns) is not None
        and collective.max_ns >= SLOW_FACTOR * max(collective.median_ns, 1)
        and _touches(trace.allocator_spans, start, start + collective.max_ns)
    ]
    return sorted(found, key=lambda collective: collective.max_ns, reverse=True)


def _touches(spans: tuple[tuple[int, int], ...], start_ns: int, end_ns: int) -> bool:
    # Calls of one process hold a lock: they end in the order in which they begin.
    place = bisect_left(spans, start_ns, key=lambda span: span[1])
    return place < len(spans) and spans[place][0] <= end_ns


def waited_ns(slow: Iterable[CollectiveTotals]) -> int:
    """Return how much longer than usual the longest of slow collectives took."""
    return sum(collective.max_ns - collective.median_ns for collective in slow)


def steps_ns(trace: TraceReport) -> int:
    """Return the time of a trace's steps."""
    # A host that is ahead ends its steps before the device.
    return max((window.window_ns for window in (trace.work_window, trace.gpu_window) if window), default=0)


def workers_in(ledger: TimeLedger | None, *, in_one: bool) -> Remedy:
    """Return the remedy for the workers that the iterators of a trace show; ``in_one`` batch most of the loading is."""
    names = " ".join(line.name for line in ledger.of("idle_data", "data_wait")) if ledger else ""
    if "_MultiProcessing" not in names:
        return WORKERS.filled(workers=POLICY.workers)
    return SLOW_BATCH if in_one else MORE_OF_TRACE
