"""Ranks beside each other: their steps, the spread over them, and waiting in collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from lightning_memprof.report.document import (
    Cell,
    Chart,
    Column,
    Part,
    Row,
    Section,
    Table,
    Words,
    code,
    count,
    duration,
    index,
    phrase,
    share,
    size,
    text,
)
from lightning_memprof.report.sections.labels import PEAKS, STATUS_STYLES, called, more

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.analysis.ranks.report import RankReport, RankTimes, Waiting
    from lightning_memprof.report.view import RankView, View

__all__ = ["ranks_section"]

# More rows are slow to lay out: of more ranks the slowest are shown.
MAX_RANKS: Final = 512
TOP_RANKS: Final = 16
MAX_CAUSES: Final = 3
NAMES: Final[Mapping[str, str]] = {
    "step_ns": "step",
    "data_wait": called("data_wait"),
    "callbacks": "callbacks",
    "optimizer": "optimizer",
    "compute_ns": "compute",
    "wait_ns": "waiting",
    "rss_peak_bytes": PEAKS["rss"].label,
    "device_peak_bytes": PEAKS["device"].label,
}


def ranks_section(view: View) -> Section | None:
    """Return the ranks beside each other; None where there is one."""
    if len(view.ranks) < 2:
        return None
    report = view.across
    lead: Words = f"{len(view.ranks)} ranks."
    parts: list[Part] = [Chart("ranks"), _by_rank(view)]
    if report is not None:
        parts += [*_spreads(report), *([] if report.waiting is None else _waiting(report.waiting))]
        if (late := report.straggler) is not None:
            lead = f"{len(view.ranks)} ranks; the others wait for rank {late.rank}."
            if late.caused_ns is not None:
                words = f"{len(view.ranks)} ranks; the others wait {{}} per step for rank {late.rank}."
                lead = phrase(words, duration(late.caused_ns))
        elif report.waiting is not None:
            words = f"{len(view.ranks)} ranks; a rank waits {{}} per recorded step."
            lead = phrase(words, duration(report.waiting.waited_ns))
    return Section("ranks", "Ranks", lead, parts)


def _by_rank(view: View) -> Table:
    times = {found.rank: found for found in view.across.ranks} if view.across is not None else {}
    ranks = list(view.ranks)
    is_many = len(ranks) > TOP_RANKS
    if is_many:
        ranks = sorted(ranks, key=lambda rank: -_step_ns(rank, times.get(rank.rank)))[:MAX_RANKS]
    slowest = max((_step_ns(rank, times.get(rank.rank)) for rank in ranks), default=0)
    left_out = len(view.ranks) - len(ranks)
    notes = ["the slowest ranks first"] * is_many + [more(left_out, "more ranks")] * bool(left_out)
    return Table(
        id="rank-table",
        title="By rank",
        columns=(
            Column("rank", "index"),
            Column("host", "code", priority=5),
            Column("status"),
            Column("steps", "count"),
            Column("mean step", "ns"),
            Column(called("data_wait"), "ns", priority=1),
            Column("compute", "ns", "without waiting", priority=2),
            Column("waiting", "ns", "for other ranks, per recorded step", priority=3),
            Column(PEAKS["rss"].label, "bytes"),
            Column(PEAKS["device"].label, "bytes", priority=4),
        ),
        rows=[_row(rank, times.get(rank.rank), slowest) for rank in ranks],
        notes=notes,
        top=TOP_RANKS,
    )


def _row(rank: RankView, times: RankTimes | None, slowest: int) -> Row:
    pulse = rank.statistics
    wait = times.phases_ns.get("data_wait") if times else None
    if wait is None and pulse is not None:
        wait = pulse.breakdown_ns["data_wait"]
    device = rank.device.peak_allocated_bytes if rank.device else None
    status = rank.status if rank.exception is None else f"{rank.status}: {rank.exception}"
    return (
        index(rank.rank),
        code(rank.host_name),
        Cell(status, style=STATUS_STYLES.get(rank.status, "warn")),
        count(rank.steps),
        duration(_step_ns(rank, times) or None, slowest),
        duration(wait),
        duration(times.compute_ns if times else None),
        duration(times.wait_ns if times else None),
        size(rank.host.peak_rss_bytes or (times.rss_peak_bytes if times else None)),
        size(device if device is not None or times is None else times.device_peak_bytes),
    )


def _step_ns(rank: RankView, times: RankTimes | None) -> int:
    if times is not None:
        return times.step_ns
    return rank.statistics.mean_ns if rank.statistics else 0


def _spreads(report: RankReport) -> Iterator[Table]:
    rows = []
    for key, name in NAMES.items():
        if (spread := report.spreads.get(key)) is not None:
            unit = "bytes" if key.endswith("_bytes") else "ns"
            rows.append(
                (
                    text(name),
                    Cell(spread.lowest, unit),
                    index(spread.lowest_rank),
                    Cell(spread.median, unit),
                    Cell(spread.highest, unit),
                    index(spread.highest_rank),
                    Cell(spread.highest - spread.lowest, unit),
                )
            )
    columns = (
        Column("quantity"),
        Column("min", "ns"),
        Column("min rank", "index"),
        Column("median", "ns"),
        Column("max", "ns"),
        Column("max rank", "index"),
        Column("spread", "ns", priority=1),
    )
    by_pulse = {found.source for found in report.ranks} == {"pulse"}
    notes = [] if by_pulse else ["times are those of the steps before the last window, or of its own steps"]
    if rows:
        yield Table(id="spreads", title="Spread over ranks", columns=columns, rows=rows, notes=notes, is_sortable=False)


def _waiting(waiting: Waiting) -> Iterator[Table]:
    notes: list[Words] = [
        phrase(f"{{}} of the waiting is for rank {rank}", share(ns / waiting.waited_ns))
        for rank, ns in list(waiting.caused_ns.items())[:MAX_CAUSES]
        if waiting.waited_ns
    ]
    if len(waiting.clock_offsets_ns) > 1 or waiting.clock_error_ns > 0:
        notes.append(phrase("the hosts' clocks agree within {}", duration(waiting.clock_error_ns)))
    columns = (
        Column("collective", "code"),
        Column("size", "bytes"),
        Column("group", "code", priority=3),
        Column("count", "count"),
        Column("mean wait", "ns"),
        Column("last rank", "index", priority=1),
        Column("last in", "count", "of the recorded collectives", priority=2),
    )
    rows = [
        (
            code(kind.name.replace("_", " ")),
            size(kind.bytes),
            code(kind.group or None),
            count(kind.count),
            duration(kind.wait_ns),
            index(kind.last_rank),
            count(kind.last_count),
        )
        for kind in waiting.kinds
    ]
    yield Table(id="collectives", title="Waiting in collectives", columns=columns, rows=rows, notes=notes)
