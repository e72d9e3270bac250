"""Who holds memory that grows: the searches for holders, compared with a slope."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.ledger.growth import FILLING, MIN_BYTES, MIN_STEPS, SHORT_RUN_MIN_SHARE, Growth
from lightning_memprof.artifacts.series import HolderRow, PulseRow
from lightning_memprof.units import GIB

# Shares of a slope: what explains it, and its main holder. Freed pieces between the blocks of a leak are part of RSS.
HELD: Final = 0.5
MAIN: Final = 1 / 3
MIN_MAIN: Final = 0.3
FREE: Final = "free memory"
NOTHING: Final = "nothing"
OUTSIDE: Final = frozenset({"remainder", FREE})
ENDING: Final = frozenset({"mapped file", "first touch"})
# Classes that programs do not use themselves.
COMPILER: Final = re.compile(r"\b(?:FakeTensor|FakeTensorMode|ShapeEnv|SymNode|OutputGraph|CompiledFxGraph)\b")
# Between the rates of a leak before and after the objects were first counted.
RATES: Final = 2
# A buffer that needs more when it is full is a fault of its own.
BUFFER_BYTES: Final = 4 * GIB
BUFFER_FACTOR: Final = 16


def who_holds(rows: Sequence[HolderRow]) -> list[HolderRow]:
    """Return the result of the last search for holders, the largest first; empty where none found anything.

    What a holder added is at most the growth of the memory: its entries may share tensors.

    A later search has the growth of a longer time, and misses what the program has released since: where the C
    allocator keeps that, as after ``on_train_epoch_end`` has cleared a list, the search before counts. So it does where
    it found freed memory, and the later one nothing.
    """
    searches = [list(found) for _, found in itertools.groupby(rows, key=lambda row: row.step)]
    if len(searches) > 1:
        before, last = ({row.kind for row in found} for found in searches[-2:])
        is_released = last == {FREE} and any(row.place for row in searches[-2])
        if is_released or (last == {NOTHING} and before == {FREE}):
            searches.pop()
    found = (row for row in (searches[-1] if searches else ()) if row.kind != NOTHING)
    return [
        replace(row, added_bytes=row.grown_bytes) if (row.added_bytes or 0) > (row.grown_bytes or sys.maxsize) else row
        for row in found
    ]


class Holders(msgspec.Struct, frozen=True):
    """The searches for holders of a rank, the last one compared with a slope."""

    searches: Sequence[HolderRow]
    growth: Growth

    @property
    def rows(self) -> list[HolderRow]:
        """The result of the last search, as :func:`who_holds` returns it."""
        return who_holds(self.searches)

    @property
    def main(self) -> HolderRow | None:
        """The holder of at least a third of the slope without freed memory, the largest; a leak fragments the heap.

        Holders that one line assigns count together, as the states of a metric do.
        """
        rows = self.rows
        named = [row for row in rows if row.place and row.kind not in ENDING and not self._fills(row)]
        free = sum(row.added_bytes or 0 for row in rows if row.kind == FREE)
        grown = max((row.grown_bytes or 0 for row in rows), default=0)
        share = MAIN * max(1 - free / grown, MIN_MAIN) if grown else MAIN
        alike = ([other for other in named if row is other or (row.line and row.line == other.line)] for row in named)
        return next((found[0] for found in alike if self._explain(found, share)), None)

    @property
    def ends(self) -> bool:
        """Whether the growth ends without a change: a container fills up, or pages of old memory are touched."""
        rows = self.rows
        return self._explain(filter(self._fills, rows)) or self._explain(row for row in rows if row.kind in ENDING)

    @property
    def outside(self) -> HolderRow | None:
        """The part that no Python object explains, if it is at least half of the slope."""
        return next((row for row in self.rows if row.kind in OUTSIDE and self._explain([row])), None)

    @property
    def is_free(self) -> bool:
        """Whether the C allocator keeps what the program has freed."""
        return self.main is None and self.outside is not None and self.outside.kind == FREE

    def _fills(self, row: HolderRow) -> bool:
        """Return whether a container has a limit that is not far, or gains fewer entries than before another search."""
        if size_when_full(row) is not None:
            return True
        first = next((each for each in self.searches if each.place == row.place), row)
        before = _rate(first.added, first.since_step, first.step)
        after = _rate((row.count or 0) - (first.count or 0), first.step, row.step)
        return before is not None and after is not None and after < FILLING * before

    def _explain(self, rows: Iterable[HolderRow], share: float = HELD) -> bool:
        found = list(rows)
        steps = max(((row.step or 0) - (row.since_step or 0) for row in found), default=0)
        return sum(row.added_bytes or 0 for row in found) >= share * self.growth.per_step * steps > 0


def _rate(added: int | None, since: int | None, step: int | None) -> float | None:
    """Return the entries that a container gained per step, None for too few steps."""
    if added is None or since is None or step is None or step - since < MIN_STEPS:
        return None
    return added / (step - since)


def held_growth(rows: Sequence[HolderRow], pulse: Sequence[PulseRow]) -> Growth | None:
    """Return the growth of a container that has gained entries at one rate since the first step, None without one.

    For runs whose pulse has too few values for :func:`steady_growth`. A cache that fills gains fewer and fewer.
    """
    start = next((row["rss_bytes"] for row in pulse if row["rss_bytes"]), None)
    for row in who_holds(rows):
        steps, before = (row.step or 0) - (row.since_step or 0), (row.count or 0) - (row.added or 0)
        added = row.added_bytes or 0
        is_large = start is not None and added >= max(MIN_BYTES, SHORT_RUN_MIN_SHARE * start)
        if row.place and start and is_large and row.added and row.since_step and steps >= MIN_STEPS:
            rate, earlier = row.added / steps, before / row.since_step
            if earlier / RATES <= rate <= earlier * RATES:
                return Growth(per_step=added / steps, added=added, start=start, steps=steps)
    return None


def size_when_full(holder: HolderRow) -> int | None:
    """Return the bytes of a container with as many entries as it is limited to, None if that is not small.

    A buffer or a cache with a limit grows until it is full; no program keeps graphs or whole tensors on purpose.
    """
    needless = holder.keeps_graphs or holder.keeps_whole
    if not holder.bound or not holder.added or holder.added_bytes is None or needless:
        return None
    full = round(holder.added_bytes / holder.added * holder.bound)
    return full if full <= max(BUFFER_BYTES, BUFFER_FACTOR * holder.added_bytes) else None


def is_compiled(holder: HolderRow) -> bool:
    """Return whether a holder is an object of torch's compiler, which keeps a graph for each shape that it compiles."""
    return COMPILER.search(f"{holder.place} {holder.content}") is not None
