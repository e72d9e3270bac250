"""Requests to the allocator: their recording, and their replay on `CachingAllocator` for peaks and a band."""

from __future__ import annotations

import random
import statistics
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from lightning_memprof.estimation.allocator import AllocatorSettings, Block, CachingAllocator, OutOfMemoryError
from lightning_memprof.units import MIB

# Truth over estimate in nine of ten measured runs: the least and the most, without and with convolutions, whose
# kernels cuDNN chooses.
_MARGINS: Final = (0.97, 1.03)
_WORKSPACE_MARGINS: Final = (0.90, 1.07)
# CUDA loads the code of kernels on first use; the measured runs count it.
_MODULES: Final = 20 * MIB
_REPLAYS: Final = 9
_CHANGED: Final = 16  # requests that a perturbation changes
# The allocator's segment for requests below 10 MiB: smaller differences are the perturbation's own.
_SEGMENT: Final = 20 * MIB


class Requests:
    """Allocations and frees in order, 8 bytes each: a number of bytes, or `~n` to free allocation `n`.

    Allocations are numbered from 0. An allocation of 0 bytes has a number and takes no memory.
    """

    def __init__(self) -> None:
        self.events = array("q")
        self.streams: dict[int, int] = {}
        self._allocations = 0

    def __len__(self) -> int:
        return len(self.events)

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        """Append an allocation; return its number."""
        number = self._allocations
        self._allocations += 1
        self.events.append(nbytes)
        if stream:
            self.streams[number] = stream
        return number

    def free(self, number: int) -> None:
        """Append the free of an allocation."""
        self.events.append(~number)

    def without(self, numbers: Collection[int]) -> Requests:
        """Return the requests without some allocations, which take no memory then."""
        found, dropped, number = Requests(), set(numbers), 0
        found.streams = self.streams
        for event in self.events:
            if event < 0:
                found.events.append(event)
            else:
                found.events.append(0 if number in dropped else event)
                number += 1
        return found


@dataclass(frozen=True)
class Peaks:
    """What a replay reached, in bytes; after `out_of_memory` nothing was replayed."""

    allocated_bytes: int
    reserved_bytes: int
    retries: int
    out_of_memory: OutOfMemoryError | None = None


@dataclass(frozen=True)
class Band:
    """Peaks of the reserved bytes over replays."""

    low_bytes: int
    likely_bytes: int
    high_bytes: int


def replay(requests: Requests, allocator: CachingAllocator | None = None) -> Peaks:
    """Return what requests reach on an allocator, by default an unlimited one with default settings."""
    allocator = allocator or CachingAllocator()
    malloc, free, streams = allocator.malloc, allocator.free, requests.streams
    live: list[Block | None] = []
    failure = None
    try:
        for event in requests.events:
            if event >= 0:
                live.append(malloc(event, streams.get(len(live), 0)) if event else None)
            elif (block := live[~event]) is not None:
                free(block)
                live[~event] = None
    except OutOfMemoryError as error:
        failure = error
    return Peaks(
        allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.peak_reserved_bytes,
        retries=allocator.retries,
        out_of_memory=failure,
    )


def perturbed(requests: Requests, settings: AllocatorSettings | None = None) -> Band:
    """Return the peaks of requests as they are and with small deterministic changes: fragmentation depends on details.

    The likely one is without a change, or the median where most others differ from it by a segment.

    A perturbed replay starts with a live block of up to 10 MiB, places segments in another order of addresses, and has
    up to 64 KiB more in its first large requests. The bytes of the block are subtracted.
    """
    reached = [replay(requests, CachingAllocator(settings)).reserved_bytes]
    for seed in range(1, _REPLAYS):
        chance = random.Random(seed)  # noqa: S311 repeatable, nothing is secret  # nosec B311
        allocator = CachingAllocator(settings, place=_anywhere(chance))
        extra = allocator.malloc(chance.randrange(1, (MIB, 10 * MIB)[seed % 2]))
        reached.append(replay(_larger(requests, chance), allocator).reserved_bytes - extra.size)
    middle = round(statistics.median(reached))
    likely = reached[0] if abs(reached[0] - middle) < _SEGMENT else middle
    return Band(low_bytes=min(reached), likely_bytes=likely, high_bytes=max(reached))


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The reserved bytes that requests need at their peak.

    Attributes:
        low_bytes: lower end of the band.
        likely_bytes: of most replays, with the allocator's cached blocks released where the capacity demands it.
        high_bytes: upper end of the band.
        retries: how often cached blocks are released.
        fits: whether it fits into the capacity; None where that is too close to call.
    """

    low_bytes: int
    likely_bytes: int
    high_bytes: int
    retries: int
    fits: bool | None


def demand(
    requests: Requests,
    settings: AllocatorSettings,
    *,
    workspaces: Collection[int] = (),
    capacities: tuple[int, int] | None = None,
) -> Demand:
    """Return what requests need on an allocator.

    The band covers what fragmentation makes of details, and how far the measured runs of ``docs/measured/estimate.md``
    scatter around their estimates: their margins are calibrated on these.

    Args:
        requests: the requests.
        settings: of the allocator.
        workspaces: numbers of allocations that a library may make or not.
        capacities: bytes that are available at least and at most; None does not limit them.
    """
    variants = [requests.without(workspaces), requests] if workspaces else [requests]
    bands = [perturbed(variant, settings) for variant in variants]
    below, above = _WORKSPACE_MARGINS if workspaces else _MARGINS
    low = round(min(band.low_bytes for band in bands) * below)
    high = round(max(band.high_bytes for band in bands) * above) + _MODULES
    unlimited = bands[0].likely_bytes
    if capacities is None or high <= capacities[0]:
        return Demand(low_bytes=low, likely_bytes=unlimited, high_bytes=high, retries=0, fits=True)
    orders = (settings, replace(settings, newest_segment_first=True))
    tries = [
        replay(variant, CachingAllocator(order, capacity))
        for variant in variants
        for order in orders
        for capacity in capacities
    ]
    failed = [attempt.out_of_memory is not None for attempt in tries]
    if not any(failed):
        likely = tries[0].reserved_bytes
        retries, high = tries[0].retries, min(high, max(capacities[0], likely))
        return Demand(low_bytes=min(low, likely), likely_bytes=likely, high_bytes=high, retries=retries, fits=True)
    fits = False if all(failed) else None
    likely = unlimited if failed[0] else tries[0].reserved_bytes
    retries = 0 if failed[0] else tries[0].retries
    return Demand(low_bytes=low, likely_bytes=likely, high_bytes=high, retries=retries, fits=fits)


def _anywhere(chance: random.Random) -> Callable[[int], int]:
    return lambda _: chance.getrandbits(30) << 50


def _larger(requests: Requests, chance: random.Random) -> Requests:
    """Return the requests with slightly larger first large allocations."""
    changed = Requests()
    changed.events, changed.streams = requests.events[:], requests.streams
    large = (i for i, event in enumerate(changed.events) if event > MIB)
    for i in islice(large, _CHANGED):
        changed.events[i] += 512 * chance.randrange(128)
    return changed
