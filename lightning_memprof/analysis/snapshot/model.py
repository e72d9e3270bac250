"""What an analysis says of one snapshot of the CUDA allocator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_memprof.analysis.snapshot.replay import Fragmentation, Holder, Live, Replay

__all__ = ["AgedHolder", "DeviceReport", "FailedRequest", "HeldLine", "LargeBlock", "MemoryPool", "SnapshotReport"]


@dataclass(frozen=True, kw_only=True)
class FailedRequest:
    """The last ``oom`` of a ring: what was asked for, and what the device had free.

    ``live`` is at that moment. ``largest_free_bytes`` is the largest piece then between blocks in use, ``unused_bytes``
    all of them: reserved, and of no use to the request where they are smaller.
    """

    device: int
    requested_bytes: int
    device_free_bytes: int | None
    time_us: int | None
    live: Live
    largest_free_bytes: int = 0
    unused_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class HeldLine:
    """Holders folded to the user's innermost line (``site`` of a `Holder`): from how many stacks, the largest first.

    ``called`` are the functions that this line called in the end, by bytes, such as ``linear``; libraries' frames in
    between are left out. ``site`` is empty where nothing is known.
    """

    site: str
    called: tuple[str, ...]
    bytes: int
    blocks: int
    stacks: int


@dataclass(frozen=True, kw_only=True)
class LargeBlock:
    """One block that was live at the peak; ``born_us`` is None where it is from before the ring, or has no time."""

    address: int
    bytes: int
    site: str
    born_us: int | None


@dataclass(frozen=True, kw_only=True)
class AgedHolder:
    """What a stack holds at the end of the ring, with the age of its oldest block.

    ``before_ring_bytes`` are from before the ring: older than all else, and nobody knows how much. ``age_us`` is that
    of the oldest of the others at the last event; None where there are none, or no times.
    """

    holder: Holder
    before_ring_bytes: int
    age_us: int | None


@dataclass(frozen=True, kw_only=True)
class MemoryPool:
    """The segments of one pool and stream, which serve no other; ``(0, 0)`` is the pool of all that is in no graph."""

    pool: tuple[int, int]
    stream: int
    segments: int
    reserved_bytes: int
    allocated_bytes: int
    inactive_bytes: int


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """One device; sizes at the end of the ring but for the peaks, which are over the ring.

    Attributes:
        device: the device's number.
        reserved_bytes: what the allocator had from the driver.
        allocated_bytes: what tensors held, as blocks were handed out.
        requested_bytes: the same, as it was asked for.
        inactive_bytes: reserved and in no use.
        pending_bytes: freed, but another stream may still use it.
        peak_requested_bytes: the most that was asked for and live.
        peak_reserved_bytes: the most that was reserved.
        peak_time_us: Unix microseconds of the former; None without times, or before the first event.
        events: how many the ring has.
        segments: how many there are.
        holders_at_peak: who held the requested bytes, by Python stack, largest first; they add up.
        fragmentation: at the end.
        segments_made: how many segments (or parts of expandable ones) the ring saw made, and their bytes.
        segments_returned: how many it saw given back to the driver, and their bytes.
        replay: the ring, for any other moment.
        lines_at_peak: the holders by the user's line, largest first; they add up as well.
        largest_at_peak: the largest blocks, at most 20.
        oldest: who holds what at the end, the oldest first.
        pools: by pool and stream, largest first.
        has_times: whether the events have times.
        has_stacks: whether anything that was live in the ring has a stack.
        is_expandable: whether there are expandable segments.
        start_bytes: requested and live as the ring begins.
        start_us: Unix microseconds of the first event, ``end_us`` of the last; None without times.
    """

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
    lines_at_peak: tuple[HeldLine, ...] = ()
    largest_at_peak: tuple[LargeBlock, ...] = ()
    oldest: tuple[AgedHolder, ...] = ()
    pools: tuple[MemoryPool, ...] = ()
    has_times: bool = False
    has_stacks: bool = False
    is_expandable: bool = False
    start_bytes: int = 0
    start_us: int | None = None
    end_us: int | None = None


@dataclass(frozen=True, kw_only=True)
class SnapshotReport:
    """One snapshot; ``missing`` says what it lacks, a sentence each.

    ``form`` is that of the file: a dictionary, or the bare list of segments. ``settings`` are the allocator's, as they
    stand in the file; ``PYTORCH_CUDA_ALLOC_CONF`` is one of them.
    """

    file: Path
    devices: tuple[DeviceReport, ...]
    oom: FailedRequest | None
    missing: tuple[str, ...]
    form: Literal["dict", "list"] = "dict"
    settings: Mapping[str, Any] = field(default_factory=dict)
