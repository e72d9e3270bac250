"""What the machine did while the run was looked at: each sampled figure over time, figures of one unit together."""

from __future__ import annotations

import math
from collections import defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from bokeh.layouts import column
from bokeh.models import ColumnDataSource

from lightning_memprof.analysis.steps.system import figures_of, stretches
from lightning_memprof.report.charts.embed import Chart, made
from lightning_memprof.report.charts.style import (
    Renderer,
    bytes_axis,
    colour,
    from_zero,
    grouped,
    hover,
    legend,
    new_figure,
)
from lightning_memprof.units import format_count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bokeh.plotting import figure

    from lightning_memprof.analysis.run.load import Run

__all__ = ["system_chart"]

_HEIGHT: Final = 190
_POINTS: Final = 1000
_LINES: Final = 8
_MAX_BYTES: Final = 32 * 1024 * 1024
# By the end of a figure's name, the longer ends before those that they end in: what its axis says, and the order.
_UNITS: Final = (
    ("_percent", "percent"),
    ("_bytes", "bytes"),
    ("_bytes_per_s", "bytes per second"),
    ("_per_s", "per second"),
    ("_celsius", "degrees C"),
    ("_watts", "watts"),
    ("_mhz", "MHz"),
)
_FEWEST: Final = 2


class _Point(NamedTuple):
    at: float
    value: float
    stretch: int


def system_chart(run: Run) -> Chart | None:
    """Return the lead rank's samples of its machine over time; None where there are not two."""
    rows = _in_stretches(run)
    if len(rows) < _FEWEST:
        return None
    start = rows[0][1]["time_ns"]
    series: dict[str, dict[str, list[_Point]]] = defaultdict(lambda: defaultdict(list))
    for stretch, row in rows:
        at = (row["time_ns"] - start) / 1e9
        for name, value in figures_of(row):
            series[_unit(name)][_short(name)].append(_Point(at, value, stretch))
    plots: list[figure] = []
    for unit in (*(words for _, words in _UNITS), ""):
        # What stays 0 all the time, as swap does, says nothing.
        drawn = {name: points for name, points in series[unit].items() if any(point.value for point in points)}
        if drawn:
            plots.append(_plot(unit, drawn, plots[0] if plots else None))
    if not plots:
        return None
    for plot in plots[:-1]:
        plot.xaxis.axis_label = None
    names = sum(len(of_unit) for of_unit in series.values())
    summary = (
        f"Rank {run.lead.rank}: {format_count(names, 'figure')} in {format_count(len(rows), 'sample')}, in seconds "
        "since the first; they were taken in windows, and all the time only where that was asked for. "
        "A line is broken where nothing was sampled."
    )
    model = column(*plots, sizing_mode="stretch_width")
    return made(("system", "system"), "The machine", summary, model, height=_HEIGHT * len(plots))


def _in_stretches(run: Run) -> list[tuple[int, dict[str, Any]]]:
    """Return the lead rank's samples by time, each with the number of the stretch that was sampled without a pause."""
    found = [
        sorted((row for row in rows if isinstance(row.get("time_ns"), int)), key=itemgetter("time_ns"))
        for rows in stretches(run.lead, run.directory, _MAX_BYTES)
    ]
    numbered: list[tuple[int, dict[str, Any]]] = []
    number, end = 0, 0
    for rows in sorted((rows for rows in found if rows), key=lambda rows: rows[0]["time_ns"]):
        # A window in a run that is sampled all the time is no stretch of its own.
        number += rows[0]["time_ns"] > end
        end = max(end, rows[-1]["time_ns"])
        numbered += [(number, row) for row in rows]
    return sorted(numbered, key=lambda entry: entry[1]["time_ns"])


def _plot(unit: str, drawn: Mapping[str, list[_Point]], first: figure | None) -> figure:
    options: dict[str, Any] = {} if first is None else {"x_range": first.x_range}
    plot = new_figure(_HEIGHT, "seconds", unit, **options)
    is_bytes = unit.startswith("bytes")
    if is_bytes:
        bytes_axis(plot)
    items: list[tuple[str, list[Renderer]]] = []
    for place, (name, points) in enumerate(list(drawn.items())[:_LINES]):
        x, y = _broken(points)
        data = ColumnDataSource({"x": np.array(x), "y": np.array(y)})
        line = plot.line("x", "y", source=data, line_color=colour("", place), line_width=2)
        dots = plot.scatter("x", "y", source=data, size=4, color=colour("", place))
        form = "@y{0.[00]ib}" if is_bytes else "@y{0,0.0}"
        hover(plot, [dots], [("at", "@x{0,0.00} s"), (name, form)], "mouse")
        items.append((name, [line, dots]))
    from_zero(plot)
    legend(plot, items)
    return plot


def _broken(points: list[_Point]) -> tuple[list[float], list[float]]:
    """Return what a line goes through: no number where it ends, because the next point is of another stretch."""
    x: list[float] = []
    y: list[float] = []
    before = points[0].stretch
    for group in grouped(len(points), _POINTS):
        first, last = points[group[0]], points[group[-1]]
        if first.stretch != before:
            x.append(first.at)
            y.append(math.nan)
        before = last.stretch
        x.append(first.at)
        y.append(max(points[i].value for i in group))
    return x, y


def _short(name: str) -> str:
    for end, _ in _UNITS:
        if name.endswith(end):
            return name.removesuffix(end).replace("_", " ")
    return name.replace("_", " ")


def _unit(name: str) -> str:
    return next((words for end, words in _UNITS if name.endswith(end)), "")
