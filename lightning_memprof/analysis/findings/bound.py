"""What a run is bound by where no fault is worth more: a module, a Python loop, a busy device."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from lightning_memprof.analysis.findings.model import (
    MIN_STEPS,
    NOTHING_FOUND,
    SHORT_STEP_NS,
    Evidence,
    Facts,
    Finding,
    Severity,
)
from lightning_memprof.analysis.findings.modules import faster, heaviest_module, operator_family
from lightning_memprof.analysis.findings.traces import shorter_name
from lightning_memprof.analysis.run.locate import shown_path, shown_place
from lightning_memprof.analysis.trace.intervals import length, union
from lightning_memprof.units import format_bytes, format_count, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprof.analysis.ledger.model import TimeLedger
    from lightning_memprof.analysis.run.model import Rank, Run
    from lightning_memprof.analysis.snapshot.report import SnapshotReport
    from lightning_memprof.analysis.trace.model import TraceReport

__all__ = ["nothing_found", "nothing_in_files"]

# In fewer steps the first ones, which are not typical, are most of the run.
FEW_STEPS: Final = 5
# From this share of forward and backward on, the model decides how long a step takes.
COMPUTE_BOUND: Final = 0.5
MAX_MESSAGE: Final = 120
LARGER: Final = "Give each step more work, such as a larger batch, before looking for a bottleneck."
RECORD_OPERATORS: Final = 'Record the operators of some steps too: Trainer(..., profiler="fts_extended")'
RECORD_STACKS: Final = (
    "Record stacks: AllocatorHistory(), or torch.cuda.memory._record_memory_history(stacks='python')."
)
VIEW: Final = "See every operator on a timeline: lightning-memprof view"
DOING: Final = {
    "data_wait": "data wait",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "callbacks": "callbacks",
    "other": "untracked time",
}


def nothing_found(facts: Facts) -> Finding:
    """Return the dominant phase of the step, and the command that shows more."""
    run = facts.run
    rank = next((rank for rank in (run.lead, *run.ranks) if rank.rank in facts.statistics), run.lead)
    statistics = facts.statistics.get(rank.rank)
    failed = next((rank.exception for rank in run.ranks if rank.exception), None)
    early = f"The run ended early with {failed[:MAX_MESSAGE]}. " if failed else ""
    again = "Train for" if facts.is_fit else "Run"
    if statistics is None:
        return Finding(
            rule=NOTHING_FOUND,
            severity=Severity.NONE,
            sentence="No step was measured.",
            why=f"{early}The run has no pulse: it ended before its first step did, or the pulse is disabled.",
            next_steps=(f"{again} some steps with MemProfilerCallback() in Trainer(callbacks=[...]).",),
        )
    first, second = sorted(DOING, key=lambda phase: statistics.breakdown_ns[phase] or 0, reverse=True)[:2]
    numbers = {"dominant": first, "share": statistics.share(first), "duration_ns": statistics.mean_ns}
    if statistics.steps < MIN_STEPS:
        return Finding(
            rule=NOTHING_FOUND,
            severity=Severity.INFO,
            sentence="Too few steps to judge.",
            why=f"{early}{format_count(statistics.steps, 'step')} recorded; the first one is not typical.",
            next_steps=(f"{again} at least {FEW_STEPS} steps.", _look_further(run)),
            numbers=numbers,
        )
    few = f" Only {statistics.steps} steps were recorded." if statistics.steps < FEW_STEPS else ""
    if (bound := _bound(facts, rank)) is not None:
        return replace(bound, why=f"{early}{bound.why}{few}")
    dominant = f"{DOING[first]} takes {percent(statistics.share(first))} of each step"
    mean = f"The mean step takes {format_ns(statistics.mean_ns)}"
    runner_up = f"{DOING[second]} {percent(statistics.share(second))}"
    around = _around(facts.ledgers[rank.rank])
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE if around is None else Severity.INFO,
        sentence=around or f"{dominant[0].upper()}{dominant[1:]}.",
        why=f"{early}{mean}; " + (f"next: {runner_up}.{few}" if around is None else f"{dominant}, {runner_up}.{few}"),
        next_steps=(_look_further(run),) if around is None else (LARGER, _look_further(run)),
        numbers=numbers,
    )


def _bound(facts: Facts, rank: Rank) -> Finding | None:
    """Return the module that bounds forward and backward, None where these are less than half of the step."""
    ledger = facts.ledgers[rank.rank]
    passes = ledger.ns("forward", "backward")
    if passes < COMPUTE_BOUND * ledger.step_ns:
        return None
    heaviest = heaviest_module(ledger)
    if heaviest is None:
        sentence = (
            f"Compute-bound: forward and backward take {percent(passes / ledger.step_ns)} of each step "
            f"({format_ns(passes)} of {format_ns(ledger.step_ns)})"
        )
        why = f"Forward takes {format_ns(ledger.ns('forward'))}, backward {format_ns(ledger.ns('backward'))} per step."
        steps: tuple[str, ...] = (_look_further(facts.run),)
    else:
        sentence = (
            f"Compute-bound: {heaviest.module} takes {percent(heaviest.ns / ledger.step_ns)} of each step "
            f"({format_ns(heaviest.ns)} of {format_ns(ledger.step_ns)})"
        )
        why = (
            f"{percent(heaviest.family_ns / heaviest.ns)} of its time is {heaviest.family}; forward takes "
            f"{format_ns(ledger.ns('forward'))}, backward {format_ns(ledger.ns('backward'))} per step."
        )
        steps = (*faster(heaviest, rank), _look_further(facts.run))
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        sentence=f"{sentence}{facts.on_rank(rank)}.",
        why=why,
        next_steps=steps,
        evidence=(facts.pulse(rank),),
        numbers={
            "rank": rank.rank,
            "module": heaviest.module if heaviest else None,
            "module_ns": heaviest.ns if heaviest else None,
            "operators": heaviest.family if heaviest else None,
            "passes_ns": passes,
            "duration_ns": ledger.step_ns,
        },
    )


def _around(ledger: TimeLedger) -> str | None:
    """Return a sentence if callbacks, hooks and untracked time are more of a step than forward and backward."""
    around = ledger.ns("callback", "module_hook", "untracked", "logging", "transfer")
    if around <= ledger.ns("forward", "backward"):
        return None
    length = "very short" if ledger.step_ns < SHORT_STEP_NS else "short"
    return f"The steps are {length}: callbacks and untracked time take {percent(around / ledger.step_ns)} of each."


def _look_further(run: Run) -> str:
    """Return the command for the most detailed artifact of the run."""
    if any(artifact.type == "trace" and artifact.state == "present" for artifact in run.artifacts):
        return f"{VIEW} {shlex.quote(shown_place(run.directory, run.root, run.url))}"
    return RECORD_OPERATORS


def nothing_in_files(traces: Sequence[TraceReport], snapshots: Sequence[SnapshotReport]) -> Finding:
    """Return how busy the device was, or the peak memory, and the command that shows more."""
    on_device = [trace for trace in traces if trace.gpu_window is not None]
    if on_device:
        return _of_device(min(on_device, key=_busy))
    used = [snapshot for snapshot in snapshots if snapshot.devices]
    if used:
        return _of_memory(
            max(used, key=lambda snapshot: max(device.peak_requested_bytes for device in snapshot.devices))
        )
    if traces:
        return _of_host(traces[0])
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        sentence="Nothing was recorded.",
        why="The snapshot has no device: its process allocated no device memory."
        if snapshots
        else "No trace and no snapshot is readable.",
        next_steps=("Record a training: Trainer(callbacks=[MemProfilerCallback()], profiler='fts_extended').",),
    )


def _busy(trace: TraceReport) -> float:
    window = trace.gpu_window
    return window.busy_ns / window.window_ns if window is not None and window.window_ns else 1.0


def _of_device(trace: TraceReport) -> Finding:
    window = trace.gpu_window
    if window is None:
        raise ValueError(f"{trace.file}: has no device event")
    parts = {"compute": window.compute_ns, "communication": window.communication_ns, "copies": window.memory_copy_ns}
    length = max(window.window_ns, 1)
    named = ", ".join(f"{name} {percent(ns / length)}" for name, ns in parts.items() if ns)
    steps = trace.step_window
    of_steps = f" (a step takes {format_ns(steps.mean_step_ns)})" if steps is not None else ""
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        sentence=_device_bound(trace) or f"The device is busy {percent(_busy(trace))} of the time.",
        why=f"Device time in {format_ns(window.window_ns)}{of_steps}: {named or 'none'}.",
        next_steps=(_look(trace),),
        numbers={"busy_share": _busy(trace), "window_ns": window.window_ns},
        evidence=(Evidence(artifact=str(trace.file), rank=trace.rank),),
    )


def _device_bound(trace: TraceReport) -> str | None:
    """Return the operator that takes most of the device's time, or how long the device idles; None if unknown."""
    ledger = trace.device_ledger
    if ledger is None or not ledger.step_ns:
        return None
    span = "each step" if trace.steps else "the recorded time"
    whole = format_ns(ledger.step_ns)
    busy_ns = ledger.ns("compute", "collective", "copy")
    if busy_ns < ledger.step_ns / 2:
        idle_ns = ledger.step_ns - busy_ns
        return f"The device is idle {percent(idle_ns / ledger.step_ns)} of {span} ({format_ns(idle_ns)} of {whole})."
    by_operator: Counter[str] = Counter()
    for line in ledger.of("compute"):
        by_operator[operator_family(line.operator or "unknown")] += round(line.ns)
    if not by_operator:
        return None
    ((name, ns),) = by_operator.most_common(1)
    share = percent(ns / ledger.step_ns)
    return f"Compute-bound: {shorter_name(name)} takes {share} of {span} ({format_ns(ns)} of {whole})."


# From this share of the recorded time on, collectives decide how long it takes.
COMMUNICATION_BOUND: Final = 0.5
RECORD_DEVICE: Final = "Record the device too: activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]."


def _of_host(trace: TraceReport) -> Finding:
    """Return the owner of most of the host's time in a trace without device events."""
    ledger = trace.host_ledger
    span_ns = max(trace.end_ns - trace.start_ns, 1)
    starts = np.array([call.start_ns for call in trace.arrivals], np.int64)
    ends = np.array([call.start_ns + call.duration_ns for call in trace.arrivals], np.int64)
    communicates_ns = length(union(starts, ends))
    heaviest = heaviest_module(ledger) if ledger is not None else None
    span = "each step" if trace.steps else "the recorded time"
    why = f"In {format_ns(span_ns)} the trace has {format_count(trace.events, 'event')} on the host."
    next_steps: tuple[str, ...] = (_look(trace),)
    if trace.runtime_calls:
        call = trace.runtime_calls[0].name
        sentence = f"Device activity was not recorded: the host calls {call}, and no kernel is in the trace."
        next_steps = (RECORD_DEVICE, *next_steps)
    elif communicates_ns >= COMMUNICATION_BOUND * span_ns:
        name = max(trace.collectives, key=lambda found: found.total_ns).name
        sentence = f"Communication-bound: {name} runs for {percent(communicates_ns / span_ns)} of the time."
    elif ledger is None or heaviest is None:
        sentence = "No device activity in this trace."
    elif heaviest.family == "Python":
        sentence = (
            f"Host-bound: Python outside operators takes {percent(heaviest.family_ns / ledger.step_ns)} of {span}."
        )
    else:
        sentence = (
            f"Compute-bound on the host: {heaviest.module} takes {percent(heaviest.ns / ledger.step_ns)} of {span}, "
            f"{percent(heaviest.family_ns / heaviest.ns)} of it in {heaviest.family}."
        )
        why = f"{format_ns(heaviest.ns)} of {format_ns(ledger.step_ns)}. {why} No device activity was recorded."
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        sentence=sentence,
        why=why,
        next_steps=next_steps,
        numbers={"span_ns": span_ns, "collectives_ns": communicates_ns},
        evidence=(Evidence(artifact=str(trace.file), rank=trace.rank),),
    )


def _of_memory(snapshot: SnapshotReport) -> Finding:
    device = max(snapshot.devices, key=lambda device: device.peak_requested_bytes)
    line = next((line for line in device.lines_at_peak if line.site), None)
    most = "" if line is None else f"; {line.site} allocated {format_bytes(line.bytes)} of the peak"
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        sentence=f"No fault found: peak memory is {format_bytes(device.peak_requested_bytes)}.",
        why=f"The allocator reserved at most {format_bytes(device.peak_reserved_bytes)} of cuda:{device.device}{most}.",
        next_steps=(RECORD_STACKS if line is None else f"To lower the peak, start with {line.site}.",),
        numbers={
            "device": device.device,
            "peak_requested_bytes": device.peak_requested_bytes,
            "peak_reserved_bytes": device.peak_reserved_bytes,
        },
        evidence=(Evidence(artifact=str(snapshot.file)),),
    )


def _look(trace: TraceReport) -> str:
    return f"{VIEW} {shlex.quote(shown_path(trace.file))}"
