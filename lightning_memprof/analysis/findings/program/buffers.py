"""Buffers of the model that DistributedDataParallel sends from rank 0 to all ranks before each forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import NOTABLE, Facts, Finding, Recovery
from lightning_memprof.analysis.ledger.model import total
from lightning_memprof.units import format_bytes, format_ns

if TYPE_CHECKING:
    from lightning_memprof.analysis.run.model import Rank

BROADCAST: Final = "broadcast"
IN_FORWARD: Final = "c10d::broadcast_"
WRAPPER: Final = "DDP"
# Another collective of the step may wait for the same rank instead.
OF_BROADCAST: Final = (0.5, 1.0)
OWN_BUFFERS: Final = (
    "Do not send them: DDPStrategy(broadcast_buffers=False). Each rank then keeps its own, those of BatchNorm too, "
    "which SyncBatchNorm averages."
)


def buffer_broadcast(facts: Facts) -> Finding | None:
    """Find the broadcast of buffers in each step, on the host.

    Recovers half to all of the time in which nothing hides it. Lost: the ranks' buffers may differ.
    """
    if (worst := facts.heaviest(lambda ledger: ledger.communicates("collective"))) is None:
        return None
    rank, ledger = worst
    recorded = facts.host_ledger(rank)
    calls = sum(line.count for line in recorded.of("forward") if line.operator == IN_FORWARD) if recorded else 0.0
    ns = total(line for line in ledger.communication if line.part == "collective" and line.name == BROADCAST)
    worth = Recovery(unit="ns", min=ns * OF_BROADCAST[0], max=ns * OF_BROADCAST[1], whole=ledger.running_ns)
    buffers = rank.training.largest_buffers if rank.training else []
    if not calls or worth.share < NOTABLE or not buffers or not _is_wrapped(rank):
        return None
    largest = f"{buffers[0].name} ({format_bytes(buffers[0].bytes)})"
    return Finding(
        rule="buffer_broadcast",
        sentence=(
            f"Buffers are broadcast to all ranks in each step, mostly {largest}: "
            f"{ledger.share_text(ns)}{facts.on_rank(rank)}."
        ),
        why=(
            f"{format_ns(ns)} of {ledger.length_text}: DistributedDataParallel sends the buffers of rank 0 before each "
            "forward."
        ),
        next_steps=(
            OWN_BUFFERS,
            f"Or keep {buffers[0].name} as a plain attribute, not as a registered buffer.",
        ),
        evidence=facts.pulse_and_trace(rank),
        numbers={
            "rank": rank.rank,
            "broadcast_ns": round(ns),
            "buffers": {buffer.name: buffer.bytes for buffer in buffers},
            "duration_ns": round(ledger.step_ns),
        },
        **worth.parts,
    )


def _is_wrapped(rank: Rank) -> bool:
    return (rank.facts.strategy or "").startswith(WRAPPER)
