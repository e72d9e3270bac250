"""A model of torch's native CUDA caching allocator: the same requests reserve the same bytes, without a device.

Modeled: rounding, a small and a large pool for each stream, best fit, splitting, coalescing, expandable segments,
release of cached blocks and retry at capacity, and the settings of `AllocatorSettings`. Not modeled: other settings,
`record_stream`, private pools (CUDA graphs), and `garbage_collection_threshold`, which has an effect only with a limit
of the process.

Among free blocks of one size torch takes the one in the oldest segment since 2.13, and that of the lowest address up to
2.11 (2.12: the oldest block, which is not modeled). The driver chooses addresses: on Linux it places newer segments
lower, as recorded snapshots show, which is `newest_segment_first`.

Source: `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h` of torch 2.14.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Final

import msgspec

from lightning_memprof.errors import MemprofError
from lightning_memprof.units import MIB, format_bytes

GRANULE: Final = 512  # of requests
_SMALL: Final = MIB
_SMALL_SEGMENT: Final = 2 * MIB
_OWN_SEGMENT: Final = 10 * MIB  # from here on a request gets a segment of its own size
LARGE_SEGMENT: Final = 20 * MIB
_FIRST_ADDRESS: Final = 1 << 45
_DEVICE_BYTES: Final = 1 << 42  # of an unknown device

LIVE: Final = 0
FREE: Final = 1
UNMAPPED: Final = 2  # a range of an expandable segment without memory


class AllocatorSettings(msgspec.Struct, frozen=True):
    """Settings of the native allocator, sizes in bytes."""

    max_split_size: int = sys.maxsize
    expandable_segments: bool = False
    newest_segment_first: bool = False


def rounded(nbytes: int) -> int:
    """Return the size of the block for a request."""
    return round_up(max(nbytes, 1), GRANULE)


class OutOfMemoryError(MemprofError):
    """A request that failed after every cached block was released."""


class Block:
    """A block of a segment, and the handle of an allocation.

    `size` is in bytes, with rounding; `state` is `LIVE`, `FREE` or `UNMAPPED`.
    """

    __slots__ = ("address", "after", "before", "pool", "size", "state", "stream")

    def __init__(self, pool: _Pool, stream: int, address: int, size: int, state: int) -> None:
        self.pool = pool
        self.stream = stream
        self.address = address
        self.size = size
        self.state = state
        self.before: Block | None = None
        self.after: Block | None = None

    def split(self, size: int, state: int) -> Block:
        """Keep the first `size` bytes; return the rest, in the given state."""
        rest = Block(self.pool, self.stream, self.address + size, self.size - size, state)
        rest.before, rest.after = self, self.after
        if rest.after is not None:
            rest.after.before = rest
        self.after, self.size = rest, size
        return rest


class _Pool:
    """Free blocks of one size class."""

    __slots__ = ("free", "is_small", "page", "unmapped")

    def __init__(self, page: int, *, is_small: bool) -> None:
        self.is_small = is_small
        self.page = page  # of expandable segments
        self.free: list[tuple[int, int, int, Block]] = []  # stream, size, address, block
        self.unmapped: list[tuple[int, int, Block]] = []  # stream, address, block

    def add(self, block: Block) -> None:
        insort(self.free, (block.stream, block.size, block.address, block))

    def remove(self, block: Block) -> None:
        if block.state == FREE:
            del self.free[bisect_left(self.free, (block.stream, block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address))]

    def insert(self, block: Block) -> Block:
        """Add a free or unmapped block, coalesced with neighbors in the same state; return the whole."""
        state, after, before = block.state, block.after, block.before
        if after is not None and after.state == state:
            self.remove(after)
            _absorb(block, after)
        if before is not None and before.state == state:
            self.remove(before)
            _absorb(before, block)
            block = before
        if state == FREE:
            self.add(block)
        else:
            insort(self.unmapped, (block.stream, block.address, block))
        return block


def _absorb(block: Block, after: Block) -> None:
    block.size += after.size
    block.after = after.after
    if after.after is not None:
        after.after.before = block


class CachingAllocator:
    """The allocator of one device; all quantities in bytes.

    Args:
        settings: the allocator's settings.
        capacity_bytes: memory that the driver can give to this process; None: unlimited.
        limit_bytes: what `torch.cuda.set_per_process_memory_fraction` allows; None: not set.
        place: returns the address of a new segment of the given size; None: in the order of the settings.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        capacity_bytes: int | None = None,
        limit_bytes: int | None = None,
        place: Callable[[int], int] | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.capacity_bytes = sys.maxsize if capacity_bytes is None else capacity_bytes
        self.limit_bytes = sys.maxsize if limit_bytes is None else limit_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        self._place = place or self._next_place
        self._next_address = _FIRST_ADDRESS
        self._large = _Pool(LARGE_SEGMENT, is_small=False)
        self._small = _Pool(_SMALL_SEGMENT, is_small=True)
        self._segments: dict[int, Block] = {}
        self._splits_to_round = self.settings.expandable_segments

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        """Return a block for a request of at least one byte.

        Raises:
            OutOfMemoryError: capacity or limit do not allow it.
        """
        settings = self.settings
        size = rounded(nbytes)
        pool = self._small if size <= _SMALL else self._large
        block = self._cached(pool, stream, size) or self._reserve(pool, stream, size)
        if block is None:
            raise OutOfMemoryError(f"{format_bytes(nbytes)} requested, {format_bytes(self.allocated_bytes)} allocated")
        rest = block.size - size
        if (
            rest >= GRANULE
            if pool.is_small or self._splits_to_round
            else rest > _SMALL and size < settings.max_split_size
        ):
            pool.add(block.split(size, FREE))
        block.state = LIVE
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Return a live block to its pool.

        Raises:
            ValueError: the block is not live.
        """
        if block.state != LIVE:
            raise ValueError(f"the block at {block.address:#x} is not live")
        self.allocated_bytes -= block.size
        block.state = FREE
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Release the segments, and the pages of expandable segments, that have no live block."""
        for _, _, _, block in (*self._large.free, *self._small.free):
            if self.settings.expandable_segments:
                self._unmap(block)
            elif block.before is None and block.after is None:
                self._release(block)

    def _next_place(self, size: int) -> int:
        size = round_up(size, _SMALL_SEGMENT)
        if self.settings.newest_segment_first:
            self._next_address -= size
            return self._next_address
        self._next_address += size
        return self._next_address - size

    def _cached(self, pool: _Pool, stream: int, size: int) -> Block | None:
        """Take the best free block out of its pool; None if there is none."""
        free, settings = pool.free, self.settings
        i, end = bisect_left(free, (stream, size)), len(free)
        if i == end or free[i][0] != stream:
            return None
        if settings.expandable_segments:
            # A block before an unmapped range counts as large as it can become.
            while i + 1 < end and free[i + 1][0] == stream and _expanded(free[i + 1][3]) < _expanded(free[i][3]):
                i += 1
        found = free[i][1]
        if size < settings.max_split_size:
            if found >= settings.max_split_size:
                return None
        elif found >= size + LARGE_SEGMENT:
            return None
        return free.pop(i)[3]

    def _reserve(self, pool: _Pool, stream: int, size: int) -> Block | None:
        """Get a block from the driver, if need be after releasing cached blocks; None if memory is exhausted."""
        block = self._grow(pool, stream, size)
        if block is None and self._release_oversize(pool, stream, size):
            block = self._grow(pool, stream, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._grow(pool, stream, size)
        return block

    def _grow(self, pool: _Pool, stream: int, size: int) -> Block | None:
        if pool.is_small:
            segment = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            segment = LARGE_SEGMENT
        else:
            segment = round_up(size, _SMALL_SEGMENT)
        if self.reserved_bytes + segment > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, stream, size)
        return self._new_segment(pool, stream, segment, FREE) if self._charge(segment) else None

    def _charge(self, nbytes: int) -> bool:
        """Count bytes from the driver; False if it has no more."""
        if self.reserved_bytes + nbytes > self.capacity_bytes:
            return False
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _new_segment(self, pool: _Pool, stream: int, size: int, state: int) -> Block:
        block = Block(pool, stream, self._place(size), size, state)
        self._segments[block.address] = block
        return block

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved_bytes -= block.size
        del self._segments[block.address]

    def _release_oversize(self, pool: _Pool, stream: int, size: int) -> bool:
        """Release as many cached blocks of `max_split_size` and above as the request needs; False if too few."""
        least = self.settings.max_split_size
        if least == sys.maxsize or self.settings.expandable_segments:
            return False
        wanted = max(size, least)
        i = bisect_left(pool.free, (stream, wanted))
        if i < len(pool.free) and pool.free[i][0] == stream:
            self._release(pool.free[i][3])
            return True
        released = 0
        while released < wanted and i > 0 and pool.free[i - 1][:2] >= (stream, least):
            i -= 1
            released += pool.free[i][1]
            self._release(pool.free[i][3])
        return released >= wanted

    def _expand(self, pool: _Pool, stream: int, size: int) -> Block | None:
        """Map pages of an expandable segment up to a free block of the size, and take it; None if memory is exhausted.

        Pages that were mapped before a failure stay mapped.
        """
        block: Block | None = self._room(pool, stream, size)
        while block is not None and (block.state == UNMAPPED or block.size < size):
            mapped = 0 if block.state == UNMAPPED else block.size
            following = block.after if mapped else block
            block = following and self._map(following, min(following.size, size - mapped))
        if block is not None:
            pool.remove(block)
        return block

    def _room(self, pool: _Pool, stream: int, size: int) -> Block:
        """Return the block at the lowest address where free and unmapped blocks together have the size."""
        for owner, _, block in pool.unmapped:
            if owner != stream:
                continue
            first = block.before if block.before is not None and block.before.state == FREE else block
            room = 0
            at: Block | None = first
            while room < size and at is not None and at.state != LIVE:
                room += at.size
                at = at.after
            if room >= size:
                return first
        device = _DEVICE_BYTES if self.capacity_bytes == sys.maxsize else self.capacity_bytes
        space = round_up(device + device // 8, pool.page)
        return pool.insert(self._new_segment(pool, stream, space, UNMAPPED))

    def _map(self, block: Block, size: int) -> Block | None:
        """Back the start of an unmapped range by whole pages; return the free block they are part of."""
        mapped = round_up(size, block.pool.page)
        if not self._charge(mapped):
            return None
        block.pool.remove(block)
        rest = block.split(mapped, UNMAPPED) if mapped < block.size else None
        block.state = FREE
        if rest is not None:
            block.pool.insert(rest)
        return block.pool.insert(block)

    def _unmap(self, block: Block) -> None:
        """Release the whole pages inside a free block of an expandable segment."""
        pool, page = block.pool, block.pool.page
        base = max(address for address in self._segments if address <= block.address)
        start = base + round_up(block.address - base, page)
        size = (block.address + block.size - base) // page * page - (start - base)
        if size <= 0:
            return
        pool.remove(block)
        middle = block.split(start - block.address, UNMAPPED) if start > block.address else block
        middle.state = UNMAPPED
        rest = middle.split(size, FREE) if size < middle.size else None
        for free in (block, rest):
            if free is not None and free is not middle:
                pool.insert(free)
        self.reserved_bytes -= size
        whole = pool.insert(middle)
        if whole.before is None and whole.after is None:
            pool.remove(whole)
            del self._segments[whole.address]


def _expanded(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)


def round_up(size: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is not below ``size``."""
    return -(-size // step) * step
