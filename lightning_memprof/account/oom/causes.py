"""The cause of a failed allocation, from the counters of that moment, and what its remedy depends on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from lightning_memprof.artifacts.manifest import OomRow
from lightning_memprof.read.snapshot.reader import DeviceSnapshot
from lightning_memprof.units import GIB, KIB, MIB, format_bytes, format_list

Cause = Literal["too large", "fragmented", "other process", "limited", "full"]
# The causes as the end of "cuda:0 ran out of memory: ...".
CAUSES: Final[Mapping[Cause, str]] = {
    "too large": "one allocation is too large",
    "fragmented": "its free memory is fragmented",
    "other process": "other processes use its memory",
    "limited": "a limit of this process was reached",
    "full": "live memory fills it",
}

# A CUDA context, its kernels and the libraries' workspaces take this much of a device without torch's allocator; so
# does a desktop: a display server, a browser.
CONTEXT_BYTES: Final = GIB
# Gaps, or other processes, of a smaller share of what this process uses only bring the failure forward: one more tensor
# of this size would fail without them as well.
NOTABLE: Final = 0.1
# An allocation that needs more of the device must be split: checkpointing other modules does not help.
LARGE: Final = 0.25
NEARLY: Final = 0.1
# torch adds these to its message where the driver shows the processes of the device: often only this one, without
# display servers and other containers. If this one is missing, as in a container, it may be one of the numbers.
_SIZE: Final = r"has (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB) memory in use"
THIS_PROCESS: Final = re.compile(f"this process {_SIZE}")
PROCESS: Final = re.compile(rf"Process (\d+) {_SIZE}")
# torch rounds the size of this process to 0.01 GiB, and the driver keeps a few MiB.
ROUNDING_BYTES: Final = 64 * MIB
UNITS: Final = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}

# Processes that a sentence names.
SHOWN: Final = 3
SETUP: Final = "setup"
OTHER_TENSORS: Final = "other tensors held by Python"
# Allocated bytes that neither the model, its optimizers nor a Python object hold.
REST: Final = "the rest: "
UNHELD: Final = f"{REST}saved activations and temporaries"
HOST_REST: Final = f"{REST}Python objects, libraries and saved activations"


class Memory(msgspec.Struct, frozen=True):
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
        process_bytes: used by other processes, where the driver shows what this one uses.
    """

    total_bytes: int | None
    limit_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    unused_bytes: int | None = None
    largest_free_bytes: int | None = None
    other_bytes: int | None = None
    process_bytes: int | None = None


def device_memory(facts: OomRow, snapshot: DeviceSnapshot | None) -> Memory:
    """Return the memory of a device, from its counters, or from a snapshot where there are none."""
    statistics = facts.statistics or {}
    allocated = statistics.get("allocated_bytes.all.current")
    reserved = statistics.get("reserved_bytes.all.current")
    if snapshot is not None:
        allocated = snapshot.allocated_bytes if allocated is None else allocated
        reserved = snapshot.reserved_bytes if reserved is None else reserved
    total = facts.total_bytes or facts.limit_bytes
    free = facts.free_bytes
    other = None if None in (total, free, reserved) else max(0, (total or 0) - (free or 0) - (reserved or 0))
    return Memory(
        total_bytes=total,
        limit_bytes=facts.limit_bytes or total,
        free_bytes=free,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        unused_bytes=None if allocated is None or reserved is None else reserved - allocated,
        largest_free_bytes=None if snapshot is None else snapshot.largest_free_block,
        other_bytes=other,
        process_bytes=None if total is None or free is None else _process_bytes(facts, total, free),
    )


def _named_bytes(facts: OomRow) -> int:
    return sum(_size(*found) for _, *found in PROCESS.findall(facts.exception or ""))


def _process_bytes(facts: OomRow, total: int, free: int) -> int | None:
    """Return the bytes that are neither free nor this process's; if those of the named processes come near, these."""
    found = THIS_PROCESS.search(facts.exception or "")
    own = _size(*found.groups()) if found is not None else total + 1
    if own > total:  # a driver that does not know the size shows one that no device has
        return None
    named, others = _named_bytes(facts), max(0, total - free - own)
    return named if abs(others - named) <= ROUNDING_BYTES else others


def _size(number: str, unit: str) -> int:
    return round(float(number) * UNITS[unit])


def host_memory(facts: OomRow) -> Memory:
    """Return the memory of the host; the limit is the smallest one that applies to the process."""
    host = facts.host
    total, available, rss = host.total_bytes, host.available_bytes, host.rss_bytes
    known = (host.rlimit_as_bytes, host.rlimit_data_bytes, host.cgroup_limit_bytes)
    limits = [limit for limit in known if limit is not None]
    other = None if None in (total, available, rss) else max(0, (total or 0) - (available or 0) - (rss or 0))
    return Memory(
        total_bytes=total,
        limit_bytes=min([*limits, total or limits[0]]) if limits else total,
        free_bytes=available,
        allocated_bytes=rss,
        reserved_bytes=host.vms_bytes,
        other_bytes=other,
    )


def device_cause(facts: OomRow, memory: Memory, snapshot: DeviceSnapshot | None, mostly: str = "") -> tuple[Cause, str]:
    """Return the cause of a failed device allocation, and a sentence with its evidence.

    An allocation larger than the limit can never succeed. Otherwise unused reserved memory, at least 10% of it, is the
    cause if the allocation would have succeeded with it; so is the memory of other processes, if it is at least 10% of
    what this one needs, and more than a desktop's: 1 GiB, or a quarter of a small device. Of the rest, an allocation is
    too large if it exceeds all live tensors together and a quarter of the limit.

    Args:
        facts: the recorded event.
        memory: its memory.
        snapshot: the allocator snapshot of that moment, or None.
        mostly: the largest part of the live tensors, in parentheses.
    """
    limit, free, reserved, unused = memory.limit_bytes, memory.free_bytes, memory.reserved_bytes, memory.unused_bytes
    asked = facts.asked_bytes
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
    is_notable = unused is not None and unused >= NOTABLE * (reserved or 0)
    fits_unused = unused is not None and is_notable and room < asked <= room + unused
    if limit < (memory.total_bytes or 0) and allowed < asked <= (free or 0) and not fits_unused:
        return "limited", (
            f"torch.cuda.set_per_process_memory_fraction limits this process to {_bytes(limit)} of "
            f"{_bytes(memory.total_bytes)}; {_bytes(reserved)} were reserved, and {named} more did not fit."
        )
    others = _used_by_others(memory)
    fits_others = asked <= min((free or 0) + others, allowed)
    if (
        fits_others
        and _is_notable(others, (reserved or 0) + asked, memory.total_bytes or limit)
        and not (fits_unused and (unused or 0) >= others)
    ):
        return "other process", f"{_others(facts, memory)}; without that, the allocation of {named} would succeed."
    if fits_unused:
        largest = None if snapshot is None else snapshot.largest_free_block
        piece = "" if largest is None else f", in blocks of at most {_bytes(largest)}"
        none = "no block is large enough" if (largest or 0) < asked else "large blocks belong to another stream or pool"
        return "fragmented", (
            f"{_bytes(unused)} are reserved but unused{piece}, and {_bytes(room)} are free: together enough for "
            f"{named}, but {none}."
        )
    cause, why = _without_room(asked, memory, limit, room, mostly)
    return cause, f"{why} {_others(facts, memory)}." if memory.process_bytes and fits_others else why


def _used_by_others(memory: Memory) -> int:
    """Return the bytes of other processes; an estimate, rather too low, where the driver does not show them."""
    return max(0, (memory.other_bytes or 0) - CONTEXT_BYTES) if memory.process_bytes is None else memory.process_bytes


def _is_notable(others: int, needed: int, total: int) -> bool:
    """Return whether other processes use a notable part of what this one needs, and more than a desktop."""
    return others >= max(NOTABLE * needed, min(CONTEXT_BYTES, LARGE * total))


def _others(facts: OomRow, memory: Memory) -> str:
    """Return a clause with the memory that other processes use."""
    of = f"of {_bytes(memory.total_bytes)}"
    if memory.process_bytes is None:
        return (
            f"{_bytes(memory.other_bytes)} {of} are in use outside of torch, by other processes or by libraries in "
            "this one that bypass its allocator"
        )
    used = f"{_bytes(memory.process_bytes)} {of}"
    if memory.process_bytes != _named_bytes(facts):
        return f"Other processes, which the driver does not show here, use {used}"
    found = PROCESS.findall(facts.exception or "")
    if len(found) == 1:
        return f"Process {found[0][0]} uses {used}"
    return f"Processes {format_list([f'{pid} ({size} {unit})' for pid, size, unit in found], SHOWN)} use {used}"


def _without_room(asked: int, memory: Memory, limit: int, room: int, mostly: str) -> tuple[Cause, str]:
    named = _bytes(asked)
    if asked > max(memory.allocated_bytes or 0, LARGE * limit):
        return "too large", (
            f"A single allocation of {named} exceeds all live tensors together ({_bytes(memory.allocated_bytes)} of "
            f"{_bytes(limit)}), and {_bytes(room)} were free."
        )
    return "full", (
        f"Live tensors use {_bytes(memory.allocated_bytes)} of {_bytes(limit)}{mostly}; with {_bytes(room)} free and "
        f"{_bytes(memory.unused_bytes)} reserved but unused, {named} more did not fit."
    )


def host_cause(facts: OomRow, memory: Memory) -> tuple[Cause, str]:
    """Return the cause of a failed host allocation, and a sentence with its evidence.

    A limit is the cause only where the machine had more memory than the limit left, and less than the allocation or a
    tenth of the limit was left: the C allocator reserves more than it returns.
    """
    host, asked = facts.host, facts.asked_bytes
    named = "the allocation" if asked is None else f"an allocation of {_bytes(asked)}"
    if asked is not None and memory.total_bytes is not None and asked > memory.total_bytes:
        return (
            "too large",
            f"A single allocation of {_bytes(asked)} is larger than the machine's {_bytes(memory.total_bytes)}.",
        )
    used, room = memory.reserved_bytes or 0, host.available_bytes
    for limit, name, taken in (
        (host.rlimit_as_bytes, "RLIMIT_AS (ulimit -v)", used),
        (host.rlimit_data_bytes, "RLIMIT_DATA (ulimit -d)", used),
        (host.cgroup_limit_bytes, "memory.max of the control group", host.cgroup_used_bytes or 0),
    ):
        if limit is None or (room is not None and limit - taken > room):
            continue
        # Python's MemoryError does not state the size.
        if asked is None or limit - taken < max(asked, NEARLY * limit):
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
