"""Memory at the moments that the program named: snapshots and regions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lightning_memprof.artifacts.series import RegionRow
from lightning_memprof.read.run.model import Run

START, END = "start", "end"

Moment = tuple[int, RegionRow]
"""A rank and one of its rows."""


class NamedSummary(msgspec.Struct, frozen=True):
    """All moments of one name on one rank.

    ``rss_bytes`` are those of its snapshots in order; ``changes_bytes`` those from the start to the end of each time
    that its region ran, in the order of their ends. ``unfinished`` counts the regions that did not end.
    """

    rank: int
    name: str
    count: int
    rss_bytes: tuple[int, ...]
    changes_bytes: tuple[int, ...]
    unfinished: int


def named_moments(run: Run) -> tuple[Moment, ...]:
    """Return the named moments of every rank in order of rank and time."""
    return tuple((rank.rank, row) for rank in run.ranks for row in rank.read(RegionRow).rows if row.name is not None)


def summarize(moments: Sequence[Moment]) -> list[NamedSummary]:
    """Return one summary for each rank and name, snapshots and regions separately, in order of first appearance."""
    groups: dict[tuple[int, str, bool], list[RegionRow]] = {}
    for rank, row in moments:
        groups.setdefault((rank, row.name or "", row.point in {START, END}), []).append(row)
    return [_summary(rank, name, rows) for (rank, name, _), rows in groups.items()]


def _summary(rank: int, name: str, rows: Sequence[RegionRow]) -> NamedSummary:
    # A region inside of one with its own name ends first.
    open_regions: list[RegionRow] = []
    changes: list[int] = []
    for row in rows:
        if row.point == START:
            open_regions.append(row)
        elif row.point == END and open_regions:
            before = open_regions.pop().rss_bytes
            if before is not None and row.rss_bytes is not None:
                changes.append(row.rss_bytes - before)
    sizes = [row.rss_bytes for row in rows if row.point not in {START, END}]
    return NamedSummary(
        rank=rank,
        name=name,
        count=sum(row.point != END for row in rows),
        rss_bytes=tuple(size for size in sizes if size is not None),
        changes_bytes=tuple(changes),
        unfinished=len(open_regions),
    )
