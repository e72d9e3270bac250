"""Ranks side by side: mean step time by phase and peak memory of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from bokeh.layouts import column
from bokeh.models import ColumnDataSource
from bokeh.plotting import figure
from numpy.typing import NDArray

from lightning_memprof.account.parts import PHASE_PARTS, Part
from lightning_memprof.account.ranks.report import RankReport, RankTimes
from lightning_memprof.report.charts.embed import Chart, made
from lightning_memprof.report.charts.style import (
    MARK,
    Renderer,
    bytes_axis,
    colour,
    from_zero,
    hover,
    legend,
    new_figure,
    stacked,
    whole_numbers,
)
from lightning_memprof.units import format_ns

_ABOVE: Final = 260
_BELOW: Final = 200
_MEMORY: Final = {"rss_peak_bytes": "peak RSS", "device_peak_bytes": "device peak"}


def ranks_chart(report: RankReport | None) -> Chart | None:
    """Return the mean step of each rank as stacked bars, and its peak memory below; None without ranks to compare."""
    if report is None or len(report.ranks) < 2:
        return None
    ranks = report.ranks
    above = _times(ranks)
    slowest = max(ranks, key=lambda rank: rank.step_ns)
    fastest = min(ranks, key=lambda rank: rank.step_ns)
    least, most = format_ns(fastest.step_ns), format_ns(slowest.step_ns)
    span = f"{least} on rank {fastest.rank} to {most} on rank {slowest.rank}" if least != most else f"{most} on each"
    summary = f"Mean step time of {len(ranks)} ranks: {span}."
    if any(rank.wait_ns is not None for rank in ranks):
        summary += " Red: time that a rank waits for others in collectives."
    below = _memory(ranks, above)
    if below is None:
        return made("ranks", "Ranks", summary, above, height=_ABOVE)
    model = column(above, below, sizing_mode="stretch_width")
    return made("ranks", "Ranks", f"{summary} Below: peak memory of each rank.", model, height=_ABOVE + _BELOW)


def _times(ranks: tuple[RankTimes, ...]) -> figure:
    phases = {part: phase for phase, part in PHASE_PARTS.items()}
    shown = [part for part, phase in phases.items() if any(total.phases_ns.get(phase) for total in ranks)]
    rank, step = np.array([total.rank for total in ranks], dtype="i4"), _ms([total.step_ns for total in ranks])
    columns: dict[str, Any] = {part: _ms([total.phases_ns.get(phases[part]) or 0 for total in ranks]) for part in shown}
    rest = np.maximum(step - sum(columns.values()), 0)
    # Ranks of which only a whole step is known have their bar too.
    if (rest > 0.02 * step).any():
        shown = [part for part in shown if part != Part.UNTRACKED] + [Part.UNTRACKED]
        columns[Part.UNTRACKED] = columns.get(Part.UNTRACKED, 0) + rest
    plot = new_figure(_ABOVE, "rank", "mean step, ms")
    tips = [("rank", "@x"), ("step", "@step{0,0.00} ms")]
    wait = _ms([total.wait_ns for total in ranks])
    waits = any(total.wait_ns is not None for total in ranks)
    if waits:
        tips.append(("waiting", "@wait{0,0.00} ms"))
    same = np.ones(len(ranks))
    columns |= {"x": rank, "width": 0.85 * same, "left": rank - 0.5, "right": rank + 0.5, "top": step.max() * same}
    items = stacked(plot, shown, columns | {"step": step, "wait": wait}, tips, "{0,0.00} ms", line_color=None)
    if waits:
        marks = plot.scatter(rank, wait, marker="dash", size=14, line_color=MARK, line_width=3)
        items.append(("waiting", [marks]))
    from_zero(plot)
    whole_numbers(plot)
    legend(plot, items)
    return plot


def _ms(values: Sequence[int | None]) -> NDArray[np.float64]:
    """Return nanoseconds as milliseconds; unknown values are not drawn. Bokeh writes an array as a block of bytes."""
    return np.array([math.nan if ns is None else ns for ns in values], dtype=float) / 1e6


def _memory(ranks: tuple[RankTimes, ...], above: figure) -> figure | None:
    series = {
        label: [(rank.rank, size) for rank in ranks if (size := getattr(rank, key)) is not None]
        for key, label in _MEMORY.items()
    }
    if not any(series.values()):
        return None
    plot = new_figure(_BELOW, "rank", x_range=above.x_range)
    bytes_axis(plot)
    items: list[tuple[str, list[Renderer]]] = []
    for place, (label, points) in enumerate(series.items()):
        if not points:
            continue
        x, y = zip(*points, strict=True)
        data = ColumnDataSource({"x": np.array(x, dtype="i4"), "y": np.array(y, dtype=float)})
        dots = plot.scatter("x", "y", source=data, size=6, color=colour("", place))
        hover(plot, [dots], [("rank", "@x"), (label, "@y{0.[00] b}")], "vline")
        items.append((label, [dots]))
    from_zero(plot)
    whole_numbers(plot)
    legend(plot, items)
    return plot
