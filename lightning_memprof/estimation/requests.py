"""Storages, their requests to the allocator, and the replay of these on `CachingAllocator` for peaks and a band."""

from __future__ import annotations

import random
import statistics
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Collection
from itertools import islice, product
from typing import Final, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lightning_memprof.estimation.allocator import (
    LARGE_SEGMENT,
    AllocatorSettings,
    Block,
    CachingAllocator,
    OutOfMemoryError,
)
from lightning_memprof.units import MIB

# Truth over estimate in nine of ten measured runs: the least and the most, without and with convolutions, whose
# kernels cuDNN chooses.
_MARGINS: Final = (0.97, 1.03)
_WORKSPACE_MARGINS: Final = (0.90, 1.07)
# CUDA loads the code of kernels on first use; the measured runs count it.
_MODULES: Final = 20 * MIB
_REPLAYS: Final = 9
_CHANGED: Final = 16  # requests that a perturbation changes

LABELS: Final = ("category", "dtype", "module", "operator")


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
        found, events = Requests(), np.array(self.events)
        found.streams = self.streams
        made = events >= 0
        events[made & np.isin(np.cumsum(made) - 1, list(numbers))] = 0
        found.events.frombytes(events.tobytes())
        return found


class Part(NamedTuple):
    """Where a part of a step begins.

    Attributes:
        position: in the requests.
        step: number of the optimizer's step, from 0.
        name: ``forward``, ``backward``, ``optimizer`` or ``validation``.
    """

    position: int
    step: int
    name: str


class Peak(NamedTuple):
    """The moment with most live bytes.

    Attributes:
        live_bytes: in granules.
        position: of the request that reaches it.
        numbers: of the live storages.
    """

    live_bytes: int
    position: int
    numbers: tuple[int, ...]


class StorageLog(msgspec.Struct, frozen=True, kw_only=True):
    """The storages of a fit: when each is made and ends, and what it is.

    Attributes:
        granule: bytes to which each storage is rounded up: 512 on CUDA, 1 on the CPU.
        requests: allocations and frees, in order.
        sizes: bytes by number of the storage.
        parts: the parts of the steps.
        optional: numbers of the storages that a library may need or not; they do not count as live.
    """

    granule: int
    requests: Requests = msgspec.field(default_factory=Requests)
    sizes: array[int] = msgspec.field(default_factory=lambda: array("q"))
    parts: list[Part] = msgspec.field(default_factory=list)
    optional: set[int] = msgspec.field(default_factory=set)
    _labels: dict[str, list[str]] = msgspec.field(default_factory=lambda: {name: [] for name in LABELS})
    _changed: dict[int, list[tuple[int, str]]] = msgspec.field(default_factory=dict)

    def add(self, size: int, stream: int = 0, **labels: str) -> int:
        """Add a storage with all of :data:`LABELS`; return its number."""
        number = self.requests.allocate(size, stream)
        self.sizes.append(size)
        for name, column in self._labels.items():
            # torch makes the name of an operator anew for each of its calls.
            column.append(sys.intern(labels[name]))
        return number

    def again(self, number: int, size: int, stream: int) -> int:
        """Add a storage like another one; return its number."""
        return self.add(size, stream, **{name: column[number] for name, column in self._labels.items()})

    def set_category(self, number: int, category: str) -> None:
        """Set the category of a storage, of a gradient from now on: before, it is a temporary."""
        before = self._labels["category"][number]
        if before != category == "gradient":
            self._changed.setdefault(number, []).append((len(self.requests), before))
        self._labels["category"][number] = category

    def set_module(self, number: int, module: str) -> None:
        """Change the module that a storage belongs to."""
        self._labels["module"][number] = module

    def label(self, number: int, label: str, position: int) -> str:
        """Return a label of a storage after the request at ``position``."""
        if label == "category":
            for since, before in self._changed.get(number, ()):
                if position < since:
                    return before
        return self._labels[label][number]

    def rounded(self) -> NDArray[np.int64]:
        """Return what each storage takes of the allocator, in bytes; 0 for an optional one."""
        found: NDArray[np.int64] = -(-np.array(self.sizes) // self.granule) * self.granule
        found[list(self.optional)] = 0
        return found

    def curve(self, first: int, points: int) -> dict[str, list[int]]:
        """Return live bytes by category among the requests from position ``first``.

        Args:
            first: where the curve begins.
            points: at most so many; each is the moment with most live bytes of a range of requests, in order.
        """
        made, numbers, changes = self._history()
        earlier = (before for changed in self._changed.values() for _, before in changed)
        names = list(dict.fromkeys((*self._labels["category"], *earlier)))
        live, now = np.cumsum(changes), np.array([names.index(name) for name in self._labels["category"]])
        width = max(1, -(-(len(live) - first) // points))
        moments = [start + int(live[start : start + width].argmax()) for start in range(first, len(live), width)]
        before, sizes = now.copy(), self.rounded()
        # The changes until each moment, and those after the last one, by category.
        found = np.zeros((len(moments) + 1, len(names)), dtype=np.int64)
        for number, changed in self._changed.items():
            passed = [names.index(name) for _, name in changed]
            before[number] = passed[0]
            for (since, _), was, becomes in zip(changed, passed, (*passed[1:], now[number]), strict=True):
                at = np.searchsorted(moments, since)
                found[at, was] -= sizes[number]
                found[at, becomes] += sizes[number]
        category = np.where(made, before[numbers], now[numbers])
        np.add.at(found, (np.searchsorted(moments, np.arange(len(live))), category), changes)
        totals = np.cumsum(found, axis=0)[:-1]
        return {names[name]: totals[:, name].tolist() for name in np.flatnonzero(totals.any(axis=0)).tolist()}

    def peak(self, first: int = 0) -> Peak:
        """Return the first moment with most live bytes among the requests from position ``first``."""
        made, numbers, changes = self._history()
        live = np.cumsum(changes)
        if first >= len(live):
            return Peak(0, 0, ())
        position = first + int(live[first:].argmax())
        made, numbers = made[: position + 1], numbers[: position + 1]
        there = np.setdiff1d(numbers[made], numbers[~made], assume_unique=True)
        return Peak(int(live[position]), position, tuple(there.tolist()))

    def _history(self) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
        """Return for each request whether it allocates, the number of its storage, and the change of live bytes."""
        events = np.array(self.requests.events)
        made = events >= 0
        numbers = np.where(made, np.cumsum(made) - 1, ~events)
        return made, numbers, np.where(made, 1, -1) * self.rounded()[numbers]

    def by(self, peak: Peak, *labels: str) -> Counter[tuple[str, ...]]:
        """Return the bytes that are live at a peak by their labels."""
        found: Counter[tuple[str, ...]] = Counter()
        for number, size in zip(peak.numbers, self.rounded()[list(peak.numbers)].tolist(), strict=True):
            found[tuple(self.label(number, label, peak.position) for label in labels)] += size
        return found


class Band(NamedTuple):
    """Peaks of the reserved bytes over replays."""

    low_bytes: int
    likely_bytes: int
    high_bytes: int


def replay(requests: Requests, allocator: CachingAllocator) -> bool:
    """Make the requests of an allocator up to the first that fails; return whether none does."""
    malloc, free, streams = allocator.malloc, allocator.free, requests.streams
    live: list[Block | None] = []
    try:
        for event in requests.events:
            if event >= 0:
                live.append(malloc(event, streams.get(len(live), 0)) if event else None)
            elif (block := live[~event]) is not None:
                free(block)
                live[~event] = None
    except OutOfMemoryError:
        return False
    return True


def perturbed(requests: Requests, settings: AllocatorSettings) -> Band:
    """Return the peaks of requests as they are and with small deterministic changes: fragmentation depends on details.

    The likely one is without a change, or the median where most others differ from it by a segment.

    A perturbed replay starts with a live block of up to 10 MiB, places segments in another order of addresses, and has
    up to 64 KiB more in its first large requests. The bytes of the block are subtracted.
    """
    replay(requests, allocator := CachingAllocator(settings))
    reached = [allocator.peak_reserved_bytes]
    for seed in range(1, _REPLAYS):
        chance = random.Random(seed)  # noqa: S311 repeatable, nothing is secret  # nosec B311
        allocator = CachingAllocator(settings, place=_anywhere(chance))
        extra = allocator.malloc(chance.randrange(1, (MIB, 10 * MIB)[seed % 2]))
        replay(_larger(requests, chance), allocator)
        reached.append(allocator.peak_reserved_bytes - extra.size)
    middle = round(statistics.median(reached))
    # Smaller differences are the perturbation's own.
    likely = reached[0] if abs(reached[0] - middle) < LARGE_SEGMENT else middle
    return Band(min(reached), likely, max(reached))


class Demand(NamedTuple):
    """What requests need of an allocator at their peak.

    Attributes:
        reserved: likely is the value of most replays, with cached blocks released where the capacity demands it.
        retries: how often cached blocks are released.
        fits: whether it fits into the capacity; None where that is too close to call.
    """

    reserved: Band
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
    likely, retries, fits = bands[0].likely_bytes, 0, [True]
    if capacities is not None and high > capacities[0]:
        orders = (settings, replace(settings, newest_segment_first=True))
        tries = [(each, CachingAllocator(*limits)) for each in variants for limits in product(orders, capacities)]
        fits = [replay(variant, allocator) for variant, allocator in tries]
        if fits[0]:
            likely, retries = tries[0][1].peak_reserved_bytes, tries[0][1].retries
        if all(fits):
            high = min(high, max(capacities[0], likely))
    conclusion = all(fits) if len(set(fits)) == 1 else None
    return Demand(Band(min(low, likely), likely, high), retries, conclusion)


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
