"""Activations that are most of the peak, and what checkpointing them would trade."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Facts, Finding, Severity
from lightning_memprof.units import MIB, format_bytes, format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.memory.activations import CheckpointedGroup
    from lightning_memprof.analysis.memory.report import Activations, RankMemory

__all__ = ["activation_peak"]

# Below half of the peak parameters, gradients and the optimizer's state are the first to look at.
NOTABLE_SHARE: Final = 0.5
# What is smaller fits everywhere.
MIN_BYTES: Final = 64 * MIB
# A checkpoint that frees less than this part of the peak is not worth its time.
MIN_SAVED_SHARE: Final = 0.1
# Other modules that hold most of it are named with it.
SHOWN: Final = 3
SMALLER: Final = (
    "Keep less for backward: a smaller batch with Trainer(accumulate_grad_batches=...), or precision bf16-mixed."
)


def activation_peak(facts: Facts) -> list[Finding]:
    """Say that activations are most of the memory at the peak, who holds them, and what checkpointing would save."""
    memory = facts.memory.lead if facts.memory is not None else None
    if memory is None or memory.peak is None or memory.activations is None or not facts.is_fit:
        return []
    total, kept = memory.peak.total_bytes, memory.peak.categories.get("activation") or 0
    if kept < MIN_BYTES or kept < NOTABLE_SHARE * total:
        return []
    group = _best(memory, total)
    rank = next(rank for rank in facts.run.ranks if rank.rank == memory.rank)
    steps = (memory.peak.step,)
    return [
        Finding(
            rule="activation_peak",
            severity=Severity.INFO,
            sentence=f"Activations are {percent(kept / total)} of the peak: {format_bytes(kept)}{facts.on_rank(rank)}.",
            why=_why(memory.activations, group),
            next_steps=_next_steps(group),
            evidence=facts.recorded(rank, memory.peak.source, steps) or facts.recorded(rank, "saved_tensors"),
            numbers={
                "rank": memory.rank,
                "activation_bytes": kept,
                "peak_bytes": total,
                "activation_share": kept / total,
                "step": memory.peak.step,
                "checkpointed": group.name if group else None,
                "saved_bytes": group.saved_bytes - group.recompute_peak_bytes if group else None,
                "recompute_ns": group.recompute_ns if group else None,
            },
            weight=kept / total,
        )
    ]


def _best(memory: RankMemory, total: int) -> CheckpointedGroup | None:
    """Return the blocks that save the most when they are checkpointed, None where that is little."""
    groups = [
        group
        for group in memory.checkpointing
        if group.saved_bytes - group.recompute_peak_bytes >= MIN_SAVED_SHARE * total
    ]
    return max(groups, key=lambda group: group.saved_bytes - group.recompute_peak_bytes, default=None)


def _why(activations: Activations, group: CheckpointedGroup | None) -> str:
    largest = sorted(activations.modules, key=lambda module: -module.own_activation_bytes)[:SHOWN]
    named = ", ".join(f"{module.name} {format_bytes(module.own_activation_bytes)}" for module in largest)
    said = f"Backward of step {activations.step} found them kept" + (f", most by {named}" if named else "")
    if group is None:
        return f"{said}."
    cost = "" if group.recompute_ns is None else f" for {format_ns(group.recompute_ns)} more a step"
    saved = format_bytes(group.saved_bytes - group.recompute_peak_bytes)
    return f"{said}; checkpointing {group.name} ({len(group.blocks)} blocks) would save {saved}{cost}."


def _next_steps(group: CheckpointedGroup | None) -> tuple[str, ...]:
    if group is None:
        return (SMALLER,)
    return (
        f"Checkpoint each of {group.name}: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).",
        "Under FSDP the strategy does it: FSDPStrategy(activation_checkpointing_policy={Block}).",
        SMALLER,
    )
