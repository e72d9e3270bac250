"""All rules over all facts: the findings, the most severe first, and the verdict."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from lightning_memprof.judge.byte_rule import ByteRule
from lightning_memprof.judge.facts import Facts, Judge
from lightning_memprof.judge.finding import Finding, Severity, titled
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import REPORT_ERROR
from lightning_memprof.judge.rule import Rule
from lightning_memprof.judge.rules import (
    communication,
    compute,
    data,
    growth,
    hangs,
    host,
    kernels,
    memory,
    modules,
    profiler,
    snapshot,
)
from lightning_memprof.judge.rules.bound import nothing_found
from lightning_memprof.judge.rules.gpu import allocator, collectives, holders, idle, waits
from lightning_memprof.judge.rules.program import lines, loops, passes, python, slowing
from lightning_memprof.read.run.model import Run
from lightning_memprof.read.snapshot.report import SnapshotReport
from lightning_memprof.read.trace.model import TraceReport

# About memory and the end of a run: valid after any number of steps.
RULES: Final[tuple[Judge, ...]] = (
    hangs.hang,
    hangs.worker_died,
    memory.out_of_memory,
    profiler.other_profiler,
    snapshot.allocator_retries,
)
# About step time.
STEP_RULES: Final[tuple[Judge, ...]] = (
    communication.straggler,
    loops.synced_passes,
    loops.python_loop,
    lines.costly_line,
    python.python_time,
    python.busy_thread,
    loops.small_batch,
    host.core_wait,
    host.slow_steps,
    slowing.slower_steps,
    profiler.profiler_overhead,
)
# The same as rows, by the page that describes them; those about memory are valid after any number of steps.
BYTE_ROWS: Final[Mapping[str, tuple[ByteRule, ...]]] = {
    "memory": (snapshot.OUT_OF_MEMORY, *memory.ROWS, *growth.ROWS),
    "ranks": communication.BYTE_ROWS,
    "snapshot": (*snapshot.ROWS, *holders.ROWS),
}
ROWS: Final[Mapping[str, tuple[Rule, ...]]] = {
    "data": data.ROWS,
    "host": host.ROWS,
    "compute": (*compute.ROWS, *passes.ROWS),
    "ranks": modules.ROWS,
}
TRACE_RULES: Final[tuple[Callable[[TraceReport], Finding | list[Finding] | None], ...]] = (
    allocator.allocator_thrash,
    collectives.communication_exposed,
    idle.gpu_idle,
    waits.synchronization,
    waits.blocking_transfers,
    waits.exposed_copies,
    kernels.tensor_cores_unused,
    kernels.unfused_attention,
    kernels.optimizer_loop,
    kernels.many_small_kernels,
    kernels.many_small_operators,
    profiler.recording_overhead,
)
RULES_OF_ALL_TRACES: Final[tuple[Callable[[Sequence[TraceReport]], Finding | list[Finding] | None], ...]] = (
    communication.straggler_in_traces,
)
# Rules of a trace that are the same fault as one of a run, under another id.
SAME_FAULT: Final[Mapping[str, str]] = {
    "optimizer_loop": "optimizer_bound",
}
RULE_FAILED: Final = "rule_failed"
# A person opens a few of thousands of traces.
MAX_EVIDENCE: Final = 16


def examine(facts: Facts) -> tuple[Finding, ...]:
    """Return every finding, the most severe first; if none is above info, ``nothing_found`` comes first.

    If a run and its traces have findings of the same rule, the run's counts: it has more steps. Rows that read the
    pulse do not read the few steps of a trace again. A rule that raises is a finding of its own: it hides
    nothing else.
    """
    judged = _with_enough_steps(facts)
    of_run = [finding for rule in RULES for finding in _guarded(rule, facts)]
    of_run += [
        finding
        for row in itertools.chain.from_iterable(BYTE_ROWS.values())
        for finding in _guarded(row.findings, facts, name=row.id)
    ]
    of_run += [finding for rule in (STEP_RULES if judged else ()) for finding in _guarded(rule, judged)]
    of_run += [
        finding
        for row in (itertools.chain(*ROWS.values()) if judged else ())
        for finding in _guarded(row.findings, judged, name=row.id)
    ]
    reported = {finding.rule for finding in of_run} - {RULE_FAILED}
    traces = facts.steady_traces if judged else ()
    of_files = examine_files(traces, facts.snapshots, has_pulse=bool(facts.ledgers))
    others = (each for each in of_files if SAME_FAULT.get(each.rule, each.rule) not in reported)
    found = _by_severity([*of_run, *others])
    if any(finding.severity > Severity.INFO for finding in found):
        return found
    return (*_guarded(nothing_found, facts), *found)


def _with_enough_steps(facts: Facts) -> Facts | None:
    """Return the facts of the ranks with enough steps to judge step time; None if no rank has enough."""
    judged = {rank: found for rank, found in facts.statistics.items() if found.used >= POLICY.steps}
    if len(judged) == len(facts.statistics):
        return facts
    return replace(facts, statistics=judged) if judged else None


def examine_files(
    traces: Iterable[TraceReport], snapshots: Iterable[SnapshotReport], *, has_pulse: bool = False
) -> tuple[Finding, ...]:
    """Return the findings of traces and snapshots, the most severe first; empty if no rule fires.

    A trace with a part of its events tells neither what a device waits for nor what overlaps.

    Args:
        traces: analyzed traces.
        snapshots: analyzed snapshots.
        has_pulse: whether the rows have judged the pulse of these steps.
    """
    of_snapshots = [
        finding
        for report in snapshots
        for row in itertools.chain.from_iterable(BYTE_ROWS.values())
        for device in report.devices
        for finding in _guarded(row.findings_in, report, device, name=row.id)
    ]
    read = tuple(trace for trace in traces if not trace.is_sample)
    of_all = [finding for rule in RULES_OF_ALL_TRACES for finding in _guarded(rule, read)]
    rows = () if has_pulse else tuple(itertools.chain(*ROWS.values()))
    return _by_severity([*of_all, *_of_traces(read, rows), *of_snapshots])


def _of_traces(traces: Iterable[TraceReport], rows: Sequence[Rule]) -> list[Finding]:
    """Return one finding per rule for all traces: the worst, with the evidence of all."""
    found: dict[tuple[str, object], list[Finding]] = {}
    for trace in traces:
        of_rows = (each for row in rows for each in _guarded(row.findings_in, trace, name=row.id))
        of_rules = (each for rule in TRACE_RULES for each in _guarded(rule, trace))
        for finding in (*of_rows, *of_rules):
            # A rule about two directions names the direction.
            found.setdefault((finding.rule, finding.numbers.get("kind")), []).append(finding)
    merged = map(_merged, found.values())
    # As those of a run: of one severity, what recovers most comes first.
    return [replace(each, weight=each.recovers.share) if each.recovers else each for each in merged]


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
                remedies=(REPORT_ERROR,),
                numbers={"failed": name or rule.__name__},
            )
        ]


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
    worth = (finding for finding in found if finding.severity > Severity.NONE)
    ordered = sorted(worth, key=lambda finding: (finding.severity, finding.weight), reverse=True)
    # A function has its time once: in the finding that is worth most.
    first = {finding.owner: finding for finding in reversed(ordered) if finding.owner}
    return tuple(finding for finding in ordered if first.get(finding.owner, finding) is finding)


def verdict_of(run: Run) -> Finding:
    """Return the first finding of a run: its main problem, the evidence, and the next step."""
    return examine(Facts.of(run))[0]
