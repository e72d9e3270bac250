"""Storages, their requests to the allocator, and the replay of these on `CachingAllocator` for peaks and a band."""

from __future__ import annotations

import random
import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

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

GRANULE: Final = 512
"""CUDA's allocator rounds requests up to this many bytes."""
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
        found, dropped, number = Requests(), set(numbers), 0
        found.streams = self.streams
        for event in self.events:
            if event < 0:
                found.events.append(event)
            else:
                found.events.append(0 if number in dropped else event)
                number += 1
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


class _Names:
    """Numbers for names, so that a row is a few bytes."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []

    def number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._names)
            self._names.append(name)
        return self._numbers[name]

    def __getitem__(self, number: int) -> str:
        return self._names[number]

    def __len__(self) -> int:
        return len(self._names)


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
    _labels: dict[str, array[int]] = msgspec.field(default_factory=lambda: {name: array("l") for name in LABELS})
    _names: _Names = msgspec.field(default_factory=_Names)
    _changed: dict[int, list[tuple[int, int]]] = msgspec.field(default_factory=dict)

    def add(self, size: int, stream: int = 0, **labels: str) -> int:
        """Add a storage with all of :data:`LABELS`; return its number."""
        number = self.requests.allocate(size, stream)
        self.sizes.append(size)
        for name, column in self._labels.items():
            column.append(self._names.number(labels[name]))
        return number

    def again(self, number: int, size: int, stream: int) -> int:
        """Add a storage like another one; return its number."""
        labels = {name: self._names[column[number]] for name, column in self._labels.items()}
        return self.add(size, stream, **labels)

    def begin(self, step: int, part: str) -> None:
        """Note that a part of a step begins."""
        self.parts.append(Part(len(self.requests), step, part))

    def set_category(self, number: int, category: str) -> None:
        """Set the category of a storage, of a gradient from now on: before, it is a temporary."""
        before, now = self._labels["category"][number], self._names.number(category)
        if before != now and category == "gradient":
            self._changed.setdefault(number, []).append((len(self.requests), before))
        self._labels["category"][number] = now

    def set_module(self, number: int, module: str) -> None:
        """Change the module that a storage belongs to."""
        self._labels["module"][number] = self._names.number(module)

    def label(self, number: int, label: str, position: int) -> str:
        """Return a label of a storage after the request at ``position``."""
        if label == "category":
            for since, before in self._changed.get(number, ()):
                if position < since:
                    return self._names[before]
        return self._names[self._labels[label][number]]

    def rounded(self, number: int) -> int:
        """Return what a storage takes of the allocator, in bytes; 0 for an optional one."""
        return 0 if number in self.optional else -(-self.sizes[number] // self.granule) * self.granule

    def live(self) -> Iterator[int]:
        """Yield the live bytes after each request."""
        live = number = 0
        for event in self.requests.events:
            if event < 0:
                live -= self.rounded(~event)
            else:
                live += self.rounded(number)
                number += 1
            yield live

    def curve(self, first: int, points: int) -> dict[str, list[int]]:
        """Return live bytes by category among the requests from position ``first``.

        Args:
            first: where the curve begins.
            points: at most so many; each is the moment with most live bytes of a range of requests, in order.
        """
        events = self.requests.events
        width = max(1, -(-(len(events) - first) // points))
        live = dict.fromkeys(range(len(self._names)), 0)
        number, total, highest = 0, 0, -1
        found: list[dict[int, int]] = []
        category = self._labels["category"][:]
        for owner, earlier in self._changed.items():
            category[owner] = earlier[0][1]
        changes = self._changes()
        for position, event in enumerate(events):
            while changes and changes[-1][0] <= position:
                _, owner, now = changes.pop()
                size = self.rounded(owner)
                live[category[owner]] -= size
                live[now] += size
                category[owner] = now
            made = event >= 0
            owner, number = (number, number + 1) if made else (~event, number)
            size = self.rounded(owner) if made else -self.rounded(owner)
            live[category[owner]] += size
            total += size
            if position < first:
                continue
            if (position - first) % width == 0:
                found.append({})
                highest = -1
            if total > highest:
                highest, found[-1] = total, dict(live)
        used = [name for name in live if any(moment[name] for moment in found)]
        return {self._names[name]: [moment[name] for moment in found] for name in used}

    def _changes(self) -> list[tuple[int, int, int]]:
        """Return when a storage's category changes, the storage, and its category from then on; the last one first."""
        found = []
        for number, changes in self._changed.items():
            now = [before for _, before in changes[1:]] + [self._labels["category"][number]]
            found += [(since, number, after) for (since, _), after in zip(changes, now, strict=True)]
        return sorted(found, key=lambda change: change[0], reverse=True)

    def peak(self, first: int = 0) -> Peak:
        """Return the first moment with most live bytes among the requests from position ``first``."""
        live_bytes, position = max(
            ((live, -position) for position, live in enumerate(self.live()) if position >= first), default=(0, 0)
        )
        return Peak(live_bytes, -position, tuple(self._live_at(-position)))

    def _live_at(self, position: int) -> Iterable[int]:
        numbers: dict[int, None] = {}
        made = 0
        for event in islice(self.requests.events, position + 1):
            if event < 0:
                del numbers[~event]
            else:
                numbers[made] = None
                made += 1
        return numbers

    def part_at(self, position: int) -> Part | None:
        """Return the part of a step that a request belongs to; None before the first step."""
        return next((part for part in reversed(self.parts) if part.position <= position), None)

    def by(self, peak: Peak, *labels: str) -> Counter[tuple[str, ...]]:
        """Return the bytes that are live at a peak by their labels."""
        found: Counter[tuple[str, ...]] = Counter()
        for number in peak.numbers:
            found[tuple(self.label(number, label, peak.position) for label in labels)] += self.rounded(number)
        return found


class Peaks(msgspec.Struct, frozen=True):
    """What a replay reached, in bytes; after `out_of_memory` nothing was replayed."""

    allocated_bytes: int
    reserved_bytes: int
    retries: int
    out_of_memory: OutOfMemoryError | None = None


class Band(msgspec.Struct, frozen=True):
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


class Demand(msgspec.Struct, frozen=True, kw_only=True):
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
    return Demand(low_bytes=min(low, likely), likely_bytes=likely, high_bytes=high, retries=retries, fits=fits)


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
