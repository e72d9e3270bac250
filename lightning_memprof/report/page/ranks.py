"""Ranks beside each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from lightning_memprof.report.labels import PEAKS, called
from lightning_memprof.report.page.cells import NONE, count_cell, index_cell, name_of, size_cell, time_cell
from lightning_memprof.report.page.model import Cell, ChartPlace, Head, Part, Section, Table
from lightning_memprof.report.ranks import NAMES
from lightning_memprof.units import format_bytes, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.analysis.ranks.report import RankReport, RankTimes, Waiting
    from lightning_memprof.report.view import RankView, View

__all__ = ["ranks_section"]

# More rows are slow to lay out: of more ranks the slowest are shown.
MAX_RANKS: Final = 512
STYLES: Final[Mapping[str, str]] = {"finished": "good", "exception": "bad"}


def ranks_section(view: View) -> Section | None:
    """Return the ranks beside each other; None where there is one."""
    if len(view.ranks) < 2:
        return None
    parts: list[Part] = [ChartPlace("ranks")]
    report = view.across
    lead = f"{len(view.ranks)} ranks."
    if report is not None:
        parts += [*_spreads(report), *([] if report.waiting is None else _waiting(report.waiting))]
        if (late := report.straggler) is not None:
            cost = f", for {format_ns(late.caused_ns)} of each step" if late.caused_ns is not None else ""
            lead = f"{len(view.ranks)} ranks; the others wait for rank {late.rank}{cost}."
        elif report.waiting is not None:
            lead = f"{len(view.ranks)} ranks; a rank waits {format_ns(report.waiting.waited_ns)} of a recorded step."
    return Section("ranks", "Ranks", lead, [*parts, _table(view)])


def _table(view: View) -> Table:
    times = {rank.rank: rank for rank in view.across.ranks} if view.across is not None else {}
    ranks = list(view.ranks)
    if len(ranks) > MAX_RANKS:
        ranks = sorted(ranks, key=lambda rank_view: -_step_ns(rank_view, times.get(rank_view.rank)))[:MAX_RANKS]
    slowest = max((_step_ns(rank, times.get(rank.rank)) for rank in ranks), default=0)
    heads = (
        Head("rank", "number"), Head("host", "code"), Head("status"), Head("steps", "number"),
        Head("a step", "number", "mean"), Head(called("data_wait"), "number"),
        Head("compute", "number", "without waiting"),
        Head("waiting", "number", "for other ranks, in a recorded step"), Head(PEAKS["rss"].label, "number"),
        Head(PEAKS["device"].label, "number"),
    )  # fmt: skip
    rows = [_row(rank, times.get(rank.rank), slowest) for rank in ranks]
    left_out = len(view.ranks) - len(ranks)
    notes = [f"the slowest {len(ranks)}; {left_out} more: --format json"] if left_out else []
    return Table("rank-table", "By rank", heads, rows, notes=notes)


def _row(rank: RankView, times: RankTimes | None, slowest: int) -> tuple[Cell, ...]:
    pulse = rank.statistics
    wait = times.phases_ns.get("data_wait") if times else None
    if wait is None and pulse is not None:
        wait = pulse.breakdown_ns["data_wait"]
    rss = rank.host.peak_rss_bytes or (times.rss_peak_bytes if times else None)
    device = rank.device.peak_allocated_bytes if rank.device else None
    status = rank.status if rank.exception is None else f"{rank.status}: {rank.exception}"
    return (
        index_cell(rank.rank),
        Cell(rank.host_name or NONE),
        Cell(status, style=STYLES.get(rank.status, "warn")),
        count_cell(rank.steps),
        time_cell(_step_ns(rank, times) or None, slowest),
        time_cell(wait),
        time_cell(times.compute_ns if times else None),
        time_cell(times.wait_ns if times else None),
        size_cell(rss),
        size_cell(device if device is not None or times is None else times.device_peak_bytes),
    )


def _step_ns(rank: RankView, times: RankTimes | None) -> int:
    if times is not None:
        return times.step_ns
    return rank.statistics.mean_ns if rank.statistics else 0


def _spreads(report: RankReport) -> Iterator[Part]:
    rows = []
    for key, name in NAMES.items():
        spread = report.spreads.get(key)
        if spread is None:
            continue
        form: Callable[[float], str] = format_bytes if key.endswith("_bytes") else format_ns
        rows.append(
            (
                Cell(name),
                Cell(f"{form(spread.lowest)} (rank {spread.lowest_rank})"),
                Cell(form(spread.median)),
                Cell(f"{form(spread.highest)} (rank {spread.highest_rank})"),
                Cell(form(spread.highest - spread.lowest)),
            )
        )
    heads = (
        Head(""), Head("least", "number"), Head("median", "number"), Head("most", "number"),
        Head("apart", "number"),
    )  # fmt: skip
    if rows:
        yield Table("spreads", "Over the ranks", heads, rows, is_sortable=False)


def _waiting(waiting: Waiting) -> Iterator[Part]:
    notes = [
        f"{percent(ns / waiting.waited_ns)} of the waiting is for rank {rank}"
        for rank, ns in list(waiting.caused_ns.items())[:3]
        if waiting.waited_ns
    ]
    if len(waiting.clock_offsets_ns) > 1 or waiting.clock_error_ns > 0:
        notes.append(f"clocks of the hosts agree within {format_ns(waiting.clock_error_ns)}")
    heads = (
        Head("collective", "code"), Head("size", "number"), Head("group", "code"), Head("recorded", "number"),
        Head("waited, each", "number"), Head("last rank", "number"), Head("last in", "number", "of those recorded"),
    )  # fmt: skip
    rows = [
        (
            Cell(name_of(wait.name)), size_cell(wait.bytes), Cell(wait.group or NONE), count_cell(wait.count),
            time_cell(wait.wait_ns), index_cell(wait.last_rank), count_cell(wait.last_count),
        )
        for wait in waiting.kinds
    ]  # fmt: skip
    yield Table("collectives", "Waiting in collectives", heads, rows, notes=notes)
