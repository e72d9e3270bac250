"""A few steps that take a multiple of the others, their rhythm, and what happens in just those."""

from __future__ import annotations

import statistics as stats
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.actions import action_name
from lightning_memprof.analysis.findings.between_steps import between_steps
from lightning_memprof.analysis.findings.callback_bound import callback_bound
from lightning_memprof.analysis.findings.garbage import pauses_by_step
from lightning_memprof.analysis.findings.input_bound import input_bound
from lightning_memprof.analysis.findings.model import MIN_STEPS, Facts, Finding, Severity
from lightning_memprof.analysis.findings.rhythm import few_steps, severity
from lightning_memprof.analysis.run.rows import whole
from lightning_memprof.analysis.steps.phases import OWN_WORK
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lightning_memprof.analysis.findings.rhythm import Rhythm
    from lightning_memprof.analysis.run.load import Rank
    from lightning_memprof.analysis.steps.events import StepEvents
    from lightning_memprof.analysis.steps.typical import TypicalSteps

__all__ = ["slow_steps"]

# A step that takes twice the median is told from the spread of ordinary ones.
STANDS_OUT: Final = 2
# Batches of different lengths make a spread without a gap: the slow ones are apart where the fastest of them takes so
# many times what nine in ten of the others stay below.
APART: Final = 1.5
USUAL_PART: Final = 0.9
# Without what is special about them the run would be that much shorter.
NOTABLE_SHARE: Final = 0.10
SEVERE_SHARE: Final = 0.40
# The system and the Trainer hold up single steps for less than this.
MIN_EXCESS_NS: Final = 50_000_000
# Three steps that a machine held up lie at equal distances by chance in one run of twenty; four hardly ever do.
MIN_RHYTHM: Final = 4
CATCH: Final = "MemProfilerCallback(triggers=Triggers(anomalies=[SlowStep()]))"
# What takes this part of the excess explains it.
MAIN_PART: Final = 0.5
GARBAGE: Final = "Python's garbage collector"
PARTS: Final = {
    "validation": "validation",
    "checkpoint": "saving a checkpoint",
    "logging": "logging",
    "data_wait": "waiting for data",
    "transfer": "moving the batch to the device",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
}
PHASES: Final = {
    "data_wait": "waiting for data",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "callbacks": "callbacks",
    "other": "what lies between the phases",
}
PASSES: Final = frozenset(PARTS[name] for name in ("forward", "backward", "optimizer"))
RULES_OF_PHASES: Final = {"data_wait": input_bound, "callbacks": callback_bound, "other": between_steps}
NEXT: Final = {
    "validation": "Validate less often, Trainer(val_check_interval=...), or on less: Trainer(limit_val_batches=...).",
    "saving a checkpoint": "Save less often: ModelCheckpoint(every_n_train_steps=...), or in a thread.",
    "logging": "Log less often: Trainer(log_every_n_steps=...).",
    "waiting for data": "Let workers fetch further ahead: DataLoader(num_workers=..., prefetch_factor=...).",
    "the forward pass": "Compare those steps' batches with the others': longer samples, new shapes that compile anew.",
    "the backward pass": "Compare those steps' batches with the others': longer samples, new shapes that compile anew.",
    GARBAGE: "Leave what stays for good out of collections: gc.collect(); gc.freeze() in on_train_start.",
}


@dataclass(frozen=True)
class _Cause:
    """What takes ``ns`` more in a slow step than in others; ``is_recorded`` where a window saw such a step."""

    name: str
    ns: int
    phase: str | None
    is_recorded: bool


def slow_steps(facts: Facts) -> list[Finding]:
    """Say which few steps take a multiple of the others, how often they come, and what they do that others do not."""
    found = [finding for rank in facts.run.ranks if (finding := _finding(facts, rank)) is not None]
    return [max(found, key=lambda finding: (finding.severity, finding.weight))] if found else []


def _finding(facts: Facts, rank: Rank) -> Finding | None:
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
    cause = _recorded_cause(facts, rank, (usual_ns, excess_ns)) or _phase_cause(typical, few)
    if cause is not None and cause.phase == "optimizer" and (whole(rank.training, "accumulate_grad_batches") or 1) > 1:
        return None
    return Finding(
        rule="slow_steps",
        severity=_severity(facts, replace(few, mean_ns=excess_ns), cause, share),
        sentence=(
            f"{few.subject} {few.verb} {few.mean_ns / max(usual_ns, 1):.1f} times as long as the others"
            f"{facts.on_rank(rank)}" + (f", most of it {cause.name}." if cause is not None else ".")
        ),
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
        # The rule about the phase in which it happens says more of what to do.
        weight=share / 2,
    )


def _severity(facts: Facts, excess: Rhythm, cause: _Cause | None, share: float) -> Severity:
    told = cause is not None and cause.phase in RULES_OF_PHASES and RULES_OF_PHASES[cause.phase](facts)
    # That it was the forward pass does not say why: a machine that does something else slows that down too.
    is_explained = cause is not None and cause.is_recorded and cause.name not in PASSES
    return Severity.INFO if told or not (is_explained or _is_rhythm(excess)) else severity(share, SEVERE_SHARE, excess)


def _is_rhythm(few: Rhythm) -> bool:
    """Whether the steps come so regularly that no busy machine explains them."""
    if len(few.steps) > 1 and (few.ends_epochs or few.starts_epochs):
        return True
    return few.period is not None and len(few.steps) >= MIN_RHYTHM


def _recorded_cause(facts: Facts, rank: Rank, times: tuple[int, int]) -> _Cause | None:
    """Return what recorded steps as slow as these do more of than the other recorded ones, None where none was."""
    usual_ns, excess_ns = times
    least = usual_ns + MAIN_PART * excess_ns
    own = {
        step_events.step: sum(event.self_ns for event in step_events.events if _is_own(event.action))
        for step_events in facts.events(rank)
    }
    slow = [
        step_events for step_events in facts.events(rank) if step_events.duration_ns - own[step_events.step] >= least
    ]
    others = [step_events for step_events in facts.events(rank) if step_events not in slow]
    if not slow:
        return None
    pauses = pauses_by_step(rank)
    collected = sum(pauses.get(event.step, 0) for event in slow) // len(slow)
    if collected >= MAIN_PART * excess_ns:
        return _Cause(GARBAGE, collected, None, is_recorded=True)
    before, after = _mean_times(others), _mean_times(slow)
    name, phase = max(after, key=lambda key: after[key] - before.get(key, 0), default=("", ""))
    ns = after.get((name, phase), 0) - before.get((name, phase), 0)
    return _Cause(name, ns, phase or None, is_recorded=True) if ns >= MAIN_PART * excess_ns else None


def _mean_times(steps: Iterable[StepEvents]) -> Mapping[tuple[str, str], int]:
    """Return by what a step does, as a person calls it, and its phase of the pulse the mean nanoseconds."""
    totals: Counter[tuple[str, str]] = Counter()
    count = 0
    for step_events in steps:
        count += 1
        for event in step_events.events:
            if not _is_own(event.action):
                totals[_named(event.action, event.part)] += event.self_ns
    return {name: ns // count for name, ns in totals.items()}


def _named(action: str, part: str) -> tuple[str, str]:
    if part in PARTS:
        phase = part if part in PHASES else "callbacks" if part == "checkpoint" else "other"
        return PARTS[part], phase
    return action_name(action), "callbacks" if part == "callbacks" else "other"


def _is_own(action: str) -> bool:
    return action.startswith(OWN_WORK)


def _phase_cause(typical: TypicalSteps, few: Rhythm) -> _Cause | None:
    """Return the phase that takes most of what the slow steps take more than the others."""
    slow = [breakdown for step, _, breakdown in typical.steps if step in few.steps]
    others = [breakdown for step, _, breakdown in typical.steps if step not in few.steps]
    more = {
        phase: round(stats.fmean(step[phase] or 0 for step in slow) - stats.median(step[phase] or 0 for step in others))
        for phase in PHASES
    }
    phase = max(more, key=lambda name: more[name])
    enough = more[phase] >= MAIN_PART * sum(max(ns, 0) for ns in more.values())
    return _Cause(PHASES[phase], more[phase], phase, is_recorded=False) if enough else None


def _why(few: Rhythm, cause: _Cause | None, usual_ns: int, share: float) -> str:
    times = f"{format_ns(few.mean_ns)} where the others take {format_ns(usual_ns)}"
    said = f"{len(few.steps)} of {few.seen} steps: {times}, {percent(share)} of all time"
    if cause is None:
        chance = "" if _is_rhythm(few) else ": without a rhythm it may be chance, a machine that is busy otherwise"
        return f"{said}; no single phase takes most of it{chance}."
    seen = " in a recorded one" if cause.is_recorded else ""
    unknown = "" if cause.is_recorded else "; no window recorded such a step"
    if not cause.is_recorded and not _is_rhythm(few):
        unknown += ", and without a rhythm it may be chance: a machine that is busy with something else does this"
    return f"{said}; {format_ns(cause.ns)} of it {cause.name}{seen}{unknown}."


def _next_steps(few: Rhythm, cause: _Cause | None) -> tuple[str, ...]:
    steps = []
    if cause is not None and cause.name in NEXT:
        steps.append(NEXT[cause.name])
    elif cause is not None and cause.is_recorded:
        steps.append(f"Do the work of {cause.name} less often, or in a thread.")
    if cause is None or not cause.is_recorded:
        if _is_rhythm(few):
            schedule = f"MemProfilerCallback(schedule=Schedule(steps=({few.steps[0]},), active=1))"
            steps.append(f"Record such a step: {schedule}.")
        else:
            steps.append(f"Have the next slow step open a window, which shows what still goes on behind it: {CATCH}.")
    return tuple(steps)
