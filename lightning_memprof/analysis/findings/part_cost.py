"""What a part of the steps, a checkpoint for instance, costs: seen in windows, counted over the whole run."""

from __future__ import annotations

import statistics as stats
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import MIN_STEPS, Finding, Severity
from lightning_memprof.analysis.findings.own_cost import own_marks
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.findings.model import Facts
    from lightning_memprof.analysis.run.load import Rank

__all__ = ["Part", "PartCost", "part_bound", "part_cost"]

# A part that most recorded steps have is in each step of the run.
IN_EACH: Final = 0.8
MIN_RECORDED: Final = 2
# A step outside of windows had the part where callbacks and the time between the phases took so much of its cost more.
LIKE_IT: Final = 0.8
# What takes less cannot be told from the rest of a step that no window recorded.
MIN_TOLD_NS: Final = 20_000_000


@dataclass(frozen=True)
class Part:
    """One of ``step_events.PARTS``: from which share of all steps and which cost on it is worth a word, and which.

    ``sentence`` has the places ``{share}`` and ``{on_rank}``, ``why`` has ``{each}``, ``{step}`` and ``{often}``.
    """

    name: str
    notable_share: float
    severe_share: float
    min_cost_ns: int
    sentence: str
    why: str
    next_steps: tuple[str, ...]


@dataclass(frozen=True)
class PartCost:
    """``each_ns`` is the part's time in a recorded step that has it, ``share`` its part of all steps, 0 to 1.

    ``like_it`` are the steps outside of windows that took as much more; empty where it is in each step.
    """

    each_ns: int
    share: float
    recorded: tuple[int, ...]
    like_it: tuple[int, ...]
    is_in_each: bool


def part_cost(facts: Facts, rank: Rank, part: str) -> PartCost | None:
    """Return what one of ``step_events.PARTS`` costs a rank, None where no window recorded it or nothing tells."""
    events = facts.events(rank)
    having = [event for event in events if event.parts_ns[part] > 0]
    if not having:
        return None
    each_ns = sum(event.parts_ns[part] for event in having) // len(having)
    recorded = tuple(event.step for event in having)
    own = own_marks(rank)
    if len(events) >= MIN_RECORDED and len(having) >= IN_EACH * len(events):
        total = sum(event.duration_ns - own.get(event.step, 0) for event in events)
        share = sum(event.parts_ns[part] for event in having) / max(total, 1)
        return PartCost(each_ns, share, recorded, (), is_in_each=True)
    if each_ns < MIN_TOLD_NS:
        return None
    rows = [row for row in rank.pulse[1:] if row["window"] is None and row["duration_ns"]]
    typical = rank.typical_steps
    if not rows or typical is None:
        return None
    around = [(row["callbacks_ns"] or 0) + (row["other_ns"] or 0) for row in rows]
    least = stats.median(around) + LIKE_IT * each_ns
    like_it = [row["step"] or 0 for row, ns in zip(rows, around, strict=True) if ns >= least]
    share = each_ns * len(like_it) / max(sum(row["duration_ns"] or 0 for row in rows), 1)
    return PartCost(each_ns, share, recorded, tuple(like_it), is_in_each=False)


def part_bound(facts: Facts, part: Part) -> list[Finding]:
    """Say what a part costs the rank that spends the largest share of its time in it, where that is notable."""
    costs = [
        (rank, cost)
        for rank in facts.run.ranks
        if len(rank.pulse) >= MIN_STEPS and (cost := part_cost(facts, rank, part.name)) is not None
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
            severity=Severity.CRITICAL if cost.share >= part.severe_share else Severity.WARNING,
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
