"""All rules over all facts: the findings, the most severe first, and the verdict."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from lightning_memprof.account.snapshot.report import SnapshotReport
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.bound import nothing_found, nothing_on_host
from lightning_memprof.judge.device_bound import busy, device_bound
from lightning_memprof.judge.facts import Facts, Judge, facts_of_files
from lightning_memprof.judge.finding import NOTHING_FOUND, Finding, Severity, ordered, titled
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.rule import Rule
from lightning_memprof.judge.rules import (
    allocator,
    batches,
    collectives,
    communication,
    compute,
    data,
    growth,
    hangs,
    holders,
    host,
    idle,
    kernels,
    lines,
    memory,
    passes,
    profiler,
    slowing,
    snapshot,
    threads,
    waits,
)
from lightning_memprof.judge.rules.holders import nothing_in_snapshot
from lightning_memprof.read.run.model import Run

# About memory and the end of a run: valid after any number of steps.
RULES: Final[tuple[Judge, ...]] = (
    hangs.hang,
    hangs.worker_died,
    memory.out_of_memory,
    snapshot.allocator_retries,
)
# About step time.
STEP_RULES: Final[tuple[Judge, ...]] = (communication.straggler,)
# The same as rows, by the page that describes them.
ROWS: Final[Mapping[str, tuple[Rule, ...]]] = {
    "memory": (snapshot.OUT_OF_MEMORY, *memory.ROWS, *growth.ROWS),
    "snapshot": (*snapshot.ROWS, *holders.ROWS),
    "data": data.ROWS,
    "host": (*host.ROWS, *lines.ROWS, *threads.ROWS, *slowing.ROWS),
    "compute": (*compute.ROWS, *batches.ROWS, *passes.ROWS),
    "ranks": communication.ROWS,
    "profiler": profiler.ROWS,
    "device": (*idle.ROWS, *waits.ROWS, *allocator.ROWS, *collectives.ROWS, *kernels.ROWS),
}
RULE_FAILED: Final = "rule_failed"


def examine(facts: Facts) -> tuple[Finding, ...]:
    """Return every finding, the most severe first; if none is above info, ``nothing_found`` comes first.

    A rule that raises is a finding of its own: it hides nothing else.
    """
    found = _findings(facts)
    if any(finding.severity > Severity.INFO for finding in found):
        return found
    return (*_guarded(nothing_found, facts), *found)


def examine_files(traces: Iterable[TraceReport], snapshots: Iterable[SnapshotReport]) -> tuple[Finding, ...]:
    """Return the findings of traces and snapshots, the most severe first; empty if no rule fires."""
    return _findings(facts_of_files(traces, snapshots))


def nothing_in_files(traces: Sequence[TraceReport], snapshots: Sequence[SnapshotReport]) -> Finding:
    """Return what the device or the host of a trace is bound by, or who allocated the peak of a snapshot."""
    if on_device := [trace for trace in traces if trace.gpu_window is not None]:
        return device_bound(min(on_device, key=lambda trace: (trace.is_sample, busy(trace))))
    if used := [snapshot for snapshot in snapshots if snapshot.devices]:
        return nothing_in_snapshot(
            max(used, key=lambda snapshot: max(device.peak_requested_bytes for device in snapshot.devices))
        )
    if traces:
        return nothing_on_host(traces[0], is_alone=len(traces) == 1)
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        title="Nothing was recorded.",
        why="The snapshot has no device: its process allocated no device memory."
        if snapshots
        else "No trace and no snapshot is readable.",
        remedies=(do.RECORD_RUN,),
    )


def _findings(facts: Facts) -> tuple[Finding, ...]:
    judged = _with_enough_steps(facts)
    found = [finding for rule in RULES for finding in _guarded(rule, facts)]
    found += [finding for rule in STEP_RULES for finding in _guarded(rule, judged)]
    reported = {finding.rule for finding in found}
    rows = (row for row in itertools.chain.from_iterable(ROWS.values()) if row.id not in reported)
    for row in rows:
        found += _guarded(row.findings, judged if row.is_of_time else facts, name=row.id)
    return _by_severity([_in_torch(finding) for finding in found] if _is_of_loop(facts) else found)


def _is_of_loop(facts: Facts) -> bool:
    """Whether no Trainer drove the run; files have remedies for their own programs."""
    return bool(facts.run.ranks) and not facts.run.lead.facts.is_lightning


def _in_torch(finding: Finding) -> Finding:
    """Return a finding with the remedies of a program without a Trainer."""
    return replace(finding, remedies=tuple(remedy.in_program({"other program"}) for remedy in finding.remedies))


def _with_enough_steps(facts: Facts) -> Facts:
    """Return the facts for verdicts on step time: ranks with enough steps; without such a rank no step and no trace."""
    judged = {rank: found for rank, found in facts.statistics.items() if found.used >= POLICY.steps}
    if len(judged) == len(facts.statistics):
        return facts
    return replace(facts, statistics=judged, traces=facts.traces if judged else ())


def _guarded(
    rule: Callable[..., Iterable[Finding] | Finding | None], *facts: object, name: str | None = None
) -> list[Finding]:
    """Return the findings of a rule, and where it raises one that names it: the page shows the rest."""
    try:
        found = rule(*facts)
        return [found] if isinstance(found, Finding) else [*(found or ())]
    except Exception as error:  # noqa: BLE001 a faulty rule must not hide the others
        return [
            Finding(
                rule=RULE_FAILED,
                severity=Severity.WARNING,
                title=titled(
                    "The rule {rule} failed ({error}).", rule=name or rule.__name__, error=type(error).__name__
                ),
                why=f"{type(error).__name__}: {error}. All other findings and figures are complete.",
                remedies=(do.REPORT_ERROR,),
                numbers={"failed": name or rule.__name__},
            )
        ]


def _by_severity(found: list[Finding]) -> tuple[Finding, ...]:
    worth = ordered(finding for finding in found if finding.severity > Severity.NONE)
    # A function has its time once: in the finding that is worth most.
    first = {finding.owner: finding for finding in reversed(worth) if finding.owner}
    return tuple(finding for finding in worth if first.get(finding.owner, finding) is finding)


def verdict_of(run: Run) -> Finding:
    """Return the first finding of a run: its main problem, the evidence, and the next step."""
    return examine(Facts.of(run))[0]
