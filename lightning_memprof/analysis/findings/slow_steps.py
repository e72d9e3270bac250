"""Steps that pause: a few that take a multiple of the others, and GC pauses."""

from __future__ import annotations

import statistics as stats
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.data import input_bound
from lightning_memprof.analysis.findings.host import between_steps, callback_bound
from lightning_memprof.analysis.findings.measures import few_steps, pauses_by_step, severity
from lightning_memprof.analysis.findings.model import MIN_STEPS, Facts, Finding, Severity
from lightning_memprof.analysis.steps.pauses import pauses
from lightning_memprof.analysis.steps.phases import OWN_WORK, action_name
from lightning_memprof.units import format_bytes, format_count, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lightning_memprof.analysis.findings.measures import Rhythm
    from lightning_memprof.analysis.run.model import Rank
    from lightning_memprof.analysis.steps.events import StepEvents
    from lightning_memprof.analysis.steps.pauses import Pauses
    from lightning_memprof.analysis.steps.typical import TypicalSteps

__all__ = ["garbage", "slow_steps"]

# Twice the median is outside the spread of ordinary steps.
STANDS_OUT: Final = 2
# Batches of different lengths make a spread without a gap: the fastest slow step must take this many times the 90th
# percentile of the others.
APART: Final = 1.5
USUAL_PART: Final = 0.9
# The share of the run that these steps cost beyond the usual step.
NOTABLE_SHARE: Final = 0.10
SEVERE_SHARE: Final = 0.40
# The system and the Trainer delay single steps by less.
MIN_EXCESS_NS: Final = 50_000_000
# Three delayed steps are equidistant by chance in one run of twenty, four hardly ever.
MIN_RHYTHM: Final = 4
CATCH: Final = "MemProfilerCallback(triggers=Triggers(anomalies=[SlowStep()]))"
# A cause with this share of the excess explains it.
MAIN_PART: Final = 0.5
GARBAGE: Final = "GC pauses"
PASSES: Final = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer"}
PARTS: Final = {
    "validation": "validation",
    "checkpoint": "saving a checkpoint",
    "logging": "logging",
    "data_wait": "waiting for data",
    "transfer": "moving the batch to the device",
    **PASSES,
}
PHASES: Final = {"data_wait": "waiting for data", **PASSES, "callbacks": "callbacks", "other": "untracked time"}
RULES_OF_PHASES: Final = {"data_wait": input_bound, "callbacks": callback_bound, "other": between_steps}
COMPARE_BATCHES: Final = "Compare the batches of these steps with the others: longer samples, shapes that recompile."
FREEZE: Final = "Exempt permanent objects from collections: gc.collect(); gc.freeze() in on_train_start."
NEXT: Final = {
    "validation": "Validate less: Trainer(val_check_interval=1000) or Trainer(limit_val_batches=50).",
    "saving a checkpoint": "Save less often: ModelCheckpoint(every_n_train_steps=1000), or in a thread.",
    "logging": "Log less often: Trainer(log_every_n_steps=50).",
    "waiting for data": "Prefetch more: raise num_workers and prefetch_factor of the DataLoader.",
    "the forward pass": COMPARE_BATCHES,
    "the backward pass": COMPARE_BATCHES,
    GARBAGE: FREEZE,
}


@dataclass(frozen=True, kw_only=True)
class _Cause:
    """An activity that takes ``ns`` more in a slow step than in others; ``is_recorded`` if a window saw such a step."""

    name: str
    ns: int
    phase: str | None
    is_recorded: bool


def slow_steps(facts: Facts) -> list[Finding]:
    """Find the few steps that take a multiple of the others, their period, and the activity that differs."""
    found = [finding for rank in facts.run.ranks if (finding := _slow_steps_of(facts, rank)) is not None]
    return [max(found, key=lambda finding: (finding.severity, finding.weight))] if found else []


def _slow_steps_of(facts: Facts, rank: Rank) -> Finding | None:
    typical = rank.typical_steps
    if typical is None or len(typical.steps) < MIN_STEPS:
        return None
    spent = [(step, duration) for step, duration, _ in typical.steps]
    few = few_steps(rank, spent, stands_out=STANDS_OUT)
    if few is None:
        return None
    usual = sorted(ns for step, ns in spent if step not in few.steps)
    slowest_usual_ns = usual[round(USUAL_PART * (len(usual) - 1))]
    if min(ns for step, ns in spent if step in few.steps) < APART * slowest_usual_ns:
        return None
    usual_ns = round(stats.median(usual))
    excess_ns = few.mean_ns - usual_ns
    share = excess_ns * len(few.steps) / (sum(ns for _, ns in spent) or 1)
    if share <= NOTABLE_SHARE or excess_ns < MIN_EXCESS_NS:
        return None
    cause = _recorded_cause(facts, rank, usual_ns, excess_ns) or _phase_cause(typical, few)
    accumulated = rank.training.accumulate_grad_batches if rank.training else None
    if cause is not None and cause.phase == "optimizer" and (accumulated or 1) > 1:
        return None
    mostly = f", mostly {cause.name}" if cause is not None else ""
    factor = few.mean_ns / max(usual_ns, 1)
    return Finding(
        rule="slow_steps",
        severity=_severity(facts, replace(few, mean_ns=excess_ns), cause, share),
        sentence=f"{few.subject} {few.verb} {factor:.1f} times as long as the others{facts.on_rank(rank)}{mostly}.",
        why=_why(few, cause, usual_ns, share),
        next_steps=_next_steps(few, cause),
        evidence=(facts.pulse(rank, few.steps), *facts.recorded(rank, "hooks", few.steps)),
        numbers={
            "rank": rank.rank,
            "steps": list(few.steps),
            "period": few.period,
            "ends_epochs": few.ends_epochs,
            "starts_epochs": few.starts_epochs,
            "slow_ns": few.mean_ns,
            "usual_ns": usual_ns,
            "excess_share": share,
            "cause": cause.name if cause else None,
            "cause_ns": cause.ns if cause else None,
        },
        # The rule about the phase has more specific advice.
        weight=share / 2,
    )


def _severity(facts: Facts, excess: Rhythm, cause: _Cause | None, share: float) -> Severity:
    is_reported = cause is not None and cause.phase in RULES_OF_PHASES and RULES_OF_PHASES[cause.phase](facts)
    # A slow forward pass is not an explanation: a busy machine delays it too.
    is_explained = cause is not None and cause.is_recorded and cause.name not in PASSES.values()
    if is_reported or not (is_explained or _is_rhythm(excess)):
        return Severity.INFO
    return severity(share, SEVERE_SHARE, excess)


def _is_rhythm(few: Rhythm) -> bool:
    """Return whether the steps are so regular that a busy machine cannot explain them."""
    if len(few.steps) > 1 and (few.ends_epochs or few.starts_epochs):
        return True
    return few.period is not None and len(few.steps) >= MIN_RHYTHM


def _recorded_cause(facts: Facts, rank: Rank, usual_ns: int, excess_ns: int) -> _Cause | None:
    """Return the activity that takes longer in recorded steps as slow as these, None if no window recorded one."""
    least = usual_ns + MAIN_PART * excess_ns
    slow: list[StepEvents] = []
    others: list[StepEvents] = []
    for step in facts.events(rank):
        own = sum(event.self_ns for event in step.events if event.action.startswith(OWN_WORK))
        (slow if step.duration_ns - own >= least else others).append(step)
    if not slow:
        return None
    paused = pauses_by_step(rank)
    collected = sum(paused.get(event.step, 0) for event in slow) // len(slow)
    if collected >= MAIN_PART * excess_ns:
        return _Cause(name=GARBAGE, ns=collected, phase=None, is_recorded=True)
    before, after = _mean_times(others), _mean_times(slow)
    name, phase = max(after, key=lambda key: after[key] - before.get(key, 0), default=("", ""))
    ns = after.get((name, phase), 0) - before.get((name, phase), 0)
    return _Cause(name=name, ns=ns, phase=phase or None, is_recorded=True) if ns >= MAIN_PART * excess_ns else None


def _mean_times(steps: Iterable[StepEvents]) -> Mapping[tuple[str, str], int]:
    """Return the mean nanoseconds per step by name of the activity and phase of the pulse."""
    totals: Counter[tuple[str, str]] = Counter()
    count = 0
    for step in steps:
        count += 1
        for event in step.events:
            if not event.action.startswith(OWN_WORK):
                totals[_named(event.action, event.part)] += event.self_ns
    return {name: ns // count for name, ns in totals.items()}


def _named(action: str, part: str) -> tuple[str, str]:
    if part in PARTS:
        phase = part if part in PHASES else "callbacks" if part == "checkpoint" else "other"
        return PARTS[part], phase
    return action_name(action), "callbacks" if part == "callbacks" else "other"


def _phase_cause(typical: TypicalSteps, few: Rhythm) -> _Cause | None:
    """Return the phase with most of the excess of the slow steps."""
    slow = [breakdown for step, _, breakdown in typical.steps if step in few.steps]
    others = [breakdown for step, _, breakdown in typical.steps if step not in few.steps]
    more = {
        phase: round(stats.fmean(step[phase] or 0 for step in slow) - stats.median(step[phase] or 0 for step in others))
        for phase in PHASES
    }
    phase = max(more, key=lambda name: more[name])
    if more[phase] < MAIN_PART * sum(max(ns, 0) for ns in more.values()):
        return None
    return _Cause(name=PHASES[phase], ns=more[phase], phase=phase, is_recorded=False)


def _why(few: Rhythm, cause: _Cause | None, usual_ns: int, share: float) -> str:
    verb = "takes" if len(few.steps) == 1 else "take"
    size = (
        f"{len(few.steps)} of {few.seen} steps {verb} {format_ns(few.mean_ns)}, the others {format_ns(usual_ns)}: "
        f"{percent(share)} of step time"
    )
    chance = "" if _is_rhythm(few) else " Without a period, a busy machine may be the cause."
    if cause is None:
        return f"{size}; no phase takes most of the excess.{chance}"
    if cause.is_recorded:
        return f"{size}; {cause.name} takes {format_ns(cause.ns)} in a recorded slow step."
    return f"{size}; {cause.name} takes {format_ns(cause.ns)}; no window recorded such a step.{chance}"


def _next_steps(few: Rhythm, cause: _Cause | None) -> tuple[str, ...]:
    steps = []
    if cause is not None and cause.name in NEXT:
        steps.append(NEXT[cause.name])
    elif cause is not None and cause.is_recorded:
        steps.append(f"Do the work of {cause.name} less often, or in a thread.")
    if cause is None or not cause.is_recorded:
        schedule = f"MemProfilerCallback(schedule=Schedule(steps=({few.steps[0]},), active=1))"
        steps.append(
            f"Record such a step: {schedule}."
            if _is_rhythm(few)
            else f"Let the next slow step open a window, to see whether its cause continues: {CATCH}."
        )
    return tuple(steps)


# As for callbacks: below 5% of a step there is little to gain.
NOTABLE_PAUSES: Final = 0.05
SEVERE_PAUSES: Final = 0.30
# Collections of young generations take less per step in every program.
MIN_PAUSES_NS: Final = 2_000_000
# A pause in a single step shows no frequency.
MIN_RECORDED: Final = 2
# Python starts a full collection in one step of many; in this share of the steps the program calls gc.collect().
EXPLICIT_SHARE: Final = 0.8
OLDEST: Final = 2
EXPLICIT: Final = "Find the gc.collect() call in the program or a callback: it runs a full collection every step."
CHOOSE: Final = "Choose when to collect: gc.disable() in on_train_start, gc.collect() every 100 batches."
CYCLES: Final = "Break the cycles that hold tensors: store no tensor on an object that refers to itself or its owner."


@dataclass(frozen=True, kw_only=True)
class _Cost:
    """``steady_share`` is the share of the recorded steps without the step that has the most."""

    rank: Rank
    steps: tuple[int, ...]
    share: float
    steady_share: float
    mean_ns: int


def garbage(facts: Facts) -> list[Finding]:
    """Find GC pauses that take much of the recorded steps."""
    costs = [cost for rank in facts.run.ranks if (cost := _cost(facts, rank)) is not None]
    worst = max(costs, key=lambda cost: cost.steady_share, default=None)
    if worst is None or worst.steady_share <= NOTABLE_PAUSES or worst.mean_ns < MIN_PAUSES_NS:
        return []
    found = pauses(worst.rank)[0]
    if found is None:
        return []
    return [
        Finding(
            rule="garbage",
            severity=severity(worst.steady_share, SEVERE_PAUSES),
            sentence=f"GC pauses take {percent(worst.share)} of each recorded step{facts.on_rank(worst.rank)}.",
            why=_why_pauses(found, worst),
            next_steps=_next_for_pauses(found, worst),
            evidence=facts.recorded(worst.rank, "garbage", worst.steps),
            numbers={
                "rank": worst.rank.rank,
                "garbage_share": worst.share,
                "garbage_ns": worst.mean_ns,
                "pauses": found.count,
                "longest_ns": found.max_ns,
                "generations": {str(number): list(counts) for number, counts in found.generations.items()},
                "tensor_bytes": found.tensor_bytes,
            },
            weight=worst.share,
        )
    ]


def _cost(facts: Facts, rank: Rank) -> _Cost | None:
    spent = pauses_by_step(rank)
    if not spent:
        return None
    recorded = {step for window in rank.windows for step in window.steps}
    durations = {row["step"]: row["duration_ns"] for row in rank.pulse if row["step"] in recorded}
    if not durations:
        durations = {event.step: event.duration_ns for event in facts.events(rank)}
    pairs = sorted((spent.get(step or 0, 0), duration) for step, duration in durations.items() if duration)
    if len(pairs) < MIN_RECORDED:
        return None
    return _Cost(
        rank=rank,
        steps=tuple(sorted(spent)),
        share=_share(pairs),
        steady_share=_share(pairs[:-1]),
        mean_ns=sum(ns for ns, _ in pairs) // len(pairs),
    )


def _share(pairs: list[tuple[int, int]]) -> float:
    return sum(ns for ns, _ in pairs) / (sum(duration for _, duration in pairs) or 1)


def _why_pauses(found: Pauses, worst: _Cost) -> str:
    count = format_count(found.count, "pause")
    parts = [f"{count}: total {format_ns(found.total_ns)}, max {format_ns(found.max_ns)}"]
    if OLDEST in found.generations:
        full, ns = found.generations[OLDEST]
        parts.append(f"{format_count(full, 'full collection')}, {format_ns(ns)}")
    if found.tensor_bytes:
        parts.append(f"reference cycles held {format_bytes(found.tensor_bytes)} of tensors")
    return "; ".join(parts) + f"; {format_ns(worst.mean_ns)} of a recorded step."


def _next_for_pauses(found: Pauses, worst: _Cost) -> tuple[str, ...]:
    full, _ = found.generations.get(OLDEST, (0, 0))
    is_explicit = full >= EXPLICIT_SHARE * sum(len(window.steps) for window in worst.rank.windows)
    return (*((EXPLICIT,) if is_explicit else ()), FREEZE, CHOOSE, *((CYCLES,) if found.tensor_bytes else ()))
