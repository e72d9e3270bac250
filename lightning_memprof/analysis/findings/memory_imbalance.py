"""One rank that holds more memory than the others: it decides how large the batch may be."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Facts, Finding, Severity
from lightning_memprof.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_memprof.analysis.findings.model import Evidence

__all__ = ["memory_imbalance"]

# Ranks of one kind differ by their batches' lengths and by what rank 0 does besides: by less than this on a device.
DEVICE_SHARE: Final = 0.15
# On the host rank 0 also writes logs and checkpoints, and what was touched once stays.
HOST_SHARE: Final = 0.50
MIN_BYTES: Final = 256 * MIB
# From twice the others' on, half of every other rank's memory lies idle.
SEVERE_SHARE: Final = 1.0
NEXT_DEVICE: Final = (
    "Look at what only rank {rank} keeps on its device: tensors of rank_zero_only code, longer batches, more layers.",
    "Load checkpoints to the host: torch.load(..., map_location='cpu'), so that not all ranks load to one device.",
)
NEXT_HOST: Final = (
    "Look at what only rank {rank} keeps: outputs of all ranks gathered there, rank_zero_only caches, more workers.",
)


def memory_imbalance(facts: Facts) -> list[Finding]:
    """Say which rank holds much more than the others, on its device or, where there is none, on the host."""
    on_device, on_host = _peaks(facts, "device_peak_bytes"), _peaks(facts, "rss_peak_bytes", "rss_bytes")
    if len(on_device) > 1:
        return _found(facts, on_device, is_device=True)
    return _found(facts, on_host, is_device=False) if len(on_host) > 1 else []


def _peaks(facts: Facts, quantity: str, column: str | None = None) -> dict[int, int]:
    """Return the peak of each rank that has one: of its pulse, without one of its windows and summaries.

    The system's own peak of a process, which those have, is at least that of the process that started it.
    """
    peaks = {rank.rank: getattr(rank, quantity) or 0 for rank in (facts.ranks.ranks if facts.ranks is not None else ())}
    for rank in facts.run.ranks:
        seen = max((size for row in rank.pulse if (size := row[column or quantity]) is not None), default=0)
        peaks[rank.rank] = seen or peaks.get(rank.rank, 0)
    return {rank: size for rank, size in peaks.items() if size}


def _found(facts: Facts, peaks: Mapping[int, int], *, is_device: bool) -> list[Finding]:
    highest = max(peaks, key=lambda rank: peaks[rank])
    peak, others = peaks[highest], round(statistics.median(size for rank, size in peaks.items() if rank != highest))
    share = (peak - others) / others if others else 0.0
    if peak - others < MIN_BYTES or share < (DEVICE_SHARE if is_device else HOST_SHARE):
        return []
    more, middle, place = format_bytes(peak - others), format_bytes(others), "its device" if is_device else "the host"
    next_steps = NEXT_DEVICE if is_device else NEXT_HOST
    return [
        Finding(
            rule="memory_imbalance",
            severity=Severity.CRITICAL if is_device and share >= SEVERE_SHARE else Severity.WARNING,
            sentence=(f"Rank {highest} holds {format_bytes(peak)} at its peak on {place}, the others {middle}."),
            why=(
                f"That is {more} more than the middle one of {len(peaks) - 1} others: the fullest rank decides how "
                "much a step may hold on all."
            ),
            next_steps=tuple(template.format(rank=highest) for template in next_steps),
            evidence=_evidence(facts, highest),
            numbers={
                "rank": highest,
                "peak_bytes": peak,
                "others_bytes": others,
                "ranks": len(peaks),
                "on_device": is_device,
            },
            weight=min(share, 1.0),
        )
    ]


def _evidence(facts: Facts, number: int) -> tuple[Evidence, ...]:
    """Return the rank's pulse; of thousands of ranks not all are read."""
    return tuple(facts.pulse(rank) for rank in facts.run.ranks if rank.rank == number and rank.pulse)
