"""What a run is bound by where no fault is worth more: a module, a Python loop, a busy device."""

from __future__ import annotations

import re
import shlex
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import (
    MIN_STEPS,
    NOTHING_FOUND,
    SHORT_STEP_NS,
    Evidence,
    Facts,
    Finding,
    Recovery,
    Severity,
)
from lightning_memprof.analysis.findings.traces import shorter_name
from lightning_memprof.analysis.ledger.model import grouped, total
from lightning_memprof.analysis.run.locate import shown_path, shown_place
from lightning_memprof.units import format_bytes, format_count, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lightning_memprof.analysis.ledger.model import TimeLedger, TimeLine
    from lightning_memprof.analysis.run.model import Rank, Run
    from lightning_memprof.analysis.snapshot.model import SnapshotReport
    from lightning_memprof.analysis.trace.model import TraceReport

__all__ = ["heaviest_module", "nothing_found", "nothing_in_files", "operator_family", "python_loop", "python_time"]

ROOT: Final = "the model"
# A module with less of its parent's time does not explain it.
EXPLAINS: Final = 0.5
# Operators that do the same, under the names of forward and backward and of all libraries.
FAMILIES: Final = (
    (
        "matrix multiplication",
        re.compile(r"aten::(?:mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|_scaled_mm|mkldnn_linear\w*)\Z"),
    ),
    ("convolution", re.compile(r"aten::\w*conv\w*\Z")),
    ("attention", re.compile(r"aten::_?\w*(?:scaled_dot_product|flash|efficient)_attention\w*\Z")),
    ("recurrent layers", re.compile(r"aten::\w*(?:lstm|gru|rnn)\w*\Z")),
)


@dataclass(frozen=True, kw_only=True)
class Heaviest:
    """The innermost module that takes most of the time of forward and backward, and the operators most of its time.

    ``ns`` is per step, ``family`` names the operators, ``family_ns`` is their part of it.
    """

    module: str
    ns: float
    family: str
    family_ns: float


def heaviest_module(ledger: TimeLedger) -> Heaviest | None:
    """Return the innermost module with at least half of the time of forward and backward.

    None where the ledger does not divide forward and backward among operators.
    """
    lines = [line for line in grouped(ledger.of("forward", "backward")) if line.operator is not None]
    if not any(line.operator for line in lines):
        return None
    path: tuple[str, ...] = ()
    inside = lines
    while True:
        below: dict[str, list[TimeLine]] = defaultdict(list)
        for line in inside:
            parts = (line.module or "").split(".") if line.module else []
            if len(parts) > len(path):
                below[parts[len(path)]].append(line)
        name = max(below, key=lambda child: total(below[child]), default=None)
        if name is None or total(below[name]) < EXPLAINS * total(lines):
            break
        path, inside = (*path, name), below[name]
    families = Counter[str]()
    for line in inside:
        families[operator_family(line.operator or "")] += line.ns  # type: ignore[assignment]  # counts may be floats
    family, family_ns = families.most_common(1)[0]
    return Heaviest(module=".".join(path) or ROOT, ns=total(inside), family=family, family_ns=family_ns)


def operator_family(operator: str) -> str:
    """Return the usual name of an operator's work, ``matrix multiplication``, else its own; ``Python`` for none."""
    return next((name for name, matches in FAMILIES if matches.match(operator)), operator or "Python")


def faster(heaviest: Heaviest, rank: Rank) -> tuple[str, ...]:
    """Return what makes the operators of a module faster on this run's device."""
    precision = (rank.training.precision if rank.training else None) or "32-true"
    compiled = f"Fuse its operators: compile {heaviest.module} with torch.compile(module)."
    lower = ("Compute in bfloat16: Trainer(precision='bf16-mixed').",) if precision == "32-true" else ()
    if heaviest.family == "convolution":
        return ("Store images as channels_last: model.to(memory_format=torch.channels_last), inputs too.", *lower)
    if heaviest.family in {"matrix multiplication", "attention"}:
        return (*lower, compiled) if not rank.facts.is_cpu else (compiled, *lower)
    return (compiled, *lower)


# Fewer calls of one operator in a forward are its layers.
LOOP: Final = 8
# They compute nothing.
VIEWS: Final = frozenset(
    f"aten::{name}"
    for name in (
        "slice",
        "select",
        "view",
        "reshape",
        "transpose",
        "permute",
        "expand",
        "chunk",
        "split",
        "unsqueeze",
        "t",
    )
)
# Batching the calls of a loop saves their dispatch, and lets an operator use all cores.
BATCHED: Final = (0.2, 0.7)
NOTABLE_LOOP: Final = 0.10


@dataclass(frozen=True, kw_only=True)
class _Loop:
    """A module whose forward calls the same operator, or submodule, many times."""

    module: str
    repeated: str
    repeated_ns: float
    times: float
    ns: float


def python_loop(facts: Facts) -> list[Finding]:
    """Find a forward that runs an operator or a submodule many times in a Python loop.

    Recovers 20% to 70% of the time of the module's own operators, forward and backward: one batched call has the same
    arithmetic without the dispatch of each.
    """
    worst = facts.heaviest(lambda ledger: ledger.ns("forward", "backward"))
    if worst is None or worst[1].steps < MIN_STEPS:
        return []
    rank, ledger = worst
    loop = max(_loops(ledger), key=lambda loop: (loop.ns, loop.repeated_ns), default=None)
    if loop is None or loop.ns < NOTABLE_LOOP * ledger.step_ns:
        return []
    worth = Recovery(unit="ns", least=loop.ns * BATCHED[0], most=loop.ns * BATCHED[1], whole=ledger.step_ns)
    return [
        Finding(
            rule="python_loop",
            severity=worth.severity,
            sentence=(
                f"Python loop: {loop.module} runs {loop.repeated} {loop.times:,.0f} times in each forward and takes "
                f"{percent(loop.ns / ledger.step_ns)} of each step{facts.on_rank(rank)}."
            ),
            why=(
                f"Forward and backward of its operators take {format_ns(loop.ns)} of a {format_ns(ledger.step_ns)} "
                "step; each small call is dispatched from Python and uses few cores."
            ),
            next_steps=(
                (
                    f"Vectorize the loop in the forward of {loop.module}: one batched operator (bmm, einsum, "
                    "scaled_dot_product_attention) on all slices."
                ),
                "Compile it, so that the loop becomes a few fused kernels: torch.compile(module).",
            ),
            evidence=_evidence(facts, rank),
            numbers={
                "rank": rank.rank,
                "module": loop.module,
                "repeated": loop.repeated,
                "times": loop.times,
                "loop_ns": loop.ns,
                "duration_ns": ledger.step_ns,
            },
            weight=worth.share,
            recovers=worth,
        )
    ]


# Calls of operators and modules take some Python everywhere.
NOTABLE_PYTHON: Final = 0.10
# In a forward of fewer operators, a recording does not show what the rest is.
MIN_CALLED: Final = 10
SAVED_PYTHON: Final = (0.5, 0.9)


def python_time(facts: Facts) -> list[Finding]:
    """Find a forward, or the training step around it, that computes in Python and not in operators.

    Recovers 50% to 90% of the time outside operators.
    """
    worst = facts.heaviest(_python)
    if worst is None or worst[1].steps < MIN_STEPS:
        return []
    rank, ledger = worst
    ns = _python(ledger)
    called = sum(line.called for line in ledger.of("forward"))
    if ns < NOTABLE_PYTHON * ledger.step_ns or called < MIN_CALLED:
        return []
    line = max((line for line in grouped(ledger.of("forward")) if line.operator == ""), key=lambda line: line.ns)
    where = f"the forward of {line.module}" if line.module else "training_step, outside of its submodules,"
    worth = Recovery(unit="ns", least=ns * SAVED_PYTHON[0], most=ns * SAVED_PYTHON[1], whole=ledger.step_ns)
    return [
        Finding(
            rule="python_time",
            severity=worth.severity,
            sentence=(
                f"Python code in {where} takes {percent(ns / ledger.step_ns)} of each step{facts.on_rank(rank)}."
            ),
            why=(
                f"{format_ns(ns)} of a {format_ns(ledger.step_ns)} step are outside operators: self.log, metrics, "
                "NumPy, or loops over values."
            ),
            next_steps=(
                "Log less per step: one self.log_dict(values, on_step=False, on_epoch=True), not many self.log calls.",
                "Compute on whole tensors, and read values back (.item(), .tolist()) once in many steps.",
                "See the functions: ExtendedPyTorchProfiler(with_stack=True).",
            ),
            evidence=_evidence(facts, rank),
            numbers={"rank": rank.rank, "module": line.module, "python_ns": ns, "duration_ns": ledger.step_ns},
            weight=worth.share,
            recovers=worth,
        )
    ]


def _python(ledger: TimeLedger) -> float:
    """Return the time outside operators of the module, or of the training step, with the most."""
    return max((line.ns for line in grouped(ledger.of("forward")) if line.operator == ""), default=0.0)


def _evidence(facts: Facts, rank: Rank) -> tuple[Evidence, ...]:
    traces = [trace for trace in facts.traces if trace.host_ledger is not None and trace.rank in {rank.rank, None}]
    return (facts.pulse(rank), *(Evidence(artifact=str(trace.file), rank=rank.rank) for trace in traces[:1]))


def _loops(ledger: TimeLedger) -> Iterator[_Loop]:
    """Yield the modules whose forward calls one operator, or one submodule, at least ``LOOP`` times."""
    together = grouped(ledger.of("forward", "backward"))
    calls = _calls(together)
    for line in together:
        if line.part == "forward" and line.module is not None and line.operator and line.operator not in VIEWS:
            times = line.called / max(calls[line.module], 1.0)
            if times >= LOOP:
                spent = total(other for other in together if other.module == line.module)
                yield _Loop(
                    module=line.module or ROOT, repeated=line.operator, repeated_ns=line.ns, times=times, ns=spent
                )
    lines = ledger.of("forward", "backward")
    calls = _calls(lines)
    for module, count in calls.items():
        parent = module.rpartition(".")[0]
        while parent and not calls[parent]:
            parent = parent.rpartition(".")[0]
        times = count / max(calls[parent], 1.0)
        if module and times >= LOOP:
            inside = total(line for line in lines if f"{line.module}.".startswith(f"{module}."))
            yield _Loop(module=parent or ROOT, repeated=module, repeated_ns=inside, times=times, ns=inside)


def _calls(lines: Iterable[TimeLine]) -> Counter[str]:
    """Return the calls of each module's forward."""
    found = Counter[str]()
    for line in lines:
        if line.part == "forward" and line.module is not None and not line.operator:
            found[line.module] += line.count  # type: ignore[assignment]  # a mean per step is a float
    return found


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
        sentence=around or f"No bottleneck found: {dominant}.",
        why=f"{early}{mean}; " + (f"next: {runner_up}.{few}" if around is None else f"{dominant}, {runner_up}.{few}"),
        next_steps=(_look_further(run),) if around is None else (LARGER, _look_further(run)),
        numbers=numbers,
    )


def _bound(facts: Facts, rank: Rank) -> Finding | None:
    """Return what forward and backward are bound by, None where these are not most of the step."""
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
        trace = traces[0]
        events = format_count(trace.events, "event")
        return Finding(
            rule=NOTHING_FOUND,
            severity=Severity.NONE,
            sentence="No device activity in this trace.",
            why=f"In {format_ns(trace.end_ns - trace.start_ns)} the trace has {events} on the host.",
            next_steps=(_look(trace),),
            evidence=(Evidence(artifact=str(trace.file), rank=trace.rank),),
        )
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
        sentence=_device_bound(trace)
        or f"No bottleneck found: the device is busy {percent(_busy(trace))} of the time.",
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
        by_operator[line.operator or "unknown"] += round(line.ns)
    if not by_operator:
        return None
    ((name, ns),) = by_operator.most_common(1)
    share = percent(ns / ledger.step_ns)
    return f"Compute-bound: {shorter_name(name)} takes {share} of {span} ({format_ns(ns)} of {whole})."


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
