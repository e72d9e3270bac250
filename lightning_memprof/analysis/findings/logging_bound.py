"""Logging that takes much of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.part_cost import Part, part_bound

if TYPE_CHECKING:
    from lightning_memprof.analysis.findings.model import Facts, Finding

__all__ = ["logging_bound"]

LOGGING: Final = Part(
    name="logging",
    # As for callbacks: below this part of a step there is little to gain.
    notable_share=0.05,
    severe_share=0.30,
    # What the Trainer and a logger of files take of a step with a few figures is less.
    min_cost_ns=5_000_000,
    sentence="Logging takes {share} of a step{on_rank}.",
    why="It takes {each} of step {step}, {often}.",
    next_steps=(
        "Log less often: Trainer(log_every_n_steps=50), self.log(..., on_step=False, on_epoch=True).",
        "Log less: no images, histograms or gradients of each step; self.log(..., sync_dist=False) if ranks differ.",
    ),
)


def logging_bound(facts: Facts) -> list[Finding]:
    """Say that logging takes much of the recorded steps; our own work at their marks is none of it."""
    return part_bound(facts, LOGGING) if facts.is_fit else []
