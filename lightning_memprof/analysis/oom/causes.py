"""Why a request for memory did not fit, from what was counted at that moment."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from lightning_memprof.analysis.run.rows import mapping, text, whole
from lightning_memprof.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_memprof.analysis.oom.snapshot import SnapshotMemory

__all__ = ["Cause", "Memory", "device_cause", "device_memory", "host_cause", "host_memory"]

Cause = Literal["too large", "fragmented", "other process", "limited", "full"]

# A CUDA context, its kernels and the libraries' workspaces take this much of a device without torch's allocator.
CONTEXT_BYTES: Final = GIB
# What torch's message adds where it can see the other processes of the device.
PROCESS: Final = re.compile(r"Process (\d+) has ([0-9.]+) (bytes|KiB|MiB|GiB) memory in use")


@dataclass(frozen=True)
class Memory:
    """What there was, in bytes; None where it is not known.

    Attributes:
        total_bytes: of the device or machine.
        limit_bytes: what the process may use of it.
        free_bytes: what the driver or system could still give.
        allocated_bytes: in live tensors; on the host the resident size.
        reserved_bytes: held from the driver; on the host the virtual size.
        unused_bytes: reserved and in no live tensor.
        largest_free_bytes: the largest piece of ``unused_bytes``; known with a snapshot.
        other_bytes: of the device and neither free nor reserved here: other processes, and libraries of this one.

    """

    total_bytes: int | None
    limit_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    unused_bytes: int | None
    largest_free_bytes: int | None
    other_bytes: int | None


def device_memory(facts: Mapping[str, Any], snapshot: SnapshotMemory | None) -> Memory:
    """Return what a device had; its counters come first, a snapshot where there are none."""
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
    """Return what the host had; the limit is the smallest of those that hold for the process."""
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
    """Say why a request did not fit.

    A request that is larger than the limit fits in no case. Else the bytes that are reserved and unused, or those of
    other processes, are the cause where the request would have fitted with them.
    """
    limit, free, reserved, unused = memory.limit_bytes, memory.free_bytes, memory.reserved_bytes, memory.unused_bytes
    named = _bytes(asked)
    if asked is None or limit is None:
        return "full", f"{_bytes(memory.allocated_bytes)} were allocated; how much was asked for is not known."
    if asked > limit:
        return "too large", f"{named} were asked for in one piece, and the device has {_bytes(limit)} in all."
    allowed = max(0, limit - (reserved or 0))
    room = min(free or 0, allowed)
    fits_unused = unused is not None and room < asked <= room + unused
    if limit < (memory.total_bytes or 0) and allowed < asked <= (free or 0) and not fits_unused:
        return "limited", (
            f"torch.cuda.set_per_process_memory_fraction allows this process {_bytes(limit)} of the device's "
            f"{_bytes(memory.total_bytes)}; {_bytes(reserved)} were reserved, and {named} more do not fit."
        )
    others = max(0, (memory.other_bytes or 0) - CONTEXT_BYTES)
    fits_others = others > 0 and asked <= min((free or 0) + others, limit - (reserved or 0))
    processes = [
        f"process {pid} holds {size} {unit}" for pid, size, unit in PROCESS.findall(text(facts, "exception") or "")
    ]
    if fits_others and not (fits_unused and (unused or 0) >= others):
        told = "; ".join(processes) or "other processes, or libraries of this one that do not ask torch"
        return "other process", (
            f"about {_bytes(others)} of the device's {_bytes(memory.total_bytes)} are held by others ({told}); without "
            f"them the {named} would have fitted."
        )
    if fits_unused:
        largest = None if snapshot is None else snapshot.largest_free_bytes
        piece = "" if largest is None else f", in pieces of at most {_bytes(largest)}"
        none = "no piece is large enough" if (largest or 0) < asked else "large pieces are another stream's or pool's"
        return "fragmented", (
            f"{_bytes(unused)} are reserved and unused{piece}, and {_bytes(room)} are free: enough in sum for the "
            f"{named}, but {none}."
        )
    return "full", (
        f"{_bytes(memory.allocated_bytes)} of {_bytes(limit)} are in live tensors; with {_bytes(room)} free and "
        f"{_bytes(unused)} reserved and unused, {named} more do not fit."
    )


def host_cause(asked: int | None, facts: Mapping[str, Any], memory: Memory) -> tuple[Cause, str]:
    """Say why the host gave nothing: a limit counts where the machine itself would still have had more."""
    host = mapping(facts, "host") or {}
    named = "what was asked for" if asked is None else f"the {_bytes(asked)}"
    space, data, group = (whole(host, name) for name in ("rlimit_as_bytes", "rlimit_data_bytes", "cgroup_limit_bytes"))
    if asked is not None and memory.total_bytes is not None and asked > memory.total_bytes:
        return (
            "too large",
            f"{_bytes(asked)} were asked for in one piece, and the machine has {_bytes(memory.total_bytes)}.",
        )
    used, room = memory.reserved_bytes or 0, whole(host, "available_bytes")
    for limit, name, taken in (
        (space, "RLIMIT_AS (ulimit -v)", used),
        (data, "RLIMIT_DATA (ulimit -d)", used),
        (group, "the control group's memory.max", whole(host, "cgroup_used_bytes") or 0),
    ):
        if limit is None or (room is not None and limit - taken > room):
            continue
        # Python itself does not say how much it asked for.
        if asked is None or taken + asked > limit:
            return "limited", (
                f"{name} allows this process {_bytes(limit)}; {_bytes(taken)} were taken, and there was no room in the "
                f"rest for {named}, although the machine had {_bytes(room)} available."
            )
    return "full", (
        f"the process held {_bytes(memory.allocated_bytes)} of the machine's {_bytes(memory.total_bytes)}, "
        f"{_bytes(room)} were available when {named} could not be had."
    )


def _bytes(value: int | None) -> str:
    return "an unknown number of bytes" if value is None else format_bytes(value)
