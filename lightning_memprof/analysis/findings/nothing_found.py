"""No rule applies: what dominates, and how to look further."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.between_steps import NOTABLE_SHARE as NOTABLE_BETWEEN
from lightning_memprof.analysis.findings.callback_bound import NOTABLE_SHARE as NOTABLE_CALLBACKS
from lightning_memprof.analysis.findings.model import MIN_STEPS, NOTHING_FOUND, SHORT_STEP_NS, Facts, Finding, Severity
from lightning_memprof.analysis.findings.own_cost import program_between_ns
from lightning_memprof.analysis.run.locate import shown_place
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.run.load import Rank, Run
    from lightning_memprof.analysis.steps.statistics import PulseStatistics

__all__ = ["nothing_found"]

# With fewer steps the first ones, which are never typical, are most of what was seen.
FEW_STEPS: Final = 5
MAX_MESSAGE: Final = 120
LARGER: Final = "Give a step more work, such as a larger batch, before looking for a bottleneck in it."
DOING: Final = {
    "data_wait": "waiting for data",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "callbacks": "callbacks",
    "other": "what lies between the phases",
}


def nothing_found(facts: Facts) -> Finding:
    """Say what dominates the step, and name the command that shows more."""
    run = facts.run
    rank = next((rank for rank in (run.lead, *run.ranks) if rank.rank in facts.statistics), run.lead)
    statistics = facts.statistics.get(rank.rank)
    failed = next((rank.exception for rank in run.ranks if rank.exception), None)
    early = f"The run ended early with {failed[:MAX_MESSAGE]}. " if failed else ""
    if statistics is None:
        return Finding(
            rule=NOTHING_FOUND,
            severity=Severity.NONE,
            sentence="No step was measured.",
            why=early + "The run has no pulse: it ended before its first step was over, or the pulse is off.",
            next_steps=(f"{_run(facts)} some steps with MemProfilerCallback() in Trainer(callbacks=[...]).",),
        )
    first, second = sorted(DOING, key=lambda phase: statistics.breakdown_ns[phase] or 0, reverse=True)[:2]
    numbers = {"dominant": first, "share": statistics.share(first), "duration_ns": statistics.mean_ns}
    seen = f"{statistics.steps} step{' was' if statistics.steps == 1 else 's were'} seen"
    if statistics.steps < MIN_STEPS:
        return Finding(
            rule=NOTHING_FOUND,
            severity=Severity.INFO,
            sentence="Too few steps to judge.",
            why=f"{early}{seen[0].upper()}{seen[1:]}, and the first one is never typical.",
            next_steps=(f"{_run(facts)} at least {FEW_STEPS} steps.", _look_further(run)),
            numbers=numbers,
        )
    takes = f"{DOING[first]} takes {percent(statistics.share(first))} of a step"
    few = f" Only {seen}." if statistics.steps < FEW_STEPS else ""
    around = _around(rank, statistics)
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE if around is None else Severity.INFO,
        sentence=f"No bottleneck found: {takes}." if around is None else around,
        why=(
            f"{early}A step takes {format_ns(statistics.mean_ns)}"
            + ("; next comes " if around is None else f": {takes}, ")
            + f"{DOING[second]} {'with ' if around is None else ''}{percent(statistics.share(second))}.{few}"
        ),
        next_steps=(_look_further(run),) if around is None else (LARGER, _look_further(run)),
        numbers=numbers,
    )


def _run(facts: Facts) -> str:
    return "Train for" if facts.is_fit else "Run"


def _around(rank: Rank, statistics: PulseStatistics) -> str | None:
    """Say that much of the step is not the model's, though too little of it to be a finding; None where it is not."""
    callbacks = statistics.callbacks_ns / statistics.mean_ns if statistics.mean_ns else 0.0
    between = program_between_ns(rank, statistics) / statistics.mean_ns if statistics.mean_ns else 0.0
    if callbacks <= NOTABLE_CALLBACKS and between <= NOTABLE_BETWEEN:
        return None
    length = "very short" if statistics.mean_ns < SHORT_STEP_NS else "short"
    around = percent(callbacks + between)
    return f"The steps are {length}: callbacks and what lies between the phases take {around} of them."


def _look_further(run: Run) -> str:
    """Name the command for the most telling artifact that is there."""
    if any(artifact.type == "trace" and artifact.state == "present" for artifact in run.artifacts):
        place = shlex.quote(shown_place(run.directory, run.root, run.url))
        return f"See every operator on a time line: lightning-memprof view {place}"
    return 'Record the operators of some steps too: Trainer(..., profiler="fts_extended")'
