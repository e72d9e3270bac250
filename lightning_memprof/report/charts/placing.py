"""Where a block is drawn: a height of its own for its whole life, so that no two blocks overlap."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

__all__ = ["offsets"]

# Looking through every hole would be quadratic in the worst case; a block that fits in none of these is placed on top.
_HOLES: Final = 64


def offsets(born: Sequence[int], died: Sequence[int], size: Sequence[int]) -> list[int]:
    """Return the lower edge of each block, in bytes: the lowest place that is free from its birth to its death.

    A block that dies as another is born leaves it its place. The upper edge of all is at least the peak of the sum,
    and where blocks die in another order than they came it is more.
    """
    order = sorted(range(len(size)), key=lambda i: (born[i], -died[i]))
    ends = sorted(range(len(size)), key=died.__getitem__)
    placed = [0] * len(size)
    holes = _Holes()
    done = 0
    for i in order:
        # A block without a life holds no place; it would be freed before it is placed.
        while done < len(ends) and died[ends[done]] <= born[i]:
            gone = ends[done]
            done += 1
            if died[gone] > born[gone]:
                holes.free(placed[gone], size[gone])
        placed[i] = holes.take(size[i]) if died[i] > born[i] else holes.top
    return placed


class _Holes:
    """Free places between the blocks, in order."""

    def __init__(self) -> None:
        self._start: list[int] = []
        self._size: list[int] = []
        self.top = 0

    def take(self, size: int) -> int:
        for place in range(min(len(self._start), _HOLES)):
            if self._size[place] >= size:
                start = self._start[place]
                self._start[place] += size
                self._size[place] -= size
                if not self._size[place]:
                    del self._start[place], self._size[place]
                return start
        start = self.top
        self.top += size
        return start

    def free(self, start: int, size: int) -> None:
        place = bisect_left(self._start, start)
        if place < len(self._start) and self._start[place] == start + size:
            size += self._size[place]
            del self._start[place], self._size[place]
        if place and self._start[place - 1] + self._size[place - 1] == start:
            place -= 1
            start, size = self._start[place], size + self._size[place]
            del self._start[place], self._size[place]
        if start + size == self.top:
            self.top = start
            return
        self._start.insert(place, start)
        self._size.insert(place, size)
