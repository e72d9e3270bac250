"""Ranks beside each other: their steps, the spread over them, and waiting in collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from lightning_memprof.account.parts import PHASE_PARTS, Part
from lightning_memprof.account.ranks.report import RankReport, RankTimes, Waiting
from lightning_memprof.report.document import Cell, Chart, Item, Section, Table, Words, phrase
from lightning_memprof.report.sections.labels import PEAKS, STATUS_STYLES
from lightning_memprof.report.sections.tables import Field, filled
from lightning_memprof.report.view import RankView, View

# More rows are slow to lay out: of more ranks the slowest are shown.
MAX_RANKS: Final = 512
TOP_RANKS: Final = 16
MAX_CAUSES: Final = 3
UNKNOWN: Final = RankTimes(rank=0, host=None, steps=0, step_ns=0, phases_ns={}, source="pulse")
NAMES: Final[Mapping[str, str]] = {
    "step_ns": "step",
    **{phase: PHASE_PARTS[phase].label for phase in ("data_wait", "callbacks", "optimizer")},
    "compute_ns": Part.COMPUTE.label,
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
    parts: list[Item] = [Chart("ranks"), *_by_rank(view)]
    if report is not None:
        parts += [*_spreads(report), *([] if report.waiting is None else _waiting(report.waiting))]
        if (late := report.straggler) is not None:
            each = "" if late.caused_ns is None else phrase(" {ns} per step", late.caused_ns)
            lead = phrase("{} ranks; the others wait{} for rank {index}.", len(view.ranks), each, late.rank)
        elif report.waiting is not None:
            waited_ns = report.waiting.waited_ns
            lead = phrase("{} ranks; a rank waits {ns} per recorded step.", len(view.ranks), waited_ns)
    return Section("ranks", "Ranks", lead, parts)


def _by_rank(view: View) -> Iterator[Table]:
    times = {found.rank: found for found in view.across.ranks} if view.across is not None else {}
    ranks = [(rank, times.get(rank.rank, UNKNOWN)) for rank in view.ranks]
    notes: list[Words] = []
    if len(ranks) > TOP_RANKS:
        ranks = sorted(ranks, key=lambda row: -_step_ns(*row))
        notes = ["the slowest ranks first"]
    return filled(
        Table("rank-table", "By rank", notes=notes, top=TOP_RANKS),
        ranks,
        Field("rank", "index", lambda row: row[0].rank),
        Field("host", "code", lambda row: row[0].host_name, priority=5),
        Field("status", "text", lambda row: _status(row[0])),
        Field("steps", "count", lambda row: row[0].steps),
        Field("mean step", "ns", lambda row: _step_ns(*row) or None, bar=True),
        Field(Part.DATA_WAIT.label, "ns", lambda row: _data_wait_ns(*row), priority=1),
        Field(Part.COMPUTE.label, "ns", lambda row: row[1].compute_ns, "without waiting", priority=2),
        Field("waiting", "ns", lambda row: row[1].wait_ns, "for other ranks, per recorded step", priority=3),
        Field(PEAKS["rss"].label, "bytes", lambda row: row[0].host.peak_rss_bytes or row[1].rss_peak_bytes),
        Field(PEAKS["device"].label, "bytes", lambda row: _device_peak(*row), priority=4),
        most=MAX_RANKS,
    )


def _status(rank: RankView) -> Cell:
    words = rank.status if rank.exception is None else f"{rank.status}: {rank.exception}"
    return Cell(words, style=STATUS_STYLES.get(rank.status, "warn"))


def _data_wait_ns(rank: RankView, times: RankTimes) -> int | None:
    wait = times.phases_ns.get("data_wait")
    return rank.statistics.breakdown_ns["data_wait"] if wait is None and rank.statistics else wait


def _device_peak(rank: RankView, times: RankTimes) -> int | None:
    peak = rank.device.peak_allocated_bytes if rank.device else None
    return times.device_peak_bytes if peak is None else peak


def _step_ns(rank: RankView, times: RankTimes) -> int:
    return times.step_ns or (rank.statistics.mean_ns if rank.statistics else 0)


def _spreads(report: RankReport) -> Iterator[Table]:
    by_pulse = {found.source for found in report.ranks} == {"pulse"}
    notes = [] if by_pulse else ["times are those of the steps before the last window, or of its own steps"]
    return filled(
        Table("spreads", "Spread over ranks", notes=notes, is_sortable=False),
        [
            (name, spread, "bytes" if key.endswith("_bytes") else "ns")
            for key, name in NAMES.items()
            if (spread := report.spreads.get(key)) is not None
        ],
        Field("quantity", "text", lambda row: row[0]),
        Field("min", "ns", lambda row: Cell(row[1].lowest, row[2])),
        Field("min rank", "index", lambda row: row[1].lowest_rank),
        Field("median", "ns", lambda row: Cell(row[1].median, row[2])),
        Field("max", "ns", lambda row: Cell(row[1].highest, row[2])),
        Field("max rank", "index", lambda row: row[1].highest_rank),
        Field("spread", "ns", lambda row: Cell(row[1].highest - row[1].lowest, row[2]), priority=1),
    )


def _waiting(waiting: Waiting) -> Iterator[Table]:
    notes: list[Words] = [
        phrase("{share} of the waiting is for rank {index}", ns / waiting.waited_ns, rank)
        for rank, ns in list(waiting.caused_ns.items())[:MAX_CAUSES]
        if waiting.waited_ns
    ]
    if len(waiting.clock_offsets_ns) > 1 or waiting.clock_error_ns > 0:
        notes.append(phrase("the hosts' clocks agree within {ns}", waiting.clock_error_ns))
    return filled(
        Table("collectives", "Waiting in collectives", notes=notes),
        waiting.kinds,
        Field("collective", "code", lambda kind: kind.name.replace("_", " ")),
        Field("size", "bytes", lambda kind: kind.bytes),
        Field("group", "code", lambda kind: kind.group or None, priority=3),
        Field("count", "count", lambda kind: kind.count),
        Field("mean wait", "ns", lambda kind: kind.wait_ns),
        Field("last rank", "index", lambda kind: kind.last_rank, priority=1),
        Field("last in", "count", lambda kind: kind.last_count, "of the recorded collectives", priority=2),
        most=None,
    )
