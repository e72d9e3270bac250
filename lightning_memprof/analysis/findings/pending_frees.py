"""Memory that was freed but waits for another stream."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Finding, Severity
from lightning_memprof.analysis.findings.snapshot_parts import device_name, in_snapshot
from lightning_memprof.units import MIB, format_bytes, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprof.analysis.snapshot.model import DeviceReport, SnapshotReport

__all__ = ["pending_frees"]

# A tenth of the memory is what the next larger batch would need.
NOTABLE_SHARE: Final = 0.10
SEVERE_SHARE: Final = 0.25
MIN_BYTES: Final = 512 * MIB


def pending_frees(snapshot: SnapshotReport) -> list[Finding]:
    """Say how much waits at the moment at which most of it does."""
    return [found for device in snapshot.devices for found in _of(snapshot, device)]


def _of(snapshot: SnapshotReport, device: DeviceReport) -> list[Finding]:
    waiting = _waiting(device)
    at = max(range(len(waiting)), key=waiting.__getitem__) - 1
    most, reserved = waiting[at + 1], device.replay.live_at(at).reserved_bytes
    share = most / reserved if reserved else 0.0
    if most < MIN_BYTES or share < NOTABLE_SHARE:
        return []
    time_us = device.replay.snapshot.events[at].time_us if at >= 0 else None
    return [
        Finding(
            rule="pending_frees",
            severity=Severity.WARNING if share >= SEVERE_SHARE else Severity.INFO,
            sentence=f"{percent(share)} of {device_name(device.device)}'s reserved memory was freed but still waits "
            "for another stream.",
            why=(
                f"{format_bytes(most)} of {format_bytes(reserved)} had been freed by the program, and could not be "
                "used again until a stream that had been given them (Tensor.record_stream) came so far."
            ),
            next_steps=(
                "With FSDP1 keep FullyShardedDataParallel(limit_all_gathers=True); FSDP2 uses no record_stream.",
                "With a stream of your own wait for its event before the tensor is freed, instead of record_stream.",
            ),
            numbers={"device": device.device, "pending_bytes": most, "reserved_bytes": reserved},
            weight=share,
            evidence=in_snapshot(snapshot, device, time_us),
        )
    ]


def _waiting(device: DeviceReport) -> Sequence[int]:
    """Bytes at each moment, from -1 on, whose free was asked for and is not done."""
    deltas = [0] * (device.events + 2)
    for life in device.replay.lives:
        # Where no other stream is waited for, the ring has both events of a free one after the other.
        if life.died > life.freed + 1:
            deltas[max(life.freed, life.born) + 1] += life.size
            deltas[life.died + 1] -= life.size
    return tuple(accumulate(deltas[: device.events + 1]))
