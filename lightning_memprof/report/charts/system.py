"""System counters over time, counters of one unit in one plot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
from bokeh.layouts import column
from bokeh.models import ColumnDataSource
from bokeh.plotting import figure
from numpy.typing import NDArray

from lightning_memprof.read.run.model import Run
from lightning_memprof.report.charts.embed import Chart, made
from lightning_memprof.report.charts.style import Renderer, bytes_axis, colour, from_zero, hover, legend, new_figure
from lightning_memprof.report.sections.labels import COUNTERS, counter
from lightning_memprof.units import format_count

_HEIGHT: Final = 190
_POINTS: Final = 1000
_LINES: Final = 8
_FEWEST: Final = 2
# Samples that are further apart than so many usual intervals have a gap between them.
_GAP: Final = 2.5

Array: TypeAlias = "NDArray[np.float64]"


def system_chart(run: Run) -> Chart | None:
    """Return the lead rank's system counters over time; None with fewer than two samples."""
    stretches = [(np.array(stretch.times_ns, float), stretch.figures) for stretch in run.lead.system.stretches]
    times = np.sort(np.concatenate([[], *(found[~np.isnan(found)] for found, _ in stretches)]))
    if len(times) < _FEWEST:
        return None
    series: dict[str, dict[str, list[Array]]] = defaultdict(lambda: defaultdict(list))
    for found, figures in stretches:
        for name, values in figures.items():
            points = np.array([(found - times[0]) / 1e9, np.array(values, float)])
            named = counter(name)
            series[named.axis][named.words].append(points[:, ~np.isnan(points).any(axis=0)])
    gap_s = _GAP * float(np.median(np.diff(times))) / 1e9
    plots: list[figure] = []
    for unit in (*(axis for _, _, axis in COUNTERS.values()), ""):
        joined = {name: np.concatenate(parts, axis=1) for name, parts in series[unit].items()}
        # Counters that stay 0, often swap, are omitted.
        drawn = {name: points for name, points in joined.items() if points[1].any()}
        if drawn:
            plots.append(_plot(unit, drawn, plots[0] if plots else None, gap_s))
    if not plots:
        return None
    for plot in plots[:-1]:
        plot.xaxis.axis_label = None
    names = sum(len(of_unit) for of_unit in series.values())
    summary = (
        f"Rank {run.lead.rank}: {format_count(names, 'counter')}, {format_count(len(times), 'sample')}, in seconds "
        "since the first. Samples are taken in windows, or throughout the run if configured. "
        "A gap means that nothing was sampled."
    )
    model = column(*plots, sizing_mode="stretch_width")
    return made("system", "System counters", summary, model, height=_HEIGHT * len(plots))


def _plot(unit: str, drawn: Mapping[str, Array], first: figure | None, gap_s: float) -> figure:
    options: dict[str, Any] = {} if first is None else {"x_range": first.x_range}
    plot = new_figure(_HEIGHT, "seconds", unit, **options)
    is_bytes = unit.startswith("bytes")
    if is_bytes:
        bytes_axis(plot)
    items: list[tuple[str, list[Renderer]]] = []
    for place, (name, points) in enumerate(list(drawn.items())[:_LINES]):
        x, y = _line(points, gap_s)
        data = ColumnDataSource({"x": x, "y": y})
        line = plot.line("x", "y", source=data, line_color=colour("", place), line_width=2)
        dots = plot.scatter("x", "y", source=data, size=4, color=colour("", place))
        form = "@y{0.[00] b}" if is_bytes else "@y{0,0.0}"
        hover(plot, [dots], [("at", "@x{0,0.00} s"), (name, form)], "mouse")
        items.append((name, [line, dots]))
    from_zero(plot)
    legend(plot, items)
    return plot


def _line(points: Array, gap_s: float) -> tuple[Array, Array]:
    """Return times and values of a line: of neighbours the maximum, with a NaN where it has a gap."""
    x, y = points[:, np.argsort(points[0], kind="stable")]
    each = -(-len(x) // _POINTS)
    firsts = np.arange(0, len(x), each)
    x, y = x[firsts], np.maximum.reduceat(y, firsts)
    gaps = np.flatnonzero(np.diff(x) > gap_s * each) + 1
    return np.insert(x, gaps, x[gaps]), np.insert(y, gaps, np.nan)
