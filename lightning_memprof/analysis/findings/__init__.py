"""Findings: rules about runs, operator traces and allocator snapshots, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from lightning_memprof.analysis.findings.bound import nothing_found, nothing_in_files
from lightning_memprof.analysis.findings.communication import memory_imbalance, straggler, straggler_trace
from lightning_memprof.analysis.findings.compute import (
    anomaly_detection,
    broadcast_loss,
    dense_embedding,
    double_precision,
    idle_cores,
    optimizer_bound,
    thread_oversubscription,
)
from lightning_memprof.analysis.findings.data import (
    input_bound,
    input_bound_trace,
    padding,
    worker_start,
    workers_restart,
)
from lightning_memprof.analysis.findings.gpu.allocator import allocator_thrash
from lightning_memprof.analysis.findings.gpu.collectives import communication_exposed
from lightning_memprof.analysis.findings.gpu.holders import peak_holder
from lightning_memprof.analysis.findings.gpu.idle import gpu_idle
from lightning_memprof.analysis.findings.gpu.waits import blocking_transfers, exposed_copies, synchronization
from lightning_memprof.analysis.findings.growth import device_memory_growth, memory_growth
from lightning_memprof.analysis.findings.host import actions_bound, between_steps, core_wait, gc_pauses, slow_steps
from lightning_memprof.analysis.findings.kernels import (
    many_small_kernels,
    many_small_operators,
    optimizer_loop,
    tensor_cores_unused,
    unfused_attention,
)
from lightning_memprof.analysis.findings.memory import (
    activation_peak,
    data_memory,
    optimizer_state,
    out_of_memory,
    peak_elsewhere,
    validation_memory,
    worker_memory,
)
from lightning_memprof.analysis.findings.model import NOTHING_FOUND, Evidence, Facts, Finding, Rule, Severity, Verdict
from lightning_memprof.analysis.findings.modules import buffer_broadcast, retained_graph
from lightning_memprof.analysis.findings.profiler import (
    hang,
    other_profiler,
    profiler_overhead,
    recording_overhead,
    worker_died,
)
from lightning_memprof.analysis.findings.program.lines import costly_line
from lightning_memprof.analysis.findings.program.loops import python_loop, small_batch, synced_passes
from lightning_memprof.analysis.findings.program.passes import double_backward, recomputation, unused_gradients
from lightning_memprof.analysis.findings.program.python import busy_thread, python_time
from lightning_memprof.analysis.findings.snapshot import (
    allocator_churn,
    allocator_retries,
    failed_request,
    fragmentation,
    pending_frees,
    private_pools,
)
from lightning_memprof.analysis.run.model import Run
from lightning_memprof.analysis.snapshot.report import DeviceReport, SnapshotReport
from lightning_memprof.analysis.trace.model import TraceReport

__all__ = [
    "NOTHING_FOUND",
    "TRACE_RULES",
    "Evidence",
    "Facts",
    "Finding",
    "Severity",
    "Verdict",
    "conclude",
    "examine",
    "examine_files",
    "nothing_in_files",
    "verdict",
]

RULES: Final[tuple[Rule, ...]] = (
    hang,
    worker_died,
    out_of_memory,
    other_profiler,
    memory_growth,
    device_memory_growth,
    worker_memory,
    validation_memory,
    retained_graph,
    allocator_retries,
    straggler,
    buffer_broadcast,
    synced_passes,
    input_bound,
    workers_restart,
    worker_start,
    padding,
    anomaly_detection,
    double_precision,
    python_loop,
    costly_line,
    python_time,
    broadcast_loss,
    busy_thread,
    unused_gradients,
    double_backward,
    recomputation,
    thread_oversubscription,
    idle_cores,
    dense_embedding,
    optimizer_bound,
    small_batch,
    actions_bound,
    core_wait,
    between_steps,
    slow_steps,
    gc_pauses,
    memory_imbalance,
    peak_elsewhere,
    activation_peak,
    optimizer_state,
    data_memory,
    profiler_overhead,
)
TRACE_RULES: Final[tuple[Callable[[TraceReport], Finding | list[Finding] | None], ...]] = (
    input_bound_trace,
    allocator_thrash,
    communication_exposed,
    gpu_idle,
    synchronization,
    blocking_transfers,
    exposed_copies,
    tensor_cores_unused,
    unfused_attention,
    optimizer_loop,
    many_small_kernels,
    many_small_operators,
    recording_overhead,
)
RULES_OF_ALL_TRACES: Final[tuple[Callable[[Sequence[TraceReport]], Finding | list[Finding] | None], ...]] = (
    straggler_trace,
)
SNAPSHOT_RULES: Final[tuple[Callable[[SnapshotReport, DeviceReport], Finding | None], ...]] = (
    failed_request,
    allocator_churn,
    fragmentation,
    pending_frees,
    private_pools,
    peak_holder,
)
# A run's rule sees more steps than its trace or snapshot: the same fault is reported once.
SAME_FAULT: Final[Mapping[str, str]] = {
    "input_bound_trace": "input_bound",
    "straggler_trace": "straggler",
    "failed_request": "out_of_memory",
    "optimizer_loop": "optimizer_bound",
}
# What a few recorded steps show is not the run's, whose pulse has every step.
OF_FEW_STEPS: Final = frozenset({"input_bound_trace"})
# A person opens a few of thousands of traces.
MAX_EVIDENCE: Final = 16


def examine(facts: Facts) -> tuple[Finding, ...]:
    """Return every finding, the most severe first; if none is above info, ``nothing_found`` comes first.

    If only the wait for a core is, ``nothing_found`` comes second: a training run on a busy machine is bound by
    something, too. A rule that raises is a finding of its own: it hides nothing else.
    """
    of_run = [finding for rule in RULES for finding in _guarded(rule, facts)]
    reported = {finding.rule for finding in of_run}
    of_files = [
        finding
        for finding in examine_files(facts.steady_traces, facts.snapshots)
        if SAME_FAULT.get(finding.rule, "") not in reported and not (facts.ledgers and finding.rule in OF_FEW_STEPS)
    ]
    found = _by_severity([*of_run, *of_files])
    severe = [finding for finding in found if finding.severity > Severity.INFO]
    if not severe:
        return (*_guarded(nothing_found, facts), *found)
    if severe[0].rule == "core_wait":
        bound = (replace(each, severity=Severity.INFO) for each in _guarded(nothing_found, facts))
        return (*severe, *bound, *found[1:])
    return found


def examine_files(traces: Iterable[TraceReport], snapshots: Iterable[SnapshotReport]) -> tuple[Finding, ...]:
    """Return the findings of traces and snapshots, the most severe first; empty if no rule fires.

    A trace with a part of its events tells neither what a device waits for nor what overlaps.
    """
    of_snapshots = [
        finding
        for snapshot in snapshots
        for rule in SNAPSHOT_RULES
        for device in snapshot.devices
        for finding in _guarded(rule, snapshot, device)
    ]
    read = tuple(trace for trace in traces if not trace.is_sample)
    of_all = [finding for rule in RULES_OF_ALL_TRACES for finding in _guarded(rule, read)]
    return _by_severity([*of_all, *_of_traces(read), *of_snapshots])


def _of_traces(traces: Iterable[TraceReport]) -> list[Finding]:
    """Return one finding per rule for all traces: the worst, with the evidence of all."""
    found: dict[tuple[str, object], list[Finding]] = {}
    for trace in traces:
        for rule in TRACE_RULES:
            for finding in _guarded(rule, trace):
                # A rule about two directions names the direction.
                found.setdefault((finding.rule, finding.numbers.get("kind")), []).append(finding)
    merged = map(_merged, found.values())
    # As those of a run: of one severity, what recovers most comes first.
    return [replace(each, weight=each.recovers.share) if each.recovers else each for each in merged]


def _guarded(rule: Callable[..., list[Finding] | Finding | None], *facts: object) -> list[Finding]:
    """Return the findings of a rule, and where it raises one that names it: the page shows the rest."""
    try:
        found = rule(*facts)
    except Exception as error:  # noqa: BLE001 a faulty rule must not hide the others
        return [
            Finding(
                rule="rule_failed",
                severity=Severity.WARNING,
                sentence=f"The rule {rule.__name__} failed ({type(error).__name__}: {error}).",
                why="All other findings and figures are complete.",
                next_steps=("Report this error to the developers of lightning-memprof.",),
                numbers={"failed": rule.__name__},
            )
        ]
    return [found] if isinstance(found, Finding) else found or []


def _merged(alike: list[Finding]) -> Finding:
    worst, *others = _by_severity(alike)
    if not others:
        return worst
    more = "1 other trace" if len(others) == 1 else f"{len(others):,} other traces"
    seen = (*worst.evidence, *(finding.evidence[0] for finding in others if finding.evidence))
    if any(each.rank is None for each in seen):
        # Of another program, perhaps, that has the same fault for another reason.
        why = f"In {Path(seen[0].artifact).name}: {worst.why} {worst.rule} is found in {more}, too."
    else:
        why = f"{worst.why} {more} {'shows' if len(others) == 1 else 'show'} it too."
    return replace(worst, why=why, evidence=seen[:MAX_EVIDENCE])


def _by_severity(found: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda finding: (finding.severity, finding.weight), reverse=True))


def conclude(findings: tuple[Finding, ...]) -> Verdict:
    """Return the first finding as the verdict."""
    first = findings[0]
    return Verdict(
        sentence=first.sentence,
        why=first.why,
        next=first.next_steps[0],
        rule=first.rule,
        severity=first.severity,
    )


def verdict(run: Run) -> Verdict:
    """Return the main problem of a run, its evidence, and the next step."""
    return conclude(examine(Facts.of(run)))
