"""Checkpoints that take much of the time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.part_cost import Part, part_bound

if TYPE_CHECKING:
    from lightning_memprof.analysis.findings.model import Facts, Finding

__all__ = ["checkpoint_bound"]

CHECKPOINT: Final = Part(
    name="checkpoint",
    # Below this part of the time fewer checkpoints gain little, and more is lost when a run dies.
    notable_share=0.05,
    severe_share=0.30,
    # A checkpoint of a small model in each short step of a test is not worth a word.
    min_cost_ns=2_000_000,
    sentence="Saving checkpoints takes {share} of the time{on_rank}.",
    why="A checkpoint takes {each} (step {step}), {often}.",
    next_steps=(
        "Save less often: ModelCheckpoint(every_n_train_steps=...), or train_time_interval=timedelta(minutes=30).",
        "Save less: ModelCheckpoint(save_weights_only=True), save_top_k=1 and no save_last.",
        "Save while training continues: Trainer(plugins=[AsyncCheckpointIO()]) of lightning.pytorch.plugins.io.",
    ),
)


def checkpoint_bound(facts: Facts) -> list[Finding]:
    """Say that saving checkpoints takes much of the time, and how much one takes."""
    return part_bound(facts, CHECKPOINT)
