from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator import segments
from lightning_memprof.estimation.allocator import (
    FREE,
    LIVE,
    UNMAPPED,
    Block,
    CachingAllocator,
    OutOfMemoryError,
    rounded,
)
from lightning_memprof.estimation.allocator_settings import AllocatorSettings, parse_settings
from lightning_memprof.units import GIB, MIB

LARGE_SPLIT = parse_settings("max_split_size_mb:32")
EXPANDABLE = AllocatorSettings(expandable_segments=True)
SETTINGS = [
    AllocatorSettings(),
    LARGE_SPLIT,
    EXPANDABLE,
    parse_settings("expandable_segments:True,max_split_size_mb:20"),
]


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (GIB + 1, GIB + 2 * MIB),
    ],
)
def test_a_segment_has_the_size_of_its_class(nbytes, segment):
    allocator = CachingAllocator()
    allocator.malloc(nbytes)
    assert allocator.reserved_bytes == segment


@pytest.mark.parametrize(("nbytes", "size"), [(1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)])
def test_a_request_is_rounded(nbytes, size):
    assert rounded(nbytes) == size


def test_small_requests_share_a_segment_up_to_the_last_512_bytes():
    allocator = CachingAllocator()
    for _ in range(4096):
        allocator.malloc(1)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (2 * MIB, 2 * MIB)
    allocator.malloc(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_a_large_block_keeps_a_rest_of_up_to_a_mebibyte():
    allocator = CachingAllocator()
    assert allocator.malloc(11 * MIB).size == 12 * MIB
    assert allocator.malloc(11 * MIB - 512).size == 11 * MIB - 512


def test_the_smallest_block_that_fits_is_taken_and_among_equals_the_lowest():
    allocator = CachingAllocator()
    blocks = [allocator.malloc(size * MIB) for size in (40, 30, 30, 60)]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.malloc(25 * MIB).address == blocks[1].address
    assert allocator.malloc(29 * MIB).address == blocks[2].address
    assert allocator.malloc(31 * MIB).address == blocks[0].address


def test_up_to_torch_2_11_the_newest_of_equal_blocks_is_taken():
    allocator = CachingAllocator(AllocatorSettings(newest_segment_first=True))
    blocks = [allocator.malloc(30 * MIB) for _ in range(3)]
    for block in blocks:
        allocator.free(block)
    assert [allocator.malloc(30 * MIB).address for _ in blocks] == [block.address for block in reversed(blocks)]


def test_freed_neighbors_become_one_block():
    allocator = CachingAllocator()
    parts = [allocator.malloc(5 * MIB) for _ in range(4)]
    for part in (parts[0], parts[2], parts[1], parts[3]):
        allocator.free(part)
    assert [[block.size for block in segment] for segment in segments(allocator)] == [[20 * MIB]]
    assert allocator.malloc(20 * MIB).address == parts[0].address


def test_streams_share_no_blocks():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(4 * MIB, stream=1))
    allocator.malloc(4 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.malloc(4 * MIB, stream=1)
    assert allocator.reserved_bytes == 40 * MIB


def test_a_block_above_the_split_size_serves_only_large_requests_of_nearly_its_size():
    allocator = CachingAllocator(LARGE_SPLIT)
    allocator.free(allocator.malloc(64 * MIB))
    allocator.malloc(16 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    allocator.malloc(44 * MIB)
    assert allocator.reserved_bytes == 124 * MIB
    assert allocator.malloc(45 * MIB).size == 64 * MIB


def test_at_capacity_cached_blocks_are_released_and_the_request_is_repeated():
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    cached, kept = allocator.malloc(60 * MIB), allocator.malloc(30 * MIB)
    allocator.free(cached)
    allocator.malloc(70 * MIB)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes, allocator.retries) == (100 * MIB, 100 * MIB, 1)
    allocator.free(kept)


def test_a_block_above_the_split_size_is_released_before_the_whole_cache():
    allocator = CachingAllocator(LARGE_SPLIT, capacity_bytes=200 * MIB)
    for block in [allocator.malloc(size * MIB) for size in (90, 64, 30)]:
        allocator.free(block)
    allocator.malloc(80 * MIB - 512)
    assert (allocator.reserved_bytes, allocator.retries) == (184 * MIB, 0)
    allocator.malloc(100 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (190 * MIB, 1)


def test_a_request_that_never_fits_says_what_it_met_and_leaves_the_allocator_usable():
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.malloc(60 * MIB)
    allocator.free(allocator.malloc(20 * MIB))
    with pytest.raises(OutOfMemoryError, match=r"^41.0 MiB requested, 60.0 MiB allocated"):
        allocator.malloc(41 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.malloc(40 * MIB)
    assert allocator.reserved_bytes == 100 * MIB


def test_the_limit_of_the_process_holds_like_the_capacity():
    allocator = CachingAllocator(limit_bytes=30 * MIB)
    allocator.malloc(5 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(16 * MIB)


def test_a_block_is_freed_once():
    allocator = CachingAllocator()
    block = allocator.malloc(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="not live"):
        allocator.free(block)


@pytest.mark.parametrize(("nbytes", "page"), [(MIB, 2 * MIB), (MIB + 1, 20 * MIB)])
def test_an_expandable_segment_grows_by_pages(nbytes, page):
    allocator = CachingAllocator(EXPANDABLE)
    blocks = [allocator.malloc(nbytes)]
    assert allocator.reserved_bytes == page
    while allocator.reserved_bytes < 3 * page:
        blocks.append(allocator.malloc(nbytes))
    assert len(segments(allocator)) == 1
    assert [after.address - before.address for before, after in pairwise(blocks)] == [
        before.size for before in blocks[:-1]
    ]


def test_an_expandable_segment_maps_only_what_a_request_needs_beyond_its_free_end():
    allocator = CachingAllocator(EXPANDABLE)
    allocator.malloc(30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.malloc(30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_an_expandable_segment_gives_back_whole_pages_and_refills_the_gap():
    allocator = CachingAllocator(EXPANDABLE)
    first, hole, last = (allocator.malloc(size * MIB) for size in (30, 70, 20))
    allocator.free(hole)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 60 * MIB  # 120 less the pages from 40 to 100
    states = [(block.size // MIB, block.state) for block in segments(allocator)[0][:-1]]
    assert states == [(30, LIVE), (10, FREE), (60, UNMAPPED), (20, LIVE)]
    assert allocator.malloc(50 * MIB).address == first.address + 30 * MIB
    assert allocator.reserved_bytes == 100 * MIB
    allocator.free(last)


def test_an_expandable_segment_fails_at_the_capacity_of_its_pages():
    allocator = CachingAllocator(EXPANDABLE, capacity_bytes=70 * MIB)
    allocator.malloc(50 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(11 * MIB)
    allocator.malloc(10 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def check(allocator: CachingAllocator, live: list[tuple[int, Block]]) -> None:
    """Blocks tile the segments, without neighbors to coalesce, and have the sizes of their requests."""
    found = [block for segment in segments(allocator) for block in segment]
    assert {id(block) for block in found if block.state == LIVE} == {id(block) for _, block in live}
    assert allocator.reserved_bytes == sum(block.size for block in found if block.state != UNMAPPED)
    assert allocator.allocated_bytes == sum(block.size for block in found if block.state == LIVE)
    assert allocator.allocated_bytes <= allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes
    for segment in segments(allocator):
        for before, after in pairwise(segment):
            assert before.address + before.size == after.address
            assert before.state != after.state or before.state == LIVE
    for nbytes, block in live:
        size = rounded(nbytes)
        exact = size <= MIB or allocator.settings.expandable_segments
        kept = 0 if exact else MIB if size < allocator.settings.max_split_size else 20 * MIB
        assert size <= block.size <= size + kept


@pytest.mark.slow
@given(
    settings=st.sampled_from(SETTINGS),
    capacity=st.none() | st.integers(1, 400),
    events=st.lists(
        st.one_of(
            st.integers(1, 4096),
            st.integers(1, 3 * MIB),
            st.integers(1, 90 * MIB),
            st.integers(-20, -1),
            st.just(0),
        ),
        max_size=60,
    ),
    stream=st.integers(1, 3),
)
def test_blocks_tile_the_segments_whatever_is_asked(settings, capacity, events, stream):
    limit = capacity and capacity * MIB
    allocator = CachingAllocator(settings, capacity_bytes=limit, limit_bytes=limit)
    live: list[tuple[int, Block]] = []
    for i, event in enumerate(events):
        if event > 0:
            with suppress(OutOfMemoryError):
                live.append((event, allocator.malloc(event, i % stream)))
        elif event == 0:
            allocator.empty_cache()
        elif live:
            allocator.free(live.pop(event % len(live))[1])
        check(allocator, live)
    for _, block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)
    # Where an expandable segment could not grow, its range of addresses remains, without memory.
    assert not any(block.state != UNMAPPED for segment in segments(allocator) for block in segment)
