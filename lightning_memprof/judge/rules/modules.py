"""The heaviest module, buffers that DDP broadcasts, and autograd graphs: unused gradients, graphs that outlive."""

from __future__ import annotations

from typing import Final

from lightning_memprof.account.ledger.growth import steady_growth
from lightning_memprof.account.ledger.memory import UNATTRIBUTED
from lightning_memprof.account.memory.model import DeviceAllocations
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Recovery, recovered
from lightning_memprof.judge.remedies import (
    DROP_GRAPH,
)
from lightning_memprof.units import MIB, format_bytes, percent

# A smaller graph is that of a loss, or of a few outputs.
MIN_RETAINED: Final = 32 * MIB
MOSTLY: Final = 0.5


def retained_graph(facts: Facts) -> Finding | None:
    """Find saved activations of a step that are live at the peak of a later one: backward did not free its graph.

    Recovers one to two times these bytes, at most the saved activations and the unattributed bytes of the byte ledger.
    With retain_graph=True the step's own graph, too, stays whole until its backward ends, instead of being freed on the
    way; on a host, the C allocator also keeps free blocks between the two graphs. Memory that grows from step to step
    is not this finding's.
    """
    for memory in facts.memory.ranks if facts.memory is not None else ():
        rank = next(rank for rank in facts.run.ranks if rank.rank == memory.rank)
        saved, ledger = memory.activations, facts.byte_ledgers.get(rank.rank)
        kept = max((_outliving(device) for window in memory.allocations for device in window.devices), default=0)
        if saved is None or kept < max(MIN_RETAINED, MOSTLY * saved.total_bytes):
            continue
        once = recovered(ledger, min(kept, saved.total_bytes), "activation")
        columns = ("rss_bytes", "device_peak_bytes")
        if ledger is None or once is None or any(steady_growth(rank.pulse, column) for column in columns):
            continue
        # The ledger's activations are those of one step; the earlier graph is among the unattributed bytes.
        twice = min(2 * once.min, ledger.bytes("activation") + ledger.bytes(UNATTRIBUTED))
        worth = Recovery(unit="bytes", min=once.min, max=twice, whole=once.whole)
        return Finding(
            rule="retained_graph",
            title=(
                f"Graphs outlive their step: {format_bytes(worth.min)} of saved activations are live in the "
                f"next one{facts.on_rank(rank)}."
            ),
            why=(
                f"A step saves {format_bytes(saved.total_bytes)} of activations; at the peak, {format_bytes(kept)} "
                f"from the previous forward are live, {percent(once.share)} of {format_bytes(ledger.peak_bytes)}. "
                "retain_graph=True or a stored loss or output keeps its graph."
            ),
            remedies=(DROP_GRAPH,),
            evidence=facts.pulse_and_trace(rank),
            numbers={"rank": rank.rank, "retained_bytes": kept, "activation_bytes": saved.total_bytes},
            **worth.parts,
        )
    return None


def _outliving(device: DeviceAllocations) -> int:
    """Return the bytes at the peak of a window that the forward of an earlier step allocated."""
    peak = device.peak_step or 0
    return sum(site.bytes for site in device.sites if site.phase == "forward" and (site.step or peak) < peak)
