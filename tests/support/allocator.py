"""The blocks of the allocator model."""

from __future__ import annotations

from lightning_memprof.estimation.allocator import Block, CachingAllocator


def segments(allocator: CachingAllocator) -> list[list[Block]]:
    """The blocks of each segment in order of addresses."""
    found = []
    for head in allocator._segments.values():
        blocks, block = [head], head.after
        while block is not None:
            blocks.append(block)
            block = block.after
        found.append(blocks)
    return found
