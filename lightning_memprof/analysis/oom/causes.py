"""The cause of a failed allocation, from the counters of that moment."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from lightning_memprof.analysis.run.rows import mapping, text, whole
from lightning_memprof.analysis.snapshot.reader import read_snapshot
from lightning_memprof.analysis.snapshot.replay import Holder, replay
from lightning_memprof.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "Cause",
    "Memory",
    "SnapshotMemory",
    "device_cause",
    "device_memory",
    "host_cause",
    "host_memory",
    "snapshot_memory",
]

Cause = Literal["too large", "fragmented", "other process", "limited", "full"]

# A CUDA context, its kernels and the libraries' workspaces take this much of a device without torch's allocator.
CONTEXT_BYTES: Final = GIB
# torch adds this to its message where the driver shows other processes of the device.
PROCESS: Final = re.compile(r"Process (\d+) has ([0-9.]+) (bytes|KiB|MiB|GiB) memory in use")


@dataclass(frozen=True)
class Memory:
    """Memory at the failed allocation, in bytes; None where unknown.

    Attributes:
        total_bytes: size of the device or machine memory.
        limit_bytes: limit of this process.
        free_bytes: free according to the driver or system.
        allocated_bytes: live tensors; on the host RSS.
        reserved_bytes: reserved by the allocator; on the host the virtual size.
        unused_bytes: reserved and not allocated.
        largest_free_bytes: largest contiguous block of ``unused_bytes``; needs a snapshot.
        other_bytes: neither free nor reserved by this process: other processes, and libraries in this one.

    """

    total_bytes: int | None
    limit_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    unused_bytes: int | None
    largest_free_bytes: int | None
    other_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class SnapshotMemory:
    """One device at the moment of an allocator snapshot, in bytes; ``holders`` are live allocations, largest first."""

    allocated_bytes: int
    reserved_bytes: int
    largest_free_bytes: int
    is_expandable: bool
    holders: tuple[Holder, ...]

    @property
    def has_stacks(self) -> bool:
        """Whether any live allocation has a Python stack."""
        return any(holder.stack for holder in self.holders)


def snapshot_memory(path: Path, device: int) -> SnapshotMemory:
    """Return the memory of one device (its index) at the moment of a snapshot.

    Raises:
        ArtifactError: the file cannot be read, or has no such device.

    """
    replayed = replay(read_snapshot(path), device)
    found = replayed.snapshot
    return SnapshotMemory(
        allocated_bytes=found.allocated_bytes,
        reserved_bytes=found.reserved_bytes,
        largest_free_bytes=found.largest_free_block,
        is_expandable=any(segment.is_expandable for segment in found.segments),
        holders=replayed.holders_at(replayed.events - 1),
    )


def device_memory(facts: Mapping[str, Any], snapshot: SnapshotMemory | None) -> Memory:
    """Return the memory of a device, from its counters, or from a snapshot where there are none."""
    statistics = mapping(facts, "statistics") or {}
    allocated = whole(statistics, "allocated_bytes.all.current")
    reserved = whole(statistics, "reserved_bytes.all.current")
    if snapshot is not None:
        allocated = snapshot.allocated_bytes if allocated is None else allocated
        reserved = snapshot.reserved_bytes if reserved is None else reserved
    total = whole(facts, "total_bytes") or whole(facts, "limit_bytes")
    free = whole(facts, "free_bytes")
    other = None if None in (total, free, reserved) else max(0, (total or 0) - (free or 0) - (reserved or 0))
    return Memory(
        total_bytes=total,
        limit_bytes=whole(facts, "limit_bytes") or total,
        free_bytes=free,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        unused_bytes=None if allocated is None or reserved is None else reserved - allocated,
        largest_free_bytes=None if snapshot is None else snapshot.largest_free_bytes,
        other_bytes=other,
    )


def host_memory(facts: Mapping[str, Any]) -> Memory:
    """Return the memory of the host; the limit is the smallest one that applies to the process."""
    host = mapping(facts, "host") or {}
    total, available = whole(host, "total_bytes"), whole(host, "available_bytes")
    limits = [
        limit
        for name in ("rlimit_as_bytes", "rlimit_data_bytes", "cgroup_limit_bytes")
        if (limit := whole(host, name)) is not None
    ]
    rss = whole(host, "rss_bytes")
    other = None if None in (total, available, rss) else max(0, (total or 0) - (available or 0) - (rss or 0))
    return Memory(
        total_bytes=total,
        limit_bytes=min([*limits, total or limits[0]]) if limits else total,
        free_bytes=available,
        allocated_bytes=rss,
        reserved_bytes=whole(host, "vms_bytes"),
        unused_bytes=None,
        largest_free_bytes=None,
        other_bytes=other,
    )


def device_cause(
    asked: int | None, facts: Mapping[str, Any], memory: Memory, snapshot: SnapshotMemory | None
) -> tuple[Cause, str]:
    """Return the cause of a failed device allocation, and a sentence with its evidence.

    An allocation larger than the limit can never succeed. Otherwise unused reserved memory, or the memory of other
    processes, is the cause if the allocation would have succeeded with it.
    """
    limit, free, reserved, unused = memory.limit_bytes, memory.free_bytes, memory.reserved_bytes, memory.unused_bytes
    named = _bytes(asked)
    if asked is None or limit is None:
        return (
            "full",
            f"{_bytes(memory.allocated_bytes)} were allocated; the size of the failed allocation is unknown.",
        )
    if asked > limit:
        return "too large", f"A single allocation of {named} is larger than the limit of {_bytes(limit)}."
    allowed = max(0, limit - (reserved or 0))
    room = min(free or 0, allowed)
    fits_unused = unused is not None and room < asked <= room + unused
    if limit < (memory.total_bytes or 0) and allowed < asked <= (free or 0) and not fits_unused:
        return "limited", (
            f"torch.cuda.set_per_process_memory_fraction limits this process to {_bytes(limit)} of "
            f"{_bytes(memory.total_bytes)}; {_bytes(reserved)} were reserved, and {named} more did not fit."
        )
    others = max(0, (memory.other_bytes or 0) - CONTEXT_BYTES)
    fits_others = others > 0 and asked <= min((free or 0) + others, limit - (reserved or 0))
    processes = [
        f"process {pid} uses {size} {unit}" for pid, size, unit in PROCESS.findall(text(facts, "exception") or "")
    ]
    if fits_others and not (fits_unused and (unused or 0) >= others):
        users = "; ".join(processes) or "other processes, or libraries in this one that bypass torch's allocator"
        return "other process", (
            f"About {_bytes(others)} of {_bytes(memory.total_bytes)} are in use outside this allocator ({users}); "
            f"without them the allocation of {named} would have succeeded."
        )
    if fits_unused:
        largest = None if snapshot is None else snapshot.largest_free_bytes
        piece = "" if largest is None else f", in blocks of at most {_bytes(largest)}"
        none = "no block is large enough" if (largest or 0) < asked else "large blocks belong to another stream or pool"
        return "fragmented", (
            f"{_bytes(unused)} are reserved but unused{piece}, and {_bytes(room)} are free: together enough for "
            f"{named}, but {none}."
        )
    return "full", (
        f"Live tensors use {_bytes(memory.allocated_bytes)} of {_bytes(limit)}; with {_bytes(room)} free and "
        f"{_bytes(unused)} reserved but unused, {named} more did not fit."
    )


def host_cause(asked: int | None, facts: Mapping[str, Any], memory: Memory) -> tuple[Cause, str]:
    """Return the cause of a failed host allocation, and a sentence with its evidence.

    A limit is the cause only where the machine had more memory than the limit left.
    """
    host = mapping(facts, "host") or {}
    named = "the allocation" if asked is None else f"an allocation of {_bytes(asked)}"
    space, data, group = (whole(host, name) for name in ("rlimit_as_bytes", "rlimit_data_bytes", "cgroup_limit_bytes"))
    if asked is not None and memory.total_bytes is not None and asked > memory.total_bytes:
        return (
            "too large",
            f"A single allocation of {_bytes(asked)} is larger than the machine's {_bytes(memory.total_bytes)}.",
        )
    used, room = memory.reserved_bytes or 0, whole(host, "available_bytes")
    for limit, name, taken in (
        (space, "RLIMIT_AS (ulimit -v)", used),
        (data, "RLIMIT_DATA (ulimit -d)", used),
        (group, "memory.max of the control group", whole(host, "cgroup_used_bytes") or 0),
    ):
        if limit is None or (room is not None and limit - taken > room):
            continue
        # Python's MemoryError does not state the size.
        if asked is None or taken + asked > limit:
            return "limited", (
                f"{name} limits this process to {_bytes(limit)}; with {_bytes(taken)} in use there was no room for "
                f"{named}, although the machine had {_bytes(room)} available."
            )
    return "full", (
        f"The process used {_bytes(memory.allocated_bytes)} of the machine's {_bytes(memory.total_bytes)}; "
        f"{_bytes(room)} were available when {named} failed."
    )


def _bytes(value: int | None) -> str:
    return "an unknown number of bytes" if value is None else format_bytes(value)
