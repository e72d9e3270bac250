"""A model of torch's native CUDA caching allocator: the same requests reserve the same bytes, without a device.

Modeled: rounding, a small and a large pool for each stream, best fit, splitting, coalescing, expandable segments,
release of cached blocks and retry at capacity, and the settings of `AllocatorSettings`. Not modeled: `record_stream`,
private pools (CUDA graphs), `backend:cudaMallocAsync`.

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

_ROUND: Final = 512
_SMALL: Final = MIB
_SMALL_SEGMENT: Final = 2 * MIB
OWN_SEGMENT: Final = 10 * MIB  # from here on a request gets a segment of its own size
LARGE_SEGMENT: Final = 20 * MIB
INTERVALS: Final = 16  # of roundup_power2_divisions: powers of two from 1 MiB to 64 GiB
_FIRST_ADDRESS: Final = 1 << 45
_DEVICE_BYTES: Final = 1 << 42  # of an unknown device

_LIVE: Final = 0
_FREE: Final = 1
_UNMAPPED: Final = 2  # a range of an expandable segment without memory


class AllocatorSettings(msgspec.Struct, frozen=True):
    """Settings of the native allocator, sizes in bytes.

    `roundup_power2_divisions` has one number per power of two from 1 MiB to 64 GiB; 0 and 1 disable it.
    `garbage_collection_threshold` has an effect only with a limit of the process. `ignored` are the settings that
    change no figure of this model, or that it does not know.
    """

    max_split_size: int = sys.maxsize
    max_non_split_rounding_size: int = LARGE_SEGMENT
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    expandable_segments: bool = False
    garbage_collection_threshold: float = 0.0
    large_segment_size: int = LARGE_SEGMENT
    per_process_memory_fraction: float = 1.0
    newest_segment_first: bool = False
    ignored: tuple[str, ...] = ()

    def rounded(self, nbytes: int) -> int:
        """Return the size of the block for a request."""
        divisions = self.roundup_power2_divisions[min(max(nbytes.bit_length() - 21, 0), INTERVALS - 1)]
        if divisions < 2 or nbytes <= _ROUND * divisions:
            return max(-(-nbytes // _ROUND), 1) * _ROUND
        step = max((1 << (nbytes.bit_length() - 1)) // divisions, 1)
        return -(-nbytes // step) * step


class OutOfMemoryError(MemprofError):
    """A request that failed after every cached block was released: its bytes, and those in use and reserved then."""

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
        super().__init__(
            f"out of memory: {format_bytes(requested_bytes)} requested with {format_bytes(allocated_bytes)} allocated"
            f" and {format_bytes(reserved_bytes)} reserved"
        )
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes


class Block:
    """A block of a segment, and the handle of an allocation; `size` in bytes, with rounding."""

    __slots__ = ("address", "after", "before", "pool", "size", "state", "stream")

    def __init__(self, pool: _Pool, stream: int, address: int, size: int, state: int) -> None:
        self.pool = pool
        self.stream = stream
        self.address = address
        self.size = size
        self.state = state
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def is_live(self) -> bool:
        """Whether the block is allocated."""
        return self.state == _LIVE

    @property
    def is_mapped(self) -> bool:
        """Whether the block has memory; False only in expandable segments."""
        return self.state != _UNMAPPED

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

    __slots__ = ("free", "is_small", "lookups", "page", "unmapped")

    def __init__(self, page: int, *, is_small: bool) -> None:
        self.is_small = is_small
        self.page = page  # of expandable segments
        # Stream, size, address, block, and the number of lookups when it was freed: its age for garbage collection.
        self.free: list[tuple[int, int, int, Block, int]] = []
        self.unmapped: list[tuple[int, int, Block]] = []  # stream, address, block
        self.lookups = 0

    def add(self, block: Block) -> None:
        insort(self.free, (block.stream, block.size, block.address, block, self.lookups))

    def remove(self, block: Block) -> None:
        if block.state == _FREE:
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
        if state == _FREE:
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
        limit_bytes: what `torch.cuda.set_per_process_memory_fraction` or the setting of that name allows; None: not
            set.
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
        self._large = _Pool(self.settings.large_segment_size, is_small=False)
        self._small = _Pool(_SMALL_SEGMENT, is_small=True)
        self._segments: dict[int, Block] = {}
        self._collects = limit_bytes is not None and self.settings.garbage_collection_threshold > 0
        self._splits_to_round = self.settings.expandable_segments

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        """Return a block for a request of at least one byte.

        Raises:
            OutOfMemoryError: capacity or limit do not allow it.
        """
        settings = self.settings
        size = settings.rounded(nbytes)
        pool = self._small if size <= _SMALL else self._large
        block = self._cached(pool, stream, size) or self._reserve(pool, stream, size)
        if block is None:
            raise OutOfMemoryError(nbytes, self.allocated_bytes, self.reserved_bytes)
        rest = block.size - size
        if (
            rest >= _ROUND
            if pool.is_small or self._splits_to_round
            else rest > _SMALL and size < settings.max_split_size
        ):
            pool.add(block.split(size, _FREE))
        block.state = _LIVE
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Return a live block to its pool.

        Raises:
            ValueError: the block is not live.
        """
        if block.state != _LIVE:
            raise ValueError(f"the block at {block.address:#x} is not live")
        self.allocated_bytes -= block.size
        block.state = _FREE
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Release the segments, and the pages of expandable segments, that have no live block."""
        for _, _, _, block, _ in (*self._large.free, *self._small.free):
            if self.settings.expandable_segments:
                self._unmap(block)
            elif block.before is None and block.after is None:
                self._release(block)

    def segments(self) -> list[list[Block]]:
        """Return the blocks of each segment in order of addresses."""
        found = []
        for head in self._segments.values():
            blocks, block = [head], head.after
            while block is not None:
                blocks.append(block)
                block = block.after
            found.append(blocks)
        return found

    def _next_place(self, size: int) -> int:
        size = _round_up(size, _SMALL_SEGMENT)
        if self.settings.newest_segment_first:
            self._next_address -= size
            return self._next_address
        self._next_address += size
        return self._next_address - size

    def _cached(self, pool: _Pool, stream: int, size: int) -> Block | None:
        """Take the best free block out of its pool; None if there is none."""
        pool.lookups += 1
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
        elif found >= size + settings.max_non_split_rounding_size:
            return None
        return free.pop(i)[3]

    def _reserve(self, pool: _Pool, stream: int, size: int) -> Block | None:
        """Get a block from the driver, if need be after releasing cached blocks; None if memory is exhausted."""
        if self._collects:
            self._collect_garbage()
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
        elif size < OWN_SEGMENT:
            segment = self.settings.large_segment_size
        else:
            segment = _round_up(size, _SMALL_SEGMENT)
        if self.reserved_bytes + segment > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, stream, size)
        return self._new_segment(pool, stream, segment, _FREE) if self._charge(segment) else None

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

    def _collect_garbage(self) -> None:
        """Release whole large segments above the threshold, those first that are cached longer than the average."""
        wanted = self.reserved_bytes - int(self.settings.garbage_collection_threshold * self.limit_bytes)
        if wanted <= 0:
            return
        pool = self._large
        cached = [
            (pool.lookups - at, block)
            for _, _, _, block, at in pool.free
            if block.before is None and block.after is None and not self.settings.expandable_segments
        ]
        while cached and wanted > 0:
            mean = sum(age for age, _ in cached) / len(cached)
            for age, block in cached:
                if age >= mean:
                    wanted -= block.size
                    self._release(block)
            cached = [(age, block) for age, block in cached if age < mean]

    def _expand(self, pool: _Pool, stream: int, size: int) -> Block | None:
        """Map pages of an expandable segment up to a free block of the size, and take it; None if memory is exhausted.

        Pages that were mapped before a failure stay mapped.
        """
        block: Block | None = self._room(pool, stream, size)
        while block is not None and (block.state == _UNMAPPED or block.size < size):
            mapped = 0 if block.state == _UNMAPPED else block.size
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
            first = block.before if block.before is not None and block.before.state == _FREE else block
            room = 0
            at: Block | None = first
            while room < size and at is not None and at.state != _LIVE:
                room += at.size
                at = at.after
            if room >= size:
                return first
        device = _DEVICE_BYTES if self.capacity_bytes == sys.maxsize else self.capacity_bytes
        space = _round_up(device + device // 8, pool.page)
        return pool.insert(self._new_segment(pool, stream, space, _UNMAPPED))

    def _map(self, block: Block, size: int) -> Block | None:
        """Back the start of an unmapped range by whole pages; return the free block they are part of."""
        mapped = _round_up(size, block.pool.page)
        if not self._charge(mapped):
            return None
        block.pool.remove(block)
        rest = block.split(mapped, _UNMAPPED) if mapped < block.size else None
        block.state = _FREE
        if rest is not None:
            block.pool.insert(rest)
        return block.pool.insert(block)

    def _unmap(self, block: Block) -> None:
        """Release the whole pages inside a free block of an expandable segment."""
        pool, page = block.pool, block.pool.page
        base = max(address for address in self._segments if address <= block.address)
        start = base + _round_up(block.address - base, page)
        size = (block.address + block.size - base) // page * page - (start - base)
        if size <= 0:
            return
        pool.remove(block)
        middle = block.split(start - block.address, _UNMAPPED) if start > block.address else block
        middle.state = _UNMAPPED
        rest = middle.split(size, _FREE) if size < middle.size else None
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
    return block.size + (after.size if after is not None and after.state == _UNMAPPED else 0)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
