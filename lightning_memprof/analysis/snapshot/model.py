"""Results of analysing one CUDA allocator snapshot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from lightning_memprof.analysis.snapshot.replay import Fragmentation, Holder, Live, Replay
from lightning_memprof.units import MIB

__all__ = [
    "AgedHolder",
    "DeviceReport",
    "FailedRequest",
    "HeldLine",
    "Imbalance",
    "LargeBlock",
    "MemoryPool",
    "SnapshotReport",
]


@dataclass(frozen=True, kw_only=True)
class FailedRequest:
    """The last failed allocation (``oom`` event) of the recorded history.

    ``site`` is the user's line that asked, empty where it is unknown. ``live`` is the state at that event.
    ``unused_bytes`` were reserved but not allocated, ``largest_free_bytes`` is the largest contiguous part of them.
    """

    device: int
    requested_bytes: int
    device_free_bytes: int | None
    time_us: int | None
    live: Live
    largest_free_bytes: int = 0
    unused_bytes: int = 0
    site: str = ""


@dataclass(frozen=True, kw_only=True)
class HeldLine:
    """Live bytes of one allocation site; ``stacks`` counts its different stacks.

    ``site`` is the user's innermost line, ``file.py(12): function``, or all lines of a function, ``file.py: function``;
    empty where it is unknown. ``called`` are the innermost functions called from it, such as ``linear``, by bytes.
    """

    site: str
    called: tuple[str, ...]
    bytes: int
    blocks: int
    stacks: int


@dataclass(frozen=True, kw_only=True)
class LargeBlock:
    """One block live at the peak; ``born_us`` is None if it predates the recorded history or has no time."""

    address: int
    bytes: int
    site: str
    born_us: int | None


@dataclass(frozen=True, kw_only=True)
class AgedHolder:
    """Live bytes of one stack at the end of the recorded history, with the age of its oldest block.

    ``before_ring_bytes`` predate the recorded history, so their age is unknown. ``age_us`` is the age of the oldest
    other block at the last event; None without such blocks or without times.
    """

    holder: Holder
    before_ring_bytes: int
    age_us: int | None


@dataclass(frozen=True, kw_only=True)
class MemoryPool:
    """The segments of one pool and stream, which serve no other; ``(0, 0)`` is the default pool (no CUDA graph)."""

    pool: tuple[int, int]
    stream: int
    segments: int
    reserved_bytes: int
    allocated_bytes: int
    inactive_bytes: int


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """One device; sizes are in bytes at the end of the recorded history, peaks are over the whole history.

    Attributes:
        device: index of the device.
        reserved_bytes: segments obtained from the driver.
        allocated_bytes: live blocks, with rounding.
        requested_bytes: live blocks, as requested.
        inactive_bytes: reserved and free.
        pending_bytes: freed, but possibly still in use by another stream.
        peak_requested_bytes: maximum of the live requested bytes.
        peak_reserved_bytes: maximum of the reserved bytes.
        peak_time_us: Unix microseconds of the peak of requested bytes; None without times or before the first event.
        events: number of events.
        segments: number of segments.
        holders_at_peak: requested bytes by Python stack, largest first; they sum to the peak.
        fragmentation: at the end of the history.
        segments_made: count and bytes of segments (or parts of expandable ones) created in the history.
        segments_returned: count and bytes of segments returned to the driver.
        replay: the replayed history, for any other moment.
        lines_at_peak: requested bytes by allocation site, largest first; they sum to the peak.
        functions_at_peak: the same by function.
        largest_at_peak: the largest blocks, at most 20.
        oldest: live bytes at the end by stack, oldest first.
        pools: by pool and stream, largest first.
        has_times: whether the events have times.
        has_stacks: whether any block in the history has a stack.
        is_expandable: whether any segment is expandable.
        start_bytes: live requested bytes at the start of the history.
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
    functions_at_peak: tuple[HeldLine, ...] = ()
    largest_at_peak: tuple[LargeBlock, ...] = ()
    oldest: tuple[AgedHolder, ...] = ()
    pools: tuple[MemoryPool, ...] = ()
    has_times: bool = False
    has_stacks: bool = False
    is_expandable: bool = False
    start_bytes: int = 0
    start_us: int | None = None
    end_us: int | None = None


# A device with a fifth more than the others limits the batch of all.
_LEAST_IMBALANCE: Final = 1.2
_LEAST_IMBALANCE_BYTES: Final = 64 * MIB


class Imbalance(NamedTuple):
    """The device with the highest peak of requested bytes, and the median peak of the other devices."""

    device: int
    peak_bytes: int
    others_bytes: int


@dataclass(frozen=True, kw_only=True)
class SnapshotReport:
    """One snapshot; ``missing`` lists its gaps, one sentence each.

    ``form`` is the form of the file: a dictionary, or a bare list of segments. ``settings`` are the allocator settings
    recorded in the file, such as ``PYTORCH_CUDA_ALLOC_CONF``.
    """

    file: Path
    devices: tuple[DeviceReport, ...]
    oom: FailedRequest | None
    missing: tuple[str, ...]
    form: Literal["dict", "list"] = "dict"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def imbalance(self) -> Imbalance | None:
        """The device whose peak exceeds the others' by a fifth and 64 MiB or more, or None."""
        ordered = sorted(self.devices, key=lambda device: device.peak_requested_bytes)
        if len(ordered) < 2:
            return None
        most = ordered.pop()
        others = int(statistics.median(device.peak_requested_bytes for device in ordered))
        needed = max(_LEAST_IMBALANCE * others, others + _LEAST_IMBALANCE_BYTES)
        found = Imbalance(most.device, most.peak_requested_bytes, others)
        return found if found.peak_bytes >= needed else None
