"""System counters over time, counters of one unit in one plot."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
from bokeh.layouts import column
from bokeh.models import ColumnDataSource
from bokeh.plotting import figure

from lightning_memprof.read.run.model import Run
from lightning_memprof.read.run.samples import SystemStretch
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
from lightning_memprof.report.sections.labels import COUNTERS, counter
from lightning_memprof.units import format_count

_HEIGHT: Final = 190
_POINTS: Final = 1000
_LINES: Final = 8
# Half a day of a sample each half second.
_MOST_SAMPLES: Final = 80_000
_FEWEST: Final = 2


class _Point(NamedTuple):
    at: float
    value: float
    stretch: int


class _Sample(NamedTuple):
    """A sample of a stretch; ``number`` counts stretches with a gap between them."""

    time_ns: int
    number: int
    stretch: SystemStretch
    at: int


def system_chart(run: Run) -> Chart | None:
    """Return the lead rank's system counters over time; None with fewer than two samples."""
    rows = _in_stretches(run)
    if len(rows) < _FEWEST:
        return None
    start = rows[0].time_ns
    series: dict[str, dict[str, list[_Point]]] = defaultdict(lambda: defaultdict(list))
    for sample in rows:
        at = (sample.time_ns - start) / 1e9
        for name, values in sample.stretch.figures.items():
            if not math.isnan(value := values[sample.at]):
                found = counter(name)
                series[found.axis][found.words].append(_Point(at, value, sample.number))
    plots: list[figure] = []
    for unit in (*(axis for _, _, axis in COUNTERS.values()), ""):
        # Counters that stay 0, often swap, are omitted.
        drawn = {name: points for name, points in series[unit].items() if any(point.value for point in points)}
        if drawn:
            plots.append(_plot(unit, drawn, plots[0] if plots else None))
    if not plots:
        return None
    for plot in plots[:-1]:
        plot.xaxis.axis_label = None
    names = sum(len(of_unit) for of_unit in series.values())
    summary = (
        f"Rank {run.lead.rank}: {format_count(names, 'counter')}, {format_count(len(rows), 'sample')}, in seconds "
        "since the first. Samples are taken in windows, or throughout the run if configured. "
        "A gap means that nothing was sampled."
    )
    model = column(*plots, sizing_mode="stretch_width")
    return made("system", "System counters", summary, model, height=_HEIGHT * len(plots))


def _in_stretches(run: Run) -> list[_Sample]:
    """Return the lead rank's samples by time, each with the number of its stretch."""
    found = [
        (stretch, sorted((time_ns, at) for at, time_ns in enumerate(stretch.times_ns) if time_ns is not None))
        for stretch in run.lead.system.stretches
    ]
    numbered: list[_Sample] = []
    number, end = 0, 0
    for stretch, rows in sorted((entry for entry in found if entry[1]), key=lambda entry: entry[1][0][0]):
        # In a run that is sampled throughout, a window does not start a new stretch.
        number += rows[0][0] > end
        end = max(end, rows[-1][0])
        numbered += [_Sample(time_ns, number, stretch, at) for time_ns, at in rows[-_MOST_SAMPLES:]]
    return sorted(numbered, key=attrgetter("time_ns"))


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
        form = "@y{0.[00] b}" if is_bytes else "@y{0,0.0}"
        hover(plot, [dots], [("at", "@x{0,0.00} s"), (name, form)], "mouse")
        items.append((name, [line, dots]))
    from_zero(plot)
    legend(plot, items)
    return plot


def _broken(points: list[_Point]) -> tuple[list[float], list[float]]:
    """Return the points of a line, with a NaN between stretches so that the line has a gap."""
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
