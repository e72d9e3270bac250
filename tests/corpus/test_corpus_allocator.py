"""The allocator model against histories that torch recorded on GPUs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from allocator import segments
from corpus_files import recorded_file
from lightning_memprof.account.snapshot.replay import Replay, replay
from lightning_memprof.estimation import requests
from lightning_memprof.estimation.allocator import FREE, LIVE, Block, CachingAllocator
from lightning_memprof.estimation.requests import Requests
from lightning_memprof.read.snapshot.reader import ALLOCATED, Segment, read_snapshot
from lightning_memprof.units import MIB

pytestmark = pytest.mark.corpus

FROM_NOTHING = "snap_cs336_silmont/mem_snapshot"
RECORDED = [
    FROM_NOTHING,
    "snap_cs336_nothanmin/memory_snapshot_forward",
    "snap_cs336_wedson/medium_128_training",
    "snap_cs336_wedson/medium_512_inference",
]


def recorded(name: str) -> Replay:
    return replay(read_snapshot(recorded_file(f"snapshots/{name}.pickle.gz")))


def beginning(ring: Replay) -> tuple[CachingAllocator, dict[int, Block]]:
    """The allocator at the start of the history, and its live blocks by address.

    Segments get the device's addresses: that torch took the free block at the lowest address among those of one size.
    """
    new = [event.address for event in ring.snapshot.events if event.action == "segment_alloc"]
    places = iter(new)
    allocator = CachingAllocator(place=lambda _: next(places))
    lives = sorted((life.address, life.size) for life in ring.lives if life.born < 0)
    live: dict[int, Block] = {}
    for segment in ring.snapshot.segments:
        if segment.address not in new:
            blocks = restored(allocator, segment, lives)
            live |= {block.address: block for block in blocks if block.state == LIVE}
    return allocator, live


def restored(allocator: CachingAllocator, segment: Segment, lives: list[tuple[int, int]]) -> list[Block]:
    """Add a segment with its live blocks."""
    end = segment.address + segment.size
    inside = [life for life in lives if segment.address <= life[0] < end]
    pool = allocator._small if segment.kind == "small" else allocator._large
    spans, at = [], segment.address
    for (address, size), following in zip(inside, [*(life[0] for life in inside), end][1:], strict=True):
        spans += [(at, address - at, FREE)] if address > at else []
        # Up to a mebibyte behind a large request is a part of its block.
        kept = size if pool.is_small or following - address - size > MIB else following - address
        spans.append((address, kept, LIVE))
        at = address + kept
    spans += [(at, end - at, FREE)] if at < end else []
    blocks = [Block(pool, segment.stream, address, size, state) for address, size, state in spans]
    for before, after in pairwise(blocks):
        before.after, after.before = after, before
    for block in blocks:
        if block.state == LIVE:
            allocator.allocated_bytes += block.size
        else:
            pool.insert(block)
    allocator._segments[segment.address] = blocks[0]
    allocator.reserved_bytes += segment.size
    return blocks


@pytest.mark.parametrize("name", RECORDED)
def test_every_recorded_allocation_is_placed_where_the_device_placed_it(name):
    ring = recorded(name)
    allocator, live = beginning(ring)
    for event in ring.snapshot.events:
        if event.action == "alloc":
            block = live[event.address] = allocator.malloc(event.size, event.stream)
            assert block.address == event.address
        elif event.action == "free_completed":
            allocator.free(live.pop(event.address))
    found = {(block.address, block.size, block.state == LIVE) for blocks in segments(allocator) for block in blocks}
    assert found == {
        (block.address, block.size, block.state == ALLOCATED)
        for segment in ring.snapshot.segments
        for block in segment.blocks
    }


def test_a_history_from_the_first_request_on_reserves_what_the_device_reserved():
    ring = recorded(FROM_NOTHING)
    made, numbers = Requests(), {}
    for event in ring.snapshot.events:
        if event.action == "alloc":
            numbers[event.address] = made.allocate(event.size, event.stream)
        elif event.action == "free_completed":
            made.free(numbers.pop(event.address))
    assert requests.replay(made, allocator := CachingAllocator())
    assert allocator.peak_reserved_bytes == ring.snapshot.reserved_bytes == 3606 * MIB
