"""An optimizer that walks over its parameters one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.findings.model import MIN_STEPS, SHORT_STEP_NS, Facts, Finding, Severity
from lightning_memprof.analysis.run.rows import text, whole
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_memprof.analysis.run.load import Rank

__all__ = ["optimizer_bound"]

# One kernel for all parameters saves up to two thirds of the loop's time: below this share that is less than a tenth.
NOTABLE_SHARE: Final = 0.15
SEVERE_SHARE: Final = 0.40
# What the Trainer does around an optimizer step takes 1 to 2 ms however small the model is; fused saves none of it.
MIN_COST_NS: Final = 5_000_000
# Of fewer tensors than these one kernel for all saves no time that anybody could measure.
FEW_TENSORS: Final = 20
FUSED: Final = frozenset({"Adagrad", "Adam", "AdamW", "SGD"})
FOREACH: Final = FUSED | {
    "ASGD", "Adadelta", "Adafactor", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"
}  # fmt: skip
# With foreach=None torch takes the foreach implementation on these devices, and the for-loop on all others.
FOREACH_BY_DEFAULT: Final = ("cuda", "xpu", "mtia")


def optimizer_bound(facts: Facts) -> list[Finding]:
    """Say that the optimizer takes much of the step while neither of torch's faster implementations is in effect."""
    worst = facts.worst("optimizer")
    if worst is None:
        return []
    rank, statistics = worst
    # An optimizer takes about as long in each of its steps: a mean above the median comes from a few odd steps.
    mean_share = statistics.share("optimizer")
    share = min(mean_share, statistics.median_shares["optimizer"])
    slow = [optimizer for optimizer in _optimizers(rank) if _loops(optimizer)]
    if share <= NOTABLE_SHARE or statistics.used < MIN_STEPS or not slow:
        return []
    optimizer_ns = statistics.breakdown_ns["optimizer"] or 0
    if statistics.mean_ns < SHORT_STEP_NS and optimizer_ns < MIN_COST_NS:
        return []
    optimizer = slow[0]
    name = text(optimizer, "name") or "the optimizer"
    return [
        Finding(
            rule="optimizer_bound",
            severity=Severity.CRITICAL if share >= SEVERE_SHARE else Severity.WARNING,
            sentence=f"The optimizer takes {percent(mean_share)} of a step{facts.on_rank(rank)}.",
            why=(
                f"{format_ns(optimizer_ns)} of a {format_ns(statistics.mean_ns)} step go to {name}, which updates its "
                f"{_count(optimizer)}parameter tensors in a Python loop: foreach={optimizer.get('foreach')}, "
                f"fused={optimizer.get('fused')} on {_device(optimizer)}."
            ),
            next_steps=_next_steps(name),
            evidence=(facts.pulse(rank), *facts.recorded(rank, "hooks")),
            numbers={
                "rank": rank.rank,
                "optimizer_share": mean_share,
                "median_optimizer_share": statistics.median_shares["optimizer"],
                "optimizer_ns": optimizer_ns,
                "duration_ns": statistics.mean_ns,
                "optimizers": slow,
            },
            weight=share,
        )
    ]


def _optimizers(rank: Rank) -> list[Mapping[str, Any]]:
    optimizers = rank.training.get("optimizers") if rank.training else None
    return (
        [optimizer for optimizer in optimizers if isinstance(optimizer, dict)] if isinstance(optimizers, list) else []
    )


def _loops(optimizer: Mapping[str, Any]) -> bool:
    """Say whether an optimizer has a faster implementation and runs the loop."""
    if text(optimizer, "name") not in FOREACH:
        return False
    foreach, fused = optimizer.get("foreach"), optimizer.get("fused")
    if (whole(optimizer, "parameters") or FEW_TENSORS) < FEW_TENSORS:
        return False
    return not (fused or foreach or (foreach is None and _device(optimizer).startswith(FOREACH_BY_DEFAULT)))


def _device(optimizer: Mapping[str, Any]) -> str:
    return text(optimizer, "device") or "cpu"


def _count(optimizer: Mapping[str, Any]) -> str:
    count = whole(optimizer, "parameters")
    return f"{count:,} " if count else ""


def _next_steps(name: str) -> tuple[str, ...]:
    if name in FUSED:
        return (
            f"Update all parameters in one kernel: torch.optim.{name}(..., fused=True).",
            f"Where fused does not fit (gradient clipping with 16-mixed): torch.optim.{name}(..., foreach=True).",
        )
    return (f"Update the parameters in groups: torch.optim.{name}(..., foreach=True).",)
