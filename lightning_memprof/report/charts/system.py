"""What the machine did while the run was looked at: each sampled figure over time, figures of one unit together."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from bokeh.layouts import column
from bokeh.models import ColumnDataSource

from lightning_memprof.analysis.system import figures_of, samples
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

    from lightning_memprof.analysis.run import Run

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


def system_chart(run: Run) -> Chart | None:
    """Return the lead rank's samples of its machine over time; None where there are not two."""
    rows = sorted(
        (row for row in samples(run.lead, run.directory, _MAX_BYTES) if isinstance(row.get("time_ns"), int)),
        key=lambda row: row["time_ns"],
    )
    if len(rows) < _FEWEST:
        return None
    start = rows[0]["time_ns"]
    series: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        at = (row["time_ns"] - start) / 1e9
        for name, value in figures_of(row):
            series[_unit(name)][_short(name)].append((at, value))
    plots: list[figure] = []
    for unit in (*(words for _, words in _UNITS), ""):
        # What stays 0 all the time, as swap does, says nothing.
        drawn = {name: points for name, points in series[unit].items() if any(value for _, value in points)}
        if drawn:
            plots.append(_plot(unit, drawn, plots[0] if plots else None))
    if not plots:
        return None
    for plot in plots[:-1]:
        plot.xaxis.axis_label = None
    names = sum(len(of_unit) for of_unit in series.values())
    summary = (
        f"Rank {run.lead.rank}: {format_count(names, 'figure')} in {format_count(len(rows), 'sample')}, in seconds "
        "since the first; they were taken in windows, and all the time only where that was asked for."
    )
    model = column(*plots, sizing_mode="stretch_width")
    return made(("system", "system"), "The machine", summary, model, height=_HEIGHT * len(plots))


def _plot(unit: str, drawn: Mapping[str, list[tuple[float, float]]], first: figure | None) -> figure:
    options: dict[str, Any] = {} if first is None else {"x_range": first.x_range}
    plot = new_figure(_HEIGHT, "seconds", unit, **options)
    is_bytes = unit.startswith("bytes")
    if is_bytes:
        bytes_axis(plot)
    items: list[tuple[str, list[Renderer]]] = []
    for place, (name, points) in enumerate(list(drawn.items())[:_LINES]):
        groups = grouped(len(points), _POINTS)
        data = ColumnDataSource(
            {
                "x": [points[group[0]][0] for group in groups],
                "y": [max(points[i][1] for i in group) for group in groups],
            }
        )
        line = plot.line("x", "y", source=data, line_color=colour("", place), line_width=2)
        dots = plot.scatter("x", "y", source=data, size=4, color=colour("", place))
        form = "@y{0.[00]ib}" if is_bytes else "@y{0,0.0}"
        hover(plot, [dots], [("at", "@x{0,0.00} s"), (name, form)], "mouse")
        items.append((name, [line, dots]))
    from_zero(plot)
    legend(plot, items)
    return plot


def _short(name: str) -> str:
    for end, _ in _UNITS:
        if name.endswith(end):
            return name.removesuffix(end).replace("_", " ")
    return name.replace("_", " ")


def _unit(name: str) -> str:
    return next((words for end, words in _UNITS if name.endswith(end)), "")
