"""Rules that turn a run into a verdict: one rule a function, each with its reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.activation_peak import activation_peak
from lightning_memprof.analysis.findings.allocator_retries import allocator_retries
from lightning_memprof.analysis.findings.between_steps import between_steps
from lightning_memprof.analysis.findings.callback_bound import callback_bound
from lightning_memprof.analysis.findings.checkpoint_bound import checkpoint_bound
from lightning_memprof.analysis.findings.device_memory_growth import device_memory_growth
from lightning_memprof.analysis.findings.garbage import garbage
from lightning_memprof.analysis.findings.input_bound import input_bound
from lightning_memprof.analysis.findings.logging_bound import logging_bound
from lightning_memprof.analysis.findings.memory_growth import memory_growth
from lightning_memprof.analysis.findings.memory_imbalance import memory_imbalance
from lightning_memprof.analysis.findings.model import NOTHING_FOUND, Evidence, Facts, Finding, Rule, Severity, Verdict
from lightning_memprof.analysis.findings.nothing_found import nothing_found
from lightning_memprof.analysis.findings.of_snapshots import SNAPSHOT_RULES
from lightning_memprof.analysis.findings.of_traces import findings_of_traces
from lightning_memprof.analysis.findings.optimizer_bound import optimizer_bound
from lightning_memprof.analysis.findings.optimizer_state import optimizer_state
from lightning_memprof.analysis.findings.out_of_memory import out_of_memory
from lightning_memprof.analysis.findings.profiler_overhead import profiler_overhead
from lightning_memprof.analysis.findings.slow_steps import slow_steps
from lightning_memprof.analysis.findings.straggler import straggler

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lightning_memprof.analysis.run.load import Run
    from lightning_memprof.analysis.snapshot.model import SnapshotReport
    from lightning_memprof.analysis.trace.model import TraceReport

__all__ = [
    "NOTHING_FOUND",
    "Evidence",
    "Facts",
    "Finding",
    "Severity",
    "Verdict",
    "conclude",
    "examine",
    "examine_files",
    "verdict",
]

RULES: Final[tuple[Rule, ...]] = (
    out_of_memory,
    memory_growth,
    device_memory_growth,
    allocator_retries,
    straggler,
    input_bound,
    optimizer_bound,
    callback_bound,
    checkpoint_bound,
    logging_bound,
    between_steps,
    slow_steps,
    garbage,
    memory_imbalance,
    activation_peak,
    optimizer_state,
    profiler_overhead,
)
# A run's own rule sees more steps than its trace or snapshot does: the fault is told once.
SAME_FAULT: Final[Mapping[str, str]] = {"input_bound_trace": "input_bound", "failed_request": "out_of_memory"}


def examine(facts: Facts) -> tuple[Finding, ...]:
    """Return every finding, the most severe first; where none is above info, one that says so comes before them."""
    run_findings = [finding for rule in RULES for finding in rule(facts)]
    told = {finding.rule for finding in run_findings}
    of_files = [
        finding
        for finding in examine_files(facts.traces, facts.snapshots)
        if SAME_FAULT.get(finding.rule, "") not in told
    ]
    found = _by_severity([*run_findings, *of_files])
    return found if found and found[0].severity > Severity.INFO else (nothing_found(facts), *found)


def examine_files(traces: Iterable[TraceReport], snapshots: Iterable[SnapshotReport]) -> tuple[Finding, ...]:
    """Return what traces and snapshots show by themselves, the most severe first; empty where no rule applies."""
    return _by_severity(
        [
            *findings_of_traces(traces),
            *(finding for snapshot in snapshots for rule in SNAPSHOT_RULES for finding in rule(snapshot)),
        ]
    )


def _by_severity(found: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda finding: (finding.severity, finding.weight), reverse=True))


def conclude(findings: tuple[Finding, ...]) -> Verdict:
    """Make the verdict of the first finding."""
    first = findings[0]
    return Verdict(first.sentence, first.why, first.next_steps[0], first.rule, first.severity)


def verdict(run: Run) -> Verdict:
    """Return what is most wrong with a run, why, and what to do next."""
    return conclude(examine(Facts.of(run)))
