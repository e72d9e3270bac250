"""What recording itself costs, where it is so much that the figures are no longer the training's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Facts, Finding, Severity
from lightning_memprof.analysis.findings.own_cost import own_ns, typical_in_windows
from lightning_memprof.analysis.run.rows import mapping, whole
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.run.load import Rank
    from lightning_memprof.analysis.steps.statistics import PulseStatistics

__all__ = ["profiler_overhead"]

# Figures that are off by less than this lead to the same conclusions.
NOTABLE_SHARE: Final = 0.10
# As much as a phase must take to be a finding of its own.
SEVERE_SHARE: Final = 0.20
# Of fewer steps nobody draws conclusions: a longer run has steps outside of windows.
MIN_USED: Final = 10
# The promise is 20 us a step: more than this part only where steps are that short.
NOTABLE_PULSE: Final = 0.02
# Windows are chosen, and their cost is paid once; from so much of the run on it is worth saying.
NOTABLE_WINDOWS: Final = 0.25
FEWER: Final = (
    "Record fewer steps, and train some outside of windows: MemProfilerCallback(schedule=Schedule(wait=10, active=2))."
)
LESS: Final = "Record less in a step: MemProfilerCallback(collectors=[...])"
SHORTER: Final = "Open fewer or shorter windows: MemProfilerCallback(schedule=Schedule(repeat=1, active=2))."


def profiler_overhead(facts: Facts) -> list[Finding]:
    """Say that our own work is a notable part of the steps that the figures rest on, or of the whole run."""
    found = []
    for rank in facts.run.ranks:
        statistics = facts.statistics.get(rank.rank)
        if statistics is None or not statistics.mean_ns:
            continue
        found += _in_figures(facts, rank, statistics) or _of_run(facts, rank)
    return [max(found, key=lambda finding: (finding.severity, finding.weight))] if found else []


def _in_figures(facts: Facts, rank: Rank, statistics: PulseStatistics) -> list[Finding]:
    ours_ns = own_ns(rank, statistics)
    share = ours_ns / statistics.mean_ns
    if share <= NOTABLE_SHARE:
        return []
    steps, dearest = typical_in_windows(rank), _dearest(rank)
    return [
        Finding(
            rule="profiler_overhead",
            severity=Severity.WARNING if share >= SEVERE_SHARE and statistics.used >= MIN_USED else Severity.INFO,
            sentence=f"Recording itself takes {percent(share)} of the steps that the figures rest on.",
            why=(
                f"{len(steps)} of the {statistics.used} steps lie in windows, and {format_ns(ours_ns)} of a "
                f"{format_ns(statistics.mean_ns)} step are our own work at its marks; operators are slower there too."
            ),
            next_steps=(FEWER, f"{LESS}; {dearest}" if dearest else f"{LESS}."),
            evidence=(facts.pulse(rank, steps), *facts.recorded(rank, "hooks")),
            numbers={"rank": rank.rank, "own_share": share, "own_ns": ours_ns, "steps": len(steps)},
            weight=share,
        )
    ]


def _of_run(facts: Facts, rank: Rank) -> list[Finding]:
    """Say what the pulse and the windows cost the whole run, where that is much; both are as they were asked for."""
    run_ns = sum(row["duration_ns"] or 0 for row in rank.pulse)
    pulse_ns, windows_ns = whole(rank.overhead, "pulse_ns") or 0, whole(rank.overhead, "windows_ns") or 0
    if not run_ns:
        return []
    numbers = {"rank": rank.rank, "pulse_ns": pulse_ns, "windows_ns": windows_ns, "run_ns": run_ns}
    if windows_ns > NOTABLE_WINDOWS * (run_ns + windows_ns):
        share = windows_ns / (run_ns + windows_ns)
        dearest = _dearest(rank)
        return [
            Finding(
                rule="profiler_overhead",
                severity=Severity.INFO,
                sentence=f"Windows took {percent(share)} of the run{facts.on_rank(rank)}; outside of them it is free.",
                why=(
                    f"{format_ns(windows_ns)} in {len(rank.windows)} window{'s' * (len(rank.windows) != 1)}, beside "
                    f"{format_ns(run_ns)} of steps" + (f"; {dearest}" if dearest else ".")
                ),
                next_steps=(SHORTER,),
                evidence=facts.recorded(rank, "hooks"),
                numbers=numbers,
                weight=share,
            )
        ]
    if pulse_ns > NOTABLE_PULSE * run_ns:
        return [
            Finding(
                rule="profiler_overhead",
                severity=Severity.INFO,
                sentence=f"The pulse takes {percent(pulse_ns / run_ns)} of the steps{facts.on_rank(rank)}.",
                why=f"{format_ns(pulse_ns / len(rank.pulse))} of a step of {format_ns(run_ns / len(rank.pulse))}.",
                next_steps=("Leave the pulse out of MemProfilerCallback(collectors=[...]), or give a step more work.",),
                evidence=(facts.pulse(rank),),
                numbers=numbers,
                weight=pulse_ns / run_ns,
            )
        ]
    return []


def _dearest(rank: Rank) -> str | None:
    by_collector = mapping(rank.overhead, "collectors_ns") or {}
    known = {name: ns for name in by_collector if (ns := whole(by_collector, name))}
    if not known:
        return None
    name = max(known, key=lambda collector: known[collector])
    return f"{name} took the most, {format_ns(known[name])}."
