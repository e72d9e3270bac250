"""Callbacks that take much of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.actions import slowest_callback
from lightning_memprof.analysis.findings.checkpoint_bound import checkpoint_bound
from lightning_memprof.analysis.findings.model import MIN_STEPS, SHORT_STEP_NS, Facts, Finding
from lightning_memprof.analysis.findings.rhythm import rhythm, severity
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.findings.rhythm import Rhythm
    from lightning_memprof.analysis.steps.statistics import PulseStatistics

__all__ = ["NOTABLE_SHARE", "callback_bound"]

# Below a twentieth even callbacks that cost nothing would make the run less than 1.06 times as fast.
NOTABLE_SHARE: Final = 0.05
SEVERE_SHARE: Final = 0.30
# A progress bar and a logger take less than this a step: in short steps, and below a tenth of any, that is no finding.
MIN_COST_NS: Final = 2_000_000
SURE_SHARE: Final = 0.10
# A hook that takes this part of all callbacks is the one to look at.
MAIN_PART: Final = 0.5
# Their time is told by the rule about checkpoints.
CHECKPOINTS: Final = "ModelCheckpoint."
ADVICE: Final = {
    "ModelCheckpoint": "Save less often: ModelCheckpoint(every_n_train_steps=...), or once an epoch.",
    "RichProgressBar": "Draw less often: RichProgressBar(refresh_rate=...).",
    "TQDMProgressBar": "Draw less often: TQDMProgressBar(refresh_rate=...).",
}


def callback_bound(facts: Facts) -> list[Finding]:
    """Say that callbacks take much of the step, and which one."""
    worst = facts.worst_by(_share)
    if worst is None:
        return []
    rank, statistics = worst
    share, cost_ns = _share(statistics), statistics.callbacks_ns
    if share <= NOTABLE_SHARE or statistics.used < MIN_STEPS:
        return []
    if (statistics.mean_ns < SHORT_STEP_NS or share <= SURE_SHARE) and cost_ns < MIN_COST_NS:
        return []
    few = rhythm(rank, "callbacks")
    slowest = slowest_callback(rank)
    # A window that recorded none of the few slow steps says nothing about them.
    main = slowest if slowest is not None and slowest[1] >= MAIN_PART * cost_ns else None
    if main is not None and main[0].startswith(CHECKPOINTS) and checkpoint_bound(facts):
        return []
    return [
        Finding(
            rule="callback_bound",
            severity=severity(share, SEVERE_SHARE, few),
            sentence=(
                f"Callbacks take {percent(share)} of a step{facts.on_rank(rank)}"
                + (f", most of it {main[0]}." if main is not None else ".")
            ),
            why=_why(statistics, main, few),
            next_steps=_next_steps(main, few) if facts.is_fit else _next_in_evaluation(main),
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


def _share(statistics: PulseStatistics) -> float:
    return statistics.callbacks_ns / statistics.mean_ns if statistics.mean_ns else 0.0


def _why(statistics: PulseStatistics, main: tuple[str, int] | None, few: Rhythm | None) -> str:
    parts = [f"{format_ns(statistics.callbacks_ns)} of a {format_ns(statistics.mean_ns)} step go to callbacks"]
    if statistics.breakdown_ns["callbacks"] is None:
        parts[0] += " (by the host's clock; the device's counts them to other)"
    if few is not None:
        parts.append(f"{few.subject[0].lower()}{few.subject[1:]} {few.verb} {format_ns(few.mean_ns)} in them")
    if main is not None:
        parts.append(f"{main[0]} takes {format_ns(main[1])} of a recorded step")
    elif few is not None:
        parts.append("no window recorded such a step, so the callback is not known")
    return "; ".join(parts) + "."


def _next_in_evaluation(main: tuple[str, int] | None) -> tuple[str, ...]:
    """Nothing is trained and saved: what fits a loop over batches alone."""
    work = f"the work of {main[0]}" if main is not None else "the callbacks' work"
    return (f"Do {work} every N batches, at the end of the loop, or in a thread.",)


def _next_steps(main: tuple[str, int] | None, few: Rhythm | None) -> tuple[str, ...]:
    if main is not None:
        hook = main[0]
        general = f"Do the work of {hook} every N batches, in on_train_epoch_end, or in a thread."
        special = ADVICE.get(hook.partition(".")[0])
        return (special, general) if special else (general,)
    if few is not None:
        return (
            "If it is a checkpoint, save less often: ModelCheckpoint(every_n_train_steps=...).",
            f"Record such a step: MemProfilerCallback(schedule=Schedule(wait={max(few.steps[0] - 2, 0)}, active=3)).",
        )
    return (
        "Do the callbacks' work every N batches, in on_train_epoch_end, or in a thread.",
        "See which hook it is: record some steps with MemProfilerCallback(schedule=Schedule(active=5)).",
    )
