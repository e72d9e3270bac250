"""Device activity of a trace over time."""

from __future__ import annotations

from typing import Final

import numpy as np
from bokeh.models import Range1d
from bokeh.models.annotations import BoxAnnotation, Label
from bokeh.plotting import figure

from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.table import DeviceTimeline
from lightning_memprof.report.charts.embed import Chart, made
from lightning_memprof.report.charts.style import legend, new_figure, stacked, time_unit
from lightning_memprof.units import format_ns

_HEIGHT: Final = 260
_STEPS: Final = 60


def timeline_chart(timeline: DeviceTimeline, chart_id: str, where: str) -> Chart:
    """Return the activity of a trace's devices over time, as shares of short intervals."""
    count = len(timeline.shares["idle"])
    unit, scale = time_unit(count * timeline.stretch_ns)
    width = timeline.stretch_ns / scale
    left = np.arange(count) * width
    names = [name for name in timeline.shares if any(share > 0 for share in timeline.shares[name])]
    same = np.ones(count)
    columns = {"x": left + width / 2, "width": width * same, "left": left, "right": left + width, "top": 100 * same}
    columns |= {name: 100 * np.array(timeline.shares[name]) for name in names}
    plot = new_figure(_HEIGHT, unit, "percent")
    tips = [("from", f"@left{{0,0.00}} {unit}"), ("to", f"@right{{0,0.00}} {unit}")]
    items = stacked(plot, names, columns, tips, "{0.0}%", line_width=0.7)
    plot.x_range = Range1d(start=0, end=count * width)
    plot.y_range = Range1d(start=0, end=112)
    _steps(plot, timeline, width)
    legend(plot, items)
    busy = 100 * (1 - sum(sum(timeline.shares[name]) for name in ("idle", Part.IDLE_DATA)) / count)
    summary = (
        f"{where}: {format_ns(count * timeline.stretch_ns)} in {count} intervals of {format_ns(timeline.stretch_ns)}, "
        f"{busy:.1f}% busy. Steps are those of the host."
    )
    return made(chart_id, f"Device activity over time, {where}", summary, plot, height=_HEIGHT)


def _steps(plot: figure, timeline: DeviceTimeline, width: float) -> None:
    for place, (number, start, end) in enumerate(timeline.steps[:_STEPS]):
        box = BoxAnnotation(left=start * width, right=end * width, bottom=100, top=112, line_color=None)
        box.update(fill_color="#8b96a5", fill_alpha=0.45 if place % 2 else 0.25)
        plot.add_layout(box)
        if len(timeline.steps) <= _STEPS // 3:
            label = Label(x=(start + end) / 2 * width, y=102, text=str(number), text_font_size="11px", tags=["text"])
            label.text_align = "center"
            plot.add_layout(label)
