"""Measures, evidence and remedies that the rules about operator traces share."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Final

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.cold import COMPILES
from lightning_memprof.account.trace.model import IdleCause, Kernel, RuntimeCall, TraceReport
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Evidence
from lightning_memprof.judge.optimizers import FOREACH, FUSED
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Need, Remedy, applicable
from lightning_memprof.read.run.locate import shown_path
from lightning_memprof.read.stacks import parse_frame
from lightning_memprof.read.trace.kernel_names import kernel_name
from lightning_memprof.units import format_ns, quoted

LONGEST_NAME: Final = 72

# Of the names of kernels that send numbers of 16 bits.
HALF: Final = re.compile(r"_b?f16|bfloat16|half", re.IGNORECASE)
LATER: Final = (do.RECORD_LATER,)


def remedies(trace: TraceReport, *choices: Remedy) -> tuple[Remedy, ...]:
    """Return the next steps that apply to the recorded program; if none does, the step is to open the trace."""
    return fitting(trace, *choices) or (look(trace),)


def look(trace: TraceReport) -> Remedy:
    """Return the command that shows every operator of a trace."""
    return do.VIEW_TRACE.filled(command=f"lightning-memprof view {quoted(shown_path(trace.file))}")


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


def device_traces(facts: Facts) -> Iterator[tuple[TraceReport, TimeLedger]]:
    """Yield the traces with enough of a device's time that is not mostly a cold start, and its ledger."""
    for trace in facts.steady_traces:
        ledger = trace.device_ledger
        if ledger is not None and not is_brief(trace) and ledger.share(Part.COLD_START) < POLICY.most:
            yield trace, ledger


def stretch(trace: TraceReport, ledger: TimeLedger) -> tuple[int, str]:
    """Return of how many steps times are shown, and their length: of all that were recorded, or one outside windows."""
    if trace.is_steady:
        return 1, ledger.length_text
    return ledger.steps, format_ns(ledger.step_ns * ledger.steps)


def computed(trace: TraceReport, ledger: TimeLedger, kernels: Iterable[Kernel]) -> TimeLine:
    """Return the part of a step's computation that is in some kernels."""
    whole = total_ns(computing(trace))
    return TimeLine(part=Part.COMPUTE, ns=ledger.ns(Part.COMPUTE) * total_ns(kernels) / whole if whole else 0.0)


def idle_ns(trace: TraceReport, *causes: Part) -> int:
    """Return the idle time of the devices that has one of these causes."""
    return sum(cause.total_ns for cause in trace.idle if cause.cause in causes)


# Causes of idle time that a program can change.
CAUSES: Final = tuple(
    part for part in Part if part.group == "device idle" and part not in {Part.IDLE_UNKNOWN, Part.COLD_START}
)
LAUNCHING: Final = (Part.IDLE_PYTHON, Part.IDLE_OPERATORS, Part.IDLE_LAUNCH, Part.IDLE_GRAPH, Part.IDLE_LOADING)


def waits_ns(trace: TraceReport, ledger: TimeLedger) -> float:
    """Return the idle time per step that would not be there without the calls in which the host waits for the device.

    For a copy to pageable memory the host waits in any case.
    """
    copied = sum(copies.exposed_ns or 0 for copies in trace.copies if copies.is_pageable and copies.kind == "DtoH")
    own_ns = sum(call.own_ns for call in trace.synchronizations) - copied
    gap_ns = sum(call.gap_ns for call in trace.synchronizations)
    return max(min(gap_ns, own_ns), 0) / ledger.steps


# Kineto reports work of the driver for the program in the category of its own.
_DRIVER: Final = frozenset(
    {"Driver Compiler", "Lazy Function Loading", "Runtime Triggered Module Loading", "Command Buffer Full"}
)


def recording_calls(trace: TraceReport) -> list[RuntimeCall]:
    """Return the profiler's own work as torch records it."""
    return [cost for cost in trace.profiler_overhead if cost.name not in _DRIVER]


def recording_ns(trace: TraceReport) -> tuple[int, int]:
    """Return the profiler's own work as torch records it, and the same estimated from host events, in ns.

    At most the time in which the host works and the device waits for it: elsewhere nobody waits for the profiler.
    """
    waiting_ns = idle_ns(trace, *LAUNCHING)
    known_ns = sum(cost.total_ns for cost in recording_calls(trace))
    return min(known_ns, waiting_ns), min(trace.host_events * POLICY.event_ns, waiting_ns)


_GRAPH: Final = re.compile("StreamBeginCapture|GraphInstantiate")


def cold_start_of(cause: IdleCause) -> str:
    """Return what the program does in a cold start, as a clause."""
    if made := _graph_made_by(cause.example):
        return made
    if cause.example.endswith(COMPILES):
        return "torch.compile compiles"
    return f"the host is in {shorter_name(cause.example)}" if cause.example else "the host is in its first calls"


def _graph_made_by(call: str) -> str:
    """Return what a call of the driver does to a graph of kernels, as a clause; empty for other calls."""
    return f"the host records a {'HIP' if call.startswith('hip') else 'CUDA'} graph" if _GRAPH.search(call) else ""


def graph_made(trace: TraceReport) -> str:
    """Return that the host records a graph of kernels, as a clause, empty if it does not: no kernel runs meanwhile."""
    return next(filter(None, (_graph_made_by(call.name) for call in trace.runtime_calls)), "")


def computing(trace: TraceReport) -> list[Kernel]:
    """Return the kernels that compute: no copies, no collectives."""
    return [kernel for kernel in trace.kernels if kernel.kind == "compute"]


def total_ns(kernels: Iterable[Kernel]) -> int:
    """Return the device time of kernels in nanoseconds."""
    return sum(kernel.total_ns for kernel in kernels)


def span(trace: TraceReport) -> str:
    """Return what shares of a trace's time are of."""
    return "each step" if trace.steps else "the recorded time"


def is_brief(trace: TraceReport) -> bool:
    """Return whether too little was recorded to say how busy a device is."""
    window = trace.gpu_window
    return not trace.is_steady and window is not None and window.window_ns < POLICY.brief_ns


def times(count: int) -> str:
    """Return a count as an adverb: ``"once"``, ``"12 times"``."""
    return "once" if count == 1 else f"{count:,} times"


def shorter_name(name: str) -> str:
    """Return a name that fits a sentence: of a kernel, its function and operation, of a place, file and function."""
    if len(name) > LONGEST_NAME and (frame := parse_frame(name)) is not None:
        return str(frame._replace(filename=frame.filename.replace("\\", "/").rpartition("/")[2]))
    return _cut(kernel_name(name))


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


def workers_in(ledger: TimeLedger | None, *, in_one: bool) -> Remedy:
    """Return the remedy for the workers that the iterators of a trace show; ``in_one`` batch most of the loading is."""
    names = " ".join(line.name for line in ledger.of("idle_data", "data_wait")) if ledger else ""
    if "_MultiProcessing" not in names:
        return do.WORKERS.filled(workers=POLICY.workers)
    return do.PERSISTENT_WORKERS if in_one else do.MORE_WORKERS_PER_RANK
