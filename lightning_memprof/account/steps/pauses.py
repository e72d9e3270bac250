"""GC pauses in a rank's recorded steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from lightning_memprof.artifacts.series import GarbageRow
from lightning_memprof.read.run.model import Rank


class Pauses(msgspec.Struct, frozen=True):
    """The collections in recorded steps: nanoseconds and freed objects.

    ``generations`` maps each generation to its ``(count, nanoseconds)``.
    """

    count: int
    total_ns: int
    max_ns: int
    collected: int
    uncollectable: int
    generations: Mapping[int, tuple[int, int]]


def pauses(rank: Rank) -> Pauses | None:
    """Return the pauses of a rank, None where none was recorded.

    Source: the series ``garbage`` of every window.
    """
    rows = rank.recorded(GarbageRow)
    timed = [(row.duration_ns, row) for row in rows if row.duration_ns is not None and row.duration_ns >= 0]
    if not timed:
        return None
    generations: dict[int, list[int]] = defaultdict(list)
    for ns, row in timed:
        generations[row.generation or 0].append(ns)
    return Pauses(
        count=len(timed),
        total_ns=sum(ns for ns, _ in timed),
        max_ns=max(ns for ns, _ in timed),
        collected=sum(row.collected or 0 for _, row in timed),
        uncollectable=sum(row.uncollectable or 0 for _, row in timed),
        generations={number: (len(ns), sum(ns)) for number, ns in sorted(generations.items())},
    )
