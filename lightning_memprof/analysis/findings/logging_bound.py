"""Logging that takes much of the step."""

from __future__ import annotations

from typing import Final

from lightning_memprof.analysis.findings.model import Facts, Finding, Severity, percent
from lightning_memprof.analysis.findings.part_cost import dearest_part
from lightning_memprof.units import format_ns

__all__ = ["logging_bound"]

# As for callbacks: below this part of a step there is little to gain.
NOTABLE_SHARE: Final = 0.05
SEVERE_SHARE: Final = 0.30
# What the Trainer and a logger of files take of a step with a few figures is less.
MIN_COST_NS: Final = 5_000_000
NEXT: Final = (
    "Log less often: Trainer(log_every_n_steps=50), self.log(..., on_step=False, on_epoch=True).",
    "Log less: no images, histograms or gradients of each step; self.log(..., sync_dist=False) where ranks may differ.",
)


def logging_bound(facts: Facts) -> list[Finding]:
    """Say that logging takes much of the recorded steps; our own work at their marks is none of it."""
    if not facts.is_fit:
        return []
    dearest = dearest_part(facts, "logging")
    if dearest is None:
        return []
    rank, cost = dearest
    if cost.share <= NOTABLE_SHARE or cost.each_ns < MIN_COST_NS:
        return []
    often = "in every recorded step" if cost.is_in_each else f"and {len(cost.like_it)} more steps took as much longer"
    return [
        Finding(
            rule="logging_bound",
            severity=Severity.CRITICAL if cost.share >= SEVERE_SHARE else Severity.WARNING,
            sentence=f"Logging takes {percent(cost.share)} of a step{facts.on_rank(rank)}.",
            why=f"It takes {format_ns(cost.each_ns)} of step {cost.recorded[0]}, {often}.",
            next_steps=NEXT,
            evidence=facts.recorded(rank, "hooks", cost.recorded),
            numbers={
                "rank": rank.rank,
                "logging_share": cost.share,
                "logging_ns": cost.each_ns,
                "steps": list(cost.recorded),
                "like_it": list(cost.like_it),
            },
            weight=cost.share,
        )
    ]
