"""The ranks beside each other: imbalance, and who waits for whom."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.report.labels import PEAKS, called
from lightning_memprof.report.memory_tables import DIM, Line
from lightning_memprof.report.words import clean
from lightning_memprof.units import format_bytes, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_memprof.analysis.ranks.arrivals import CollectiveWait
    from lightning_memprof.analysis.ranks.report import RankReport, Spread, Waiting
    from lightning_memprof.report.view import View

__all__ = ["NAMES", "ranks_document", "ranks_lines"]

LABEL: Final = 14
CELL: Final = 22
MOST_KINDS: Final = 3
MOST_CAUSES: Final = 3
# What differs by less is noise on the page.
NOTABLE: Final = 1.05
NAMES: Final[Mapping[str, str]] = {
    "step_ns": "a step",
    "data_wait": called("data_wait"),
    "callbacks": "callbacks",
    "optimizer": "optimizer",
    "compute_ns": "compute",
    "wait_ns": "waiting",
    "rss_peak_bytes": PEAKS["rss"].label,
    "device_peak_bytes": PEAKS["device"].label,
}


def ranks_lines(view: View, width: int) -> list[Line]:
    """Return the lines that follow the table of ranks; none where the ranks left nothing to compare."""
    report = view.across
    if report is None:
        return []
    lines: list[Line] = [()]
    lines += _imbalance(report)
    if report.waiting is not None:
        lines += _waiting(report.waiting, width)
    return lines if len(lines) > 1 else []


def ranks_document(view: View) -> dict[str, Any] | None:
    """Return the comparison as JSON values, in ns and bytes; null for one rank.

    ``waiting`` is a recorded step's; ``ranks`` has what each rank's comparison rests on.
    """
    if view.across is None:
        return None
    document = dataclasses.asdict(view.across)
    document.pop("problems")
    return document


def _imbalance(report: RankReport) -> list[Line]:
    shown = [(name, report.spreads[key], key) for key, name in NAMES.items() if key in report.spreads]
    if not shown:
        return []
    head = f"{'over ranks':<{LABEL}}{'least':>{CELL}}{'median':>{CELL - 8}}{'most':>{CELL}}"
    lines: list[Line] = [((head, "bold"),)]
    for name, spread, key in shown:
        form = format_bytes if key.endswith("_bytes") else format_ns
        least = f"{form(spread.lowest)} (rank {spread.lowest_rank})"
        most = f"{form(spread.highest)} (rank {spread.highest_rank})"
        style = "" if _differs(spread) else DIM
        lines.append(((f"{name:<{LABEL}}{least:>{CELL}}{form(spread.median):>{CELL - 8}}{most:>{CELL}}", style),))
    source = {rank.source for rank in report.ranks}
    if source != {"pulse"}:
        lines.append((("times are of the steps before the last window, or of its own", DIM),))
    return lines


def _differs(spread: Spread) -> bool:
    return spread.highest > NOTABLE * max(spread.lowest, 1)


def _waiting(waiting: Waiting, width: int) -> list[Line]:
    causes = [
        f"{percent(ns / waiting.waited_ns)} for rank {rank}"
        for rank, ns in list(waiting.caused_ns.items())[:MOST_CAUSES]
        if waiting.waited_ns
    ]
    first = f"a rank waits {format_ns(waiting.waited_ns)} of a recorded step"
    lines: list[Line] = [(), ((f"{'collectives':<{LABEL}}", "bold"), (first, ""))]
    if causes:
        lines.append(((f"{'':<{LABEL}}{', '.join(causes)}", ""),))
    for wait in waiting.kinds[:MOST_KINDS]:
        kind, waits = _kind(wait)
        lines.append(((f"{'':<{LABEL}}{clean(kind)}"[:width], ""),))
        lines.append(((f"{'':<{LABEL + 2}}{waits}", DIM),))
    if len(waiting.clock_offsets_ns) > 1 or waiting.clock_error_ns > 0:
        lines.append(((f"{'':<{LABEL}}clocks of the hosts agree within {format_ns(waiting.clock_error_ns)}", DIM),))
    return lines


def _kind(wait: CollectiveWait) -> tuple[str, str]:
    size = f" of {format_bytes(wait.bytes)}" if wait.bytes is not None else ""
    group = f" in group {wait.group}" if wait.group else ""
    return (
        f"{wait.name}{size}{group}, {wait.count} recorded",
        f"{format_ns(wait.wait_ns)} each; rank {wait.last_rank} is the last in {wait.last_count}",
    )
