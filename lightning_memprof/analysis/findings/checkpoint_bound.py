"""Checkpoints that take much of the time."""

from __future__ import annotations

from typing import Final

from lightning_memprof.analysis.findings.model import Facts, Finding, Severity, percent
from lightning_memprof.analysis.findings.part_cost import dearest_part
from lightning_memprof.units import format_ns

__all__ = ["checkpoint_bound"]

# Below this part of the time fewer checkpoints gain little, and more is lost when a run dies.
NOTABLE_SHARE: Final = 0.05
SEVERE_SHARE: Final = 0.30
# A checkpoint of a small model in each short step of a test is not worth a word.
MIN_COST_NS: Final = 2_000_000
NEXT: Final = (
    "Save less often: ModelCheckpoint(every_n_train_steps=...), or train_time_interval=timedelta(minutes=30).",
    "Save less: ModelCheckpoint(save_weights_only=True), save_top_k=1 and no save_last.",
    "Save while training goes on: Trainer(plugins=[AsyncCheckpointIO()]) of lightning.pytorch.plugins.io.",
)


def checkpoint_bound(facts: Facts) -> list[Finding]:
    """Say that saving checkpoints takes much of the time, and how much one takes."""
    dearest = dearest_part(facts, "checkpoint")
    if dearest is None:
        return []
    rank, cost = dearest
    if cost.share <= NOTABLE_SHARE or cost.each_ns < MIN_COST_NS:
        return []
    often = "in every recorded step" if cost.is_in_each else f"and {len(cost.like_it)} more steps took as much longer"
    return [
        Finding(
            rule="checkpoint_bound",
            severity=Severity.CRITICAL if cost.share >= SEVERE_SHARE else Severity.WARNING,
            sentence=f"Saving checkpoints takes {percent(cost.share)} of the time{facts.on_rank(rank)}.",
            why=f"A checkpoint takes {format_ns(cost.each_ns)} (step {cost.recorded[0]}), {often}.",
            next_steps=NEXT,
            evidence=(*facts.recorded(rank, "hooks", cost.recorded), facts.pulse(rank, cost.like_it)),
            numbers={
                "rank": rank.rank,
                "checkpoint_share": cost.share,
                "checkpoint_ns": cost.each_ns,
                "steps": list(cost.recorded),
                "like_it": list(cost.like_it),
            },
            weight=cost.share,
        )
    ]
