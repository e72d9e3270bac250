"""Reserved memory that lies in pieces between blocks in use, when the most is needed."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Finding, Severity
from lightning_memprof.analysis.findings.snapshot_parts import alloc_conf, device_name, in_snapshot
from lightning_memprof.analysis.snapshot.replay import free_ranges
from lightning_memprof.units import MIB, format_bytes, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.snapshot.model import DeviceReport, SnapshotReport

__all__ = ["fragmentation"]

# Recorded trainings without trouble have 2 to 14% of the reserved memory in pieces at their peak.
NOTABLE_SHARE: Final = 0.25
# Below this the pieces would not hold another batch, nor decide whether something fits.
MIN_BYTES: Final = 512 * MIB
# Each look costs a sort of what is live: the largest segments are those that pieces force.
MAX_LOOKS: Final = 8


def fragmentation(snapshot: SnapshotReport) -> list[Finding]:
    """Say how much lies in pieces at the peak; a warning where more was taken from the driver for that reason.

    At any other moment pieces are normal: after backward the activations are gone and what they lay in is in pieces.
    """
    return [found for device in snapshot.devices for found in _of(snapshot, device)]


def _of(snapshot: SnapshotReport, device: DeviceReport) -> list[Finding]:
    ring = device.replay
    if not device.events:
        return []
    pieces = [piece.size for piece in free_ranges(ring, ring.peak_event) if not piece.is_segment]
    split, reserved = sum(pieces), ring.live_at(ring.peak_event).reserved_bytes
    if split < MIN_BYTES or split < NOTABLE_SHARE * reserved:
        return []
    forced = _forced(device)
    added = (
        f" {forced} segment{'s were' if forced > 1 else ' was'} taken from the driver although as much was free in "
        "smaller pieces."
        if forced
        else ""
    )
    name = device_name(device.device)
    return [
        Finding(
            rule="fragmentation",
            severity=Severity.WARNING if forced else Severity.INFO,
            sentence=f"{percent(split / reserved)} of {name}'s reserved memory lies in unused pieces at the peak.",
            why=(
                f"{format_bytes(split)} of {format_bytes(reserved)} are between blocks in use, in {len(pieces):,} "
                f"pieces of at most {format_bytes(max(pieces))}, while {format_bytes(ring.peak_requested_bytes)} are "
                f"live.{added}"
            ),
            next_steps=_next_steps(snapshot, device),
            numbers={
                "device": device.device,
                "split_bytes": split,
                "reserved_bytes": reserved,
                "split_share": split / reserved,
                "pieces": len(pieces),
                "largest_piece_bytes": max(pieces),
                "peak_requested_bytes": ring.peak_requested_bytes,
                "forced_segments": forced,
            },
            weight=split / reserved,
            evidence=in_snapshot(snapshot, device, ring.peak_time_us),
        )
    ]


def _forced(device: DeviceReport) -> int:
    """Count segments that were made though as many bytes were free in pieces, each of them too small."""
    ring = device.replay
    made = [(event.size, i) for i, event in enumerate(ring.snapshot.events) if event.action == "segment_alloc"]
    count = 0
    for size, i in heapq.nlargest(MAX_LOOKS, made):
        sizes = [piece.size for piece in free_ranges(ring, i - 1) if not piece.is_segment]
        count += sum(sizes) >= size > max(sizes, default=0)
    return count


def _next_steps(snapshot: SnapshotReport, device: DeviceReport) -> tuple[str, ...]:
    steady = "Pad batches to a few lengths: sizes that change with every batch leave pieces that fit nothing else."
    if device.is_expandable:
        return (steady, f"Or round requests: {alloc_conf(snapshot, 'roundup_power2_divisions:8')}.")
    return (f"Let segments grow: {alloc_conf(snapshot, 'expandable_segments:True')}.", steady)
