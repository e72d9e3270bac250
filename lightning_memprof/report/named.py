"""Memory at the moments that the program named: snapshots and regions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lightning_memprof.artifacts.series import RegionRow
from lightning_memprof.read.run.model import Run

START, END = "start", "end"


class NamedMoment(msgspec.Struct, frozen=True):
    """One row: memory in bytes at a named point; ``point`` is ``snapshot``, or ``start`` or ``end`` of a region."""

    rank: int
    name: str
    point: str
    step: int | None
    global_step: int | None
    time_ns: int | None
    rss_bytes: int | None
    peak_rss_bytes: int | None


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


def named_moments(run: Run) -> tuple[NamedMoment, ...]:
    """Return the named moments of every rank in order of rank and time."""
    return tuple(
        NamedMoment(
            rank=rank.rank,
            name=row.name,
            point=row.point or "snapshot",
            step=row.step,
            global_step=row.global_step,
            time_ns=row.time_ns,
            rss_bytes=row.rss_bytes,
            peak_rss_bytes=row.peak_rss_bytes,
        )
        for rank in run.ranks
        for row in rank.read(RegionRow).rows
        if row.name is not None
    )


def summarize(moments: Sequence[NamedMoment]) -> list[NamedSummary]:
    """Return one summary for each rank and name, snapshots and regions separately, in order of first appearance."""
    groups: dict[tuple[int, str, bool], list[NamedMoment]] = {}
    for moment in moments:
        groups.setdefault((moment.rank, moment.name, moment.point in {START, END}), []).append(moment)
    return [_summary(group) for group in groups.values()]


def _summary(moments: Sequence[NamedMoment]) -> NamedSummary:
    # A region inside of one with its own name ends first.
    open_regions: list[NamedMoment] = []
    changes: list[int] = []
    for moment in moments:
        if moment.point == START:
            open_regions.append(moment)
        elif moment.point == END and open_regions:
            before = open_regions.pop().rss_bytes
            if before is not None and moment.rss_bytes is not None:
                changes.append(moment.rss_bytes - before)
    sizes = [moment.rss_bytes for moment in moments if moment.point not in {START, END}]
    return NamedSummary(
        rank=moments[0].rank,
        name=moments[0].name,
        count=sum(moment.point != END for moment in moments),
        rss_bytes=tuple(size for size in sizes if size is not None),
        changes_bytes=tuple(changes),
        unfinished=len(open_regions),
    )
