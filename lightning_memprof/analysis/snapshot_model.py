"""What an analysis says of one snapshot of the CUDA allocator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_memprof.analysis.replay import Fragmentation, Holder, Live, Replay

__all__ = ["DeviceReport", "FailedRequest", "SnapshotReport"]


@dataclass(frozen=True, kw_only=True)
class FailedRequest:
    """The last ``oom`` of a ring: what was asked for, and what the device had free."""

    device: int
    requested_bytes: int
    device_free_bytes: int | None
    time_us: int | None
    live: Live


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """One device; sizes at the end of the ring but for the peaks, which are over the ring."""

    device: int
    reserved_bytes: int
    allocated_bytes: int
    requested_bytes: int
    inactive_bytes: int
    pending_bytes: int
    peak_requested_bytes: int
    peak_reserved_bytes: int
    peak_time_us: int | None
    events: int
    segments: int
    holders_at_peak: tuple[Holder, ...]
    fragmentation: Fragmentation
    segments_made: tuple[int, int]
    segments_returned: tuple[int, int]
    replay: Replay


@dataclass(frozen=True, kw_only=True)
class SnapshotReport:
    """One snapshot; ``missing`` says what it lacks, a sentence each."""

    file: Path
    devices: tuple[DeviceReport, ...]
    oom: FailedRequest | None
    missing: tuple[str, ...]
