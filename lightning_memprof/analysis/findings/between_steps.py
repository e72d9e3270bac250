"""Time that lies between the phases: validation inside of the fit, logging, the program's own code."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.actions import action_name, between_phases, is_validation
from lightning_memprof.analysis.findings.model import MIN_STEPS, Facts, Finding
from lightning_memprof.analysis.findings.own_cost import own_ns, program_between_ns
from lightning_memprof.analysis.findings.rhythm import rhythm, severity
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.findings.rhythm import Rhythm
    from lightning_memprof.analysis.run.load import Rank
    from lightning_memprof.analysis.steps.statistics import PulseStatistics

__all__ = ["NOTABLE_SHARE", "between_steps"]

# Lightning's loop and a logger stay below this in steps that are not short.
NOTABLE_SHARE: Final = 0.15
SEVERE_SHARE: Final = 0.40
# The Trainer's own work between the phases takes 1 to 4 ms a step, and there is nothing to change about it.
MIN_COST_NS: Final = 5_000_000
# What takes this long in one step is not the Trainer's own work, however rare it is.
MIN_STANDING_OUT_NS: Final = 50_000_000
# An action that takes this part of the time between the phases explains it.
MAIN_PART: Final = 0.5
VALIDATE_LESS: Final = "Trainer(val_check_interval=...) or Trainer(check_val_every_n_epoch=...)"


@dataclass(frozen=True)
class _Cause:
    """What the windows recorded of it: ``name`` is None where it was a validation."""

    name: str | None
    mean_ns: int


def between_steps(facts: Facts) -> list[Finding]:
    """Say that much of the time lies between the phases, in which steps, and what is known of it."""
    worst = facts.worst_by(_share)
    if worst is None:
        return []
    rank, statistics = worst
    between_ns, ours_ns = program_between_ns(rank, statistics), own_ns(rank, statistics)
    share = between_ns / statistics.mean_ns if statistics.mean_ns else 0.0
    if share <= NOTABLE_SHARE or statistics.used < MIN_STEPS:
        return []
    few = rhythm(rank, "other")
    if between_ns < MIN_COST_NS and (few is None or few.mean_ns < MIN_STANDING_OUT_NS):
        return []
    cause = _cause(rank, between_ns, few)
    other_ns = (statistics.breakdown_ns["other"] or 0) - ours_ns
    return [
        Finding(
            rule="between_steps",
            severity=severity(share, SEVERE_SHARE, few),
            sentence=(
                f"What lies between the phases takes {percent(other_ns / statistics.mean_ns)} of the time"
                f"{facts.on_rank(rank)}" + (f", most of it {_named(cause)}." if cause is not None else ".")
            ),
            why=_why((other_ns, statistics.mean_ns), few, cause),
            next_steps=_next_steps(few, cause) if facts.is_fit else _next_in_evaluation(cause),
            evidence=(facts.pulse(rank, few.steps if few else ()), *facts.recorded(rank, "hooks")),
            numbers={
                "rank": rank.rank,
                "other_share": other_ns / statistics.mean_ns,
                "other_ns": other_ns,
                "own_ns": ours_ns,
                "duration_ns": statistics.mean_ns,
                "steps": list(few.steps) if few else None,
                "period": few.period if few else None,
                "validation": None if cause is None else cause.name is None,
                "action": cause.name if cause else None,
            },
            weight=share,
        )
    ]


def _share(statistics: PulseStatistics) -> float:
    return statistics.between_ns / statistics.mean_ns if statistics.mean_ns else 0.0


def _cause(rank: Rank, between_ns: int, few: Rhythm | None) -> _Cause | None:
    """Return what takes most of the time between the phases in the recorded steps that show it, if any do."""
    recorded = between_phases(rank)
    least = MAIN_PART * (few.mean_ns if few is not None else between_ns)
    if few is not None:
        recorded = {step: times for step, times in recorded.items() if sum(times.values()) >= least}
    if not recorded:
        return None
    totals: Counter[str | None] = Counter()
    for times in recorded.values():
        for action, ns in times.items():
            totals[None if is_validation(action) else action_name(action)] += ns
    if not totals:
        return None
    name, total = totals.most_common(1)[0]
    mean_ns = round(total / len(recorded))
    return _Cause(name, mean_ns) if mean_ns >= least else None


def _named(cause: _Cause) -> str:
    return cause.name or "validation"


def _why(times: tuple[int, int], few: Rhythm | None, cause: _Cause | None) -> str:
    other_ns, mean_ns = times
    if few is None:
        said = f"{format_ns(other_ns)} of a {format_ns(mean_ns)} step are neither a phase nor a callback"
        if cause is not None:
            return f"{said}; {_named(cause)} takes {format_ns(cause.mean_ns)} of a recorded step."
        return f"{said}: logging, or code of the program that no hook covers."
    said = f"{few.subject} {few.verb} {format_ns(few.mean_ns)} between its phases"
    if few.verb == "take":
        said = said.replace(" its ", " their ")
    if cause is not None:
        return f"{said}: {_named(cause)}, {format_ns(cause.mean_ns)} of a recorded step."
    return f"{said}: validation or a checkpoint, or code of the program; no window recorded such a step."


def _next_in_evaluation(cause: _Cause | None) -> tuple[str, ...]:
    """Nothing is trained: what fits a loop over batches alone."""
    if cause is not None and cause.name is not None:
        return (f"Do the work of {cause.name} less often, or in a thread.",)
    return (
        "Look at what the program does around its batches: their start and end hooks, self.log(..., on_step=True).",
        "Give a batch more work, such as more samples: then there are fewer of them.",
    )


def _next_steps(few: Rhythm | None, cause: _Cause | None) -> tuple[str, ...]:
    if cause is not None and cause.name is not None:
        return (f"Do the work of {cause.name} less often, or in a thread.",)
    if few is not None and cause is not None:
        return (f"Validate less often, {VALIDATE_LESS}, or on less: Trainer(limit_val_batches=...).",)
    if few is not None:
        return (
            f"If it is validation, validate less often: {VALIDATE_LESS}.",
            f"Record such a step: MemProfilerCallback(schedule=Schedule(wait={max(few.steps[0] - 2, 0)}, active=3)).",
        )
    if cause is not None:
        return (f"Validate less often: {VALIDATE_LESS}.",)
    return (
        "Log less often: Trainer(log_every_n_steps=...), self.log(..., on_step=False).",
        "Look at what the program does around its steps: on_train_batch_start, on_train_batch_end, its own loop.",
    )
