"""Host time in the steps of a run: callbacks, logging, checkpoints, untracked time, the optimizer's loop."""

from __future__ import annotations

import statistics as stats
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.measures import (
    between_phases,
    is_validation,
    own_marks,
    own_ns,
    program_between_ns,
    rhythm,
    severity,
    slowest_callback,
)
from lightning_memprof.analysis.findings.model import MIN_STEPS, SHORT_STEP_NS, Facts, Finding
from lightning_memprof.analysis.steps.phases import action_name
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.findings.measures import Rhythm
    from lightning_memprof.analysis.run.model import Rank
    from lightning_memprof.analysis.steps.statistics import PulseStatistics

__all__ = [
    "NOTABLE_BETWEEN",
    "NOTABLE_CALLBACKS",
    "between_steps",
    "callback_bound",
    "checkpoint_bound",
    "logging_bound",
]

# A hook, or an action, with this share of the time explains it.
MAIN_PART: Final = 0.5
SAVE_LESS: Final = "Save less often: ModelCheckpoint(every_n_train_steps=1000), or once per epoch."
VALIDATE_LESS: Final = "Trainer(val_check_interval=1000) or Trainer(check_val_every_n_epoch=5)"

# Below 5%, even callbacks that cost nothing would make the run less than 1.06 times as fast.
NOTABLE_CALLBACKS: Final = 0.05
SEVERE_CALLBACKS: Final = 0.30
# A progress bar and a logger take less per step: no finding in short steps, nor below 10% of any step.
MIN_CALLBACKS_NS: Final = 2_000_000
SURE_CALLBACKS: Final = 0.10
# checkpoint_bound reports their time.
CHECKPOINTS: Final = "ModelCheckpoint."
ADVICE: Final = {
    "ModelCheckpoint": SAVE_LESS,
    "RichProgressBar": "Draw less often: RichProgressBar(refresh_rate=20).",
    "TQDMProgressBar": "Draw less often: TQDMProgressBar(refresh_rate=20).",
}


def callback_bound(facts: Facts) -> list[Finding]:
    """Find callbacks that take much of the step, and the slowest hook."""
    worst = facts.worst_by(_callbacks_share)
    if worst is None:
        return []
    rank, statistics = worst
    share, cost_ns = _callbacks_share(statistics), statistics.callbacks_ns
    if share <= NOTABLE_CALLBACKS or statistics.used < MIN_STEPS:
        return []
    if (statistics.mean_ns < SHORT_STEP_NS or share <= SURE_CALLBACKS) and cost_ns < MIN_CALLBACKS_NS:
        return []
    few = rhythm(rank, "callbacks")
    slowest = slowest_callback(rank)
    # A window that recorded none of the few slow steps does not explain them.
    main = slowest if slowest is not None and slowest[1] >= MAIN_PART * cost_ns else None
    if main is not None and main[0].startswith(CHECKPOINTS) and checkpoint_bound(facts):
        return []
    mostly = f", mostly {main[0]}" if main is not None else ""
    return [
        Finding(
            rule="callback_bound",
            severity=severity(share, SEVERE_CALLBACKS, few),
            sentence=f"Callbacks take {percent(share)} of each step{facts.on_rank(rank)}{mostly}.",
            why=_why_callbacks(statistics, main, few),
            next_steps=_next_for_callbacks(main, few, is_fit=facts.is_fit),
            evidence=(facts.pulse(rank, few.steps if few else ()), *facts.recorded(rank, "hooks")),
            numbers={
                "rank": rank.rank,
                "callbacks_share": share,
                "callbacks_ns": cost_ns,
                "duration_ns": statistics.mean_ns,
                "slowest_hook": main[0] if main else None,
                "slowest_hook_ns": main[1] if main else None,
                "steps": list(few.steps) if few else None,
            },
            weight=share,
        )
    ]


def _callbacks_share(statistics: PulseStatistics) -> float:
    return statistics.callbacks_ns / statistics.mean_ns if statistics.mean_ns else 0.0


def _why_callbacks(statistics: PulseStatistics, main: tuple[str, int] | None, few: Rhythm | None) -> str:
    clock = " by the host's clock (the device's counts them as other)"
    parts = [
        f"Callbacks take {format_ns(statistics.callbacks_ns)} of a {format_ns(statistics.mean_ns)} step"
        + (clock if statistics.breakdown_ns["callbacks"] is None else "")
    ]
    if few is not None:
        parts.append(f"{few.subject[0].lower()}{few.subject[1:]} {few.verb} {format_ns(few.mean_ns)} in callbacks")
    if main is not None:
        parts.append(f"{main[0]} takes {format_ns(main[1])} of a recorded step")
    elif few is not None:
        parts.append("no window recorded such a step, so the callback is unknown")
    return "; ".join(parts) + "."


def _next_for_callbacks(main: tuple[str, int] | None, few: Rhythm | None, *, is_fit: bool) -> tuple[str, ...]:
    """Return the next steps; an evaluation neither trains nor saves."""
    if not is_fit:
        work = f"Run {main[0]}" if main is not None else "Run the callbacks"
        return (f"{work} every N batches, at the end of the loop, or in a thread.",)
    if main is not None:
        special = ADVICE.get(main[0].partition(".")[0])
        general = f"Do the work of {main[0]} every N batches, in on_train_epoch_end, or in a thread."
        return (special, general) if special else (general,)
    if few is not None:
        return (f"If it is a checkpoint: {SAVE_LESS[0].lower()}{SAVE_LESS[1:]}", _record_before(few))
    return (
        "Do the work of callbacks every N batches, in on_train_epoch_end, or in a thread.",
        "Find the hook: record steps with MemProfilerCallback(schedule=Schedule(active=5)).",
    )


def _record_before(few: Rhythm) -> str:
    wait = max(few.steps[0] - 2, 0)
    return f"Record such a step: MemProfilerCallback(schedule=Schedule(wait={wait}, active=3))."


# In a recording in which this share of the steps have a part, each step of the run has it.
IN_EACH: Final = 0.8
MIN_RECORDED: Final = 2
# A step outside windows had the part if callbacks and untracked time took this share of its cost longer.
LIKE_IT: Final = 0.8
# A shorter part cannot be recognized in a step that no window recorded.
MIN_RECOGNIZED_NS: Final = 20_000_000


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of ``StepEvents.parts_ns``, the thresholds from which it is a finding, and the finding's texts.

    ``sentence`` has the fields ``{share}`` and ``{on_rank}``, ``why`` has ``{each}``, ``{step}`` and ``{often}``.
    """

    name: str
    notable_share: float
    severe_share: float
    min_cost_ns: int
    sentence: str
    why: str
    next_steps: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """``each_ns`` is the part's time in a recorded step that has it, ``share`` its share of all steps, 0 to 1.

    ``like_it`` are the steps outside windows that took as much longer; empty if the part is in each step.
    """

    each_ns: int
    share: float
    recorded: tuple[int, ...]
    like_it: tuple[int, ...]
    is_in_each: bool


LOGGING: Final = Part(
    name="logging",
    # As for callbacks: below this share there is little to gain.
    notable_share=0.05,
    severe_share=0.30,
    # The Trainer and a file logger take less per step for a few metrics.
    min_cost_ns=5_000_000,
    sentence="Logging takes {share} of each step{on_rank}.",
    why="Logging takes {each} of step {step}, {often}.",
    next_steps=(
        "Log less often: Trainer(log_every_n_steps=50), self.log(name, value, on_step=False, on_epoch=True).",
        "Log less per step: no images, histograms or gradients; self.log(name, value, sync_dist=False).",
    ),
)
CHECKPOINT: Final = Part(
    name="checkpoint",
    # Below this share fewer checkpoints gain little, and a failed run loses more.
    notable_share=0.05,
    severe_share=0.30,
    # A checkpoint of a small model in each short step of a test does not matter.
    min_cost_ns=2_000_000,
    sentence="Saving checkpoints takes {share} of step time{on_rank}.",
    why="A checkpoint takes {each} (step {step}), {often}.",
    next_steps=(
        "Save less often: ModelCheckpoint(every_n_train_steps=1000) or (train_time_interval=timedelta(minutes=30)).",
        "Save less: ModelCheckpoint(save_weights_only=True, save_top_k=1, save_last=False).",
        "Save in the background: Trainer(plugins=[AsyncCheckpointIO()]) from lightning.pytorch.plugins.io.",
    ),
)


def logging_bound(facts: Facts) -> list[Finding]:
    """Find logging that takes much of the recorded steps; profiler overhead is not counted."""
    return _part_bound(facts, LOGGING) if facts.is_fit else []


def checkpoint_bound(facts: Facts) -> list[Finding]:
    """Find checkpoints that take much of the time, and the time of each."""
    return _part_bound(facts, CHECKPOINT)


def _part_cost(facts: Facts, rank: Rank, part: str) -> PartCost | None:
    """Return the cost of a part, None if no window recorded it or it cannot be counted."""
    events = facts.events(rank)
    having = [event for event in events if event.parts_ns[part] > 0]
    if not having:
        return None
    each_ns = sum(event.parts_ns[part] for event in having) // len(having)
    recorded = tuple(event.step for event in having)
    if len(events) >= MIN_RECORDED and len(having) >= IN_EACH * len(events):
        own = own_marks(rank)
        total = sum(event.duration_ns - own.get(event.step, 0) for event in events)
        share = sum(event.parts_ns[part] for event in having) / max(total, 1)
        return PartCost(each_ns=each_ns, share=share, recorded=recorded, like_it=(), is_in_each=True)
    rows = [row for row in rank.pulse[1:] if row["window"] is None and row["duration_ns"]]
    if each_ns < MIN_RECOGNIZED_NS or not rows or rank.typical_steps is None:
        return None
    around = [(row["callbacks_ns"] or 0) + (row["other_ns"] or 0) for row in rows]
    least = stats.median(around) + LIKE_IT * each_ns
    like_it = tuple(row["step"] or 0 for row, ns in zip(rows, around, strict=True) if ns >= least)
    share = each_ns * len(like_it) / max(sum(row["duration_ns"] or 0 for row in rows), 1)
    return PartCost(each_ns=each_ns, share=share, recorded=recorded, like_it=like_it, is_in_each=False)


def _part_bound(facts: Facts, part: Part) -> list[Finding]:
    """Return the cost of a part on the rank that spends the largest share of its time in it."""
    costs = [
        (rank, cost)
        for rank in facts.run.ranks
        if len(rank.pulse) >= MIN_STEPS and (cost := _part_cost(facts, rank, part.name)) is not None
    ]
    if not costs:
        return []
    rank, cost = max(costs, key=lambda cost: cost[1].share)
    if cost.share <= part.notable_share or cost.each_ns < part.min_cost_ns:
        return []
    often = "in every recorded step" if cost.is_in_each else f"and {len(cost.like_it)} more steps took as much longer"
    return [
        Finding(
            rule=f"{part.name}_bound",
            severity=severity(cost.share, part.severe_share),
            sentence=part.sentence.format(share=percent(cost.share), on_rank=facts.on_rank(rank)),
            why=part.why.format(each=format_ns(cost.each_ns), step=cost.recorded[0], often=often),
            next_steps=part.next_steps,
            evidence=(
                *facts.recorded(rank, "hooks", cost.recorded),
                *((facts.pulse(rank, cost.like_it),) if cost.like_it else ()),
            ),
            numbers={
                "rank": rank.rank,
                f"{part.name}_share": cost.share,
                f"{part.name}_ns": cost.each_ns,
                "steps": list(cost.recorded),
                "like_it": list(cost.like_it),
            },
            weight=cost.share,
        )
    ]


# Lightning's loop and a logger stay below this in steps that are not short.
NOTABLE_BETWEEN: Final = 0.15
SEVERE_BETWEEN: Final = 0.40
# The Trainer's own work between phases takes 1 to 4 ms per step and cannot be avoided.
MIN_BETWEEN_NS: Final = 5_000_000
# In a single step, the Trainer's own work never takes this long.
MIN_STANDING_OUT_NS: Final = 50_000_000


@dataclass(frozen=True, kw_only=True)
class _Action:
    """The main action between phases in the recorded steps: ``name`` is None for a validation."""

    name: str | None
    mean_ns: int

    @property
    def shown(self) -> str:
        return self.name or "validation"


def between_steps(facts: Facts) -> list[Finding]:
    """Find untracked time: in which steps, and its main action if a window recorded it."""
    worst = facts.worst_by(lambda statistics: statistics.between_ns / statistics.mean_ns if statistics.mean_ns else 0.0)
    if worst is None:
        return []
    rank, statistics = worst
    between_ns, overhead_ns = program_between_ns(rank, statistics), own_ns(rank, statistics)
    share = between_ns / statistics.mean_ns if statistics.mean_ns else 0.0
    if share <= NOTABLE_BETWEEN or statistics.used < MIN_STEPS:
        return []
    few = rhythm(rank, "other")
    if between_ns < MIN_BETWEEN_NS and (few is None or few.mean_ns < MIN_STANDING_OUT_NS):
        return []
    cause = _main_action(rank, between_ns, few)
    other_ns = (statistics.breakdown_ns["other"] or 0) - overhead_ns
    mostly = f", mostly {cause.shown}" if cause is not None else ""
    return [
        Finding(
            rule="between_steps",
            severity=severity(share, SEVERE_BETWEEN, few),
            sentence=(
                f"{percent(other_ns / statistics.mean_ns)} of step time is outside the tracked phases"
                f"{facts.on_rank(rank)}{mostly}."
            ),
            why=_why_between(other_ns, statistics.mean_ns, few, cause),
            next_steps=_next_between(few, cause, is_fit=facts.is_fit),
            evidence=(facts.pulse(rank, few.steps if few else ()), *facts.recorded(rank, "hooks")),
            numbers={
                "rank": rank.rank,
                "other_share": other_ns / statistics.mean_ns,
                "other_ns": other_ns,
                "own_ns": overhead_ns,
                "duration_ns": statistics.mean_ns,
                "steps": list(few.steps) if few else None,
                "period": few.period if few else None,
                "validation": None if cause is None else cause.name is None,
                "action": cause.name if cause else None,
            },
            weight=share,
        )
    ]


def _main_action(rank: Rank, between_ns: int, few: Rhythm | None) -> _Action | None:
    """Return the action that takes most of the untracked time in the recorded steps, None if there is none."""
    recorded = between_phases(rank)
    least = MAIN_PART * (few.mean_ns if few is not None else between_ns)
    if few is not None:
        recorded = {step: actions for step, actions in recorded.items() if sum(actions.values()) >= least}
    totals: Counter[str | None] = Counter()
    for actions in recorded.values():
        for action, ns in actions.items():
            totals[None if is_validation(action) else action_name(action)] += ns
    if not totals:
        return None
    name, total = totals.most_common(1)[0]
    mean_ns = round(total / len(recorded))
    return _Action(name=name, mean_ns=mean_ns) if mean_ns >= least else None


def _why_between(other_ns: int, mean_ns: int, few: Rhythm | None, cause: _Action | None) -> str:
    seen = "" if cause is None else f"{cause.shown} takes {format_ns(cause.mean_ns)} of a recorded step."
    if few is None:
        untracked = f"{format_ns(other_ns)} of a {format_ns(mean_ns)} step"
        return f"{untracked} are untracked; {seen or 'no hook covers them: logging, or code of the program.'}"
    unknown = "a validation, a checkpoint or code of the program; no window recorded such a step."
    return f"{few.subject} {few.verb} {format_ns(few.mean_ns)} outside the tracked phases: {seen or unknown}"


def _next_between(few: Rhythm | None, cause: _Action | None, *, is_fit: bool) -> tuple[str, ...]:
    """Return the next steps; an evaluation has no validation, and no logging interval."""
    if cause is not None and cause.name is not None:
        return (f"Do the work of {cause.name} less often, or in a thread.",)
    if not is_fit:
        return (
            "Look at the code around the batches: their start and end hooks, self.log(name, value, on_step=True).",
            "Use larger batches: there are fewer of them.",
        )
    if few is not None and cause is not None:
        return (f"Validate less often: {VALIDATE_LESS}, or on less data: Trainer(limit_val_batches=50).",)
    if few is not None:
        return (f"If it is validation, validate less often: {VALIDATE_LESS}.", _record_before(few))
    if cause is not None:
        return (f"Validate less often: {VALIDATE_LESS}.",)
    return (
        "Log less often: Trainer(log_every_n_steps=50), self.log(name, value, on_step=False).",
        "Look at the code around the steps: on_train_batch_start, on_train_batch_end, a loop of your own.",
    )
