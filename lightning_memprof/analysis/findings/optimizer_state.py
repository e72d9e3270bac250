"""The optimizer's state: memory that comes with the first optimizer step and stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Facts, Finding, Severity
from lightning_memprof.analysis.run.rows import text
from lightning_memprof.units import MIB, format_bytes, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.memory.report import CategoryPeak
    from lightning_memprof.analysis.run.load import Rank

__all__ = ["optimizer_state"]

# Adam's two moments are as large as two sets of parameters; SGD's momentum is one.
NOTABLE_PARAMETERS: Final = 1.0
# Below this part of the peak something else is the first to look at.
NOTABLE_SHARE: Final = 0.2
# What is smaller fits everywhere.
MIN_BYTES: Final = 64 * MIB
NEXT: Final = (
    "Shard it over the ranks: FSDPStrategy(), ModelParallelStrategy() with fully_shard, or ZeroRedundancyOptimizer.",
    "Keep less of it: torch.optim.Adafactor, SGD without momentum, or an optimizer with 8-bit state.",
)


def optimizer_state(facts: Facts) -> list[Finding]:
    """Say how much memory the first optimizer step adds for good: a model that fits until then may not fit after it."""
    memory = facts.memory.lead if facts.memory is not None else None
    if memory is None or memory.peak is None or not facts.is_fit:
        return []
    peak = memory.peak
    state, parameters = peak.categories.get("optimizer_state") or 0, peak.categories.get("parameter") or 0
    if state < MIN_BYTES or state < NOTABLE_PARAMETERS * parameters or state < NOTABLE_SHARE * peak.total_bytes:
        return []
    rank = next(rank for rank in facts.run.ranks if rank.rank == memory.rank)
    risen = _risen(rank)
    seen = f" The first step left {format_bytes(risen)} more than it found." if risen is not None else ""
    return [
        Finding(
            rule="optimizer_state",
            severity=Severity.INFO,
            sentence=(
                f"The first optimizer step adds {format_bytes(state)} of state for good{facts.on_rank(rank)}: "
                f"{percent(state / peak.total_bytes)} of the peak."
            ),
            why=_why(rank, peak, state, parameters) + seen,
            next_steps=NEXT,
            evidence=(*facts.recorded(rank, peak.source, (peak.step,)), facts.pulse(rank, _first_steps(rank))),
            numbers={
                "rank": memory.rank,
                "optimizer_state_bytes": state,
                "parameter_bytes": parameters,
                "peak_bytes": peak.total_bytes,
                "first_step_bytes": risen,
            },
            weight=state / peak.total_bytes,
        )
    ]


def _why(rank: Rank, peak: CategoryPeak, state: int, parameters: int) -> str:
    listed = rank.training.get("optimizers") if rank.training else None
    named = (
        [name for optimizer in listed if isinstance(optimizer, dict) and (name := text(optimizer, "name"))]
        if listed
        else []
    )
    optimizer = named[0] if named else "The optimizer"
    times = f", {state / parameters:.1f} times the parameters' {format_bytes(parameters)}" if parameters else ""
    return f"{optimizer} keeps {format_bytes(state)}{times} (step {peak.step}); a forward that fits says nothing of it."


def _first_steps(rank: Rank) -> tuple[int, ...]:
    return tuple(row["step"] for row in rank.pulse[:2] if row["step"] is not None)


def _risen(rank: Rank) -> int | None:
    """Return by how much the device's peak of the second step exceeds the first one's; None where there is none."""
    peaks = [row["device_peak_bytes"] for row in rank.pulse[:2]]
    match peaks:
        case [int() as first, int() as second] if second > first:
            return second - first
    return None
