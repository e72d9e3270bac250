"""Free ranges of the reserved memory at any moment of the recorded history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_memprof.analysis.snapshot.reader import INACTIVE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_memprof.analysis.snapshot.replay import Replay

__all__ = ["FreeRange", "free_ranges"]

_MADE: Final = frozenset({"segment_alloc", "segment_map"})
_UNMAPPED: Final = "segment_unmap"
_RETURNED: Final = frozenset({"segment_free", _UNMAPPED})
_CHANGES: Final = frozenset({"alloc", "free_requested", "free_completed", *_MADE, *_RETURNED})


class FreeRange(NamedTuple):
    """A free range, in bytes; ``is_segment`` where it spans a whole segment, which can be returned to the driver."""

    address: int
    size: int
    is_segment: bool


def free_ranges(ring: Replay, event: int) -> tuple[FreeRange, ...]:
    """Return each free range after an event, by address.

    Where nothing changes after the event these are the inactive blocks of the snapshot, otherwise the gaps between the
    blocks of that moment. The history has requested sizes, not block sizes, so a gap can be too large by the rounding.
    """
    if not any(later.action in _CHANGES for later in ring.snapshot.events[event + 1 :]):
        return tuple(
            FreeRange(block.address, block.size, len(segment.blocks) == 1)
            for segment in ring.snapshot.segments
            for block in segment.blocks
            if block.state == INACTIVE
        )
    live = sorted((life.address, life.address + life.size) for life in ring.lives if life.born <= event < life.died)
    return tuple(_gaps(_segments_at(ring, event), live))


def _segments_at(ring: Replay, event: int) -> list[tuple[int, int]]:
    """Return start and end of each reserved range after an event, by address."""
    alone = {segment.address for segment in ring.snapshot.segments if not segment.is_expandable}
    reserved = {segment.address: segment.address + segment.size for segment in ring.snapshot.segments}
    for later in reversed(ring.snapshot.events[event + 1 :]):
        start, end = later.address, later.address + later.size
        if later.action in _RETURNED:
            reserved[start] = max(end, reserved.get(start, end))
            alone |= set() if later.action == _UNMAPPED else {start}
        elif later.action in _MADE:
            # A part of an expandable segment is usually the end of a longer range.
            inside = start if start in reserved else next((at for at, to in reserved.items() if at < start < to), None)
            if inside is not None:
                until = reserved.pop(inside)
                reserved |= {inside: start} if inside < start else {}
                reserved |= {end: until} if end < until else {}
    joined: list[tuple[int, int]] = []
    for start, end in sorted(reserved.items()):
        if joined and joined[-1][1] == start and alone.isdisjoint((joined[-1][0], start)):
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined


def _gaps(segments: Iterable[tuple[int, int]], live: list[tuple[int, int]]) -> Iterable[FreeRange]:
    i = 0
    for start, end in segments:
        at = start
        while i < len(live) and live[i][1] <= start:
            i += 1
        while i < len(live) and live[i][0] < end:
            if live[i][0] > at:
                yield FreeRange(at, live[i][0] - at, is_segment=False)
            at = max(at, live[i][1])
            i += 1
        if end > at:
            yield FreeRange(at, end - at, is_segment=at == start)
