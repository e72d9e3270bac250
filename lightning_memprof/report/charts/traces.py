"""Device activity in traces: a bar per trace with idle time by cause, and one trace over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np
from bokeh.models import ColumnDataSource, FactorRange, Range1d
from bokeh.models.annotations import BoxAnnotation, Label
from bokeh.plotting import figure

from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.device import STATES, DeviceTimeline
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.report.charts.embed import Chart, made
from lightning_memprof.report.charts.style import colour, hover, legend, new_figure, stacked, time_unit
from lightning_memprof.report.printers.values import clean
from lightning_memprof.report.sections.labels import called, device_parts
from lightning_memprof.units import format_ns

_MOST: Final = 32
_ROW: Final = 26
_HEIGHT: Final = 260
_STEPS: Final = 60
_LONGEST_NAME: Final = 28


def shares_chart(traces: Sequence[TraceReport]) -> Chart | None:
    """Return the shares of each trace's GPU window by activity; None where no trace has a device."""
    shown = [trace for trace in traces if trace.gpu_window is not None and trace.gpu_window.window_ns > 0][:_MOST]
    if not shown:
        return None
    parts = [_parts(trace) for trace in shown]
    names = [name for name in dict.fromkeys(chain(*parts)) if any(part.get(name) for part in parts)]
    rows = _names(shown)
    height = 110 + _ROW * len(shown)
    plot = new_figure(
        height,
        "percent of the time between the first and the last device event",
        y_range=FactorRange(factors=rows[::-1]),
    )
    data = ColumnDataSource(
        {
            "row": rows,
            "left": [0.0] * len(rows),
            **{name: [100 * part.get(name, 0) / sum(part.values()) for part in parts] for name in names},
            **{f"{name} ns": [format_ns(part.get(name, 0)) for part in parts] for name in names},
        }
    )
    colours = [colour(name) for name in names]
    bars = plot.hbar_stack(names, y="row", height=0.8, source=data, color=colours, line_color=None)
    for name, bar in zip(names, bars, strict=True):
        tips = [(called(name), f"@{{{name}}}{{0.0}}%"), ("time", f"@{{{name} ns}}")]
        hover(plot, [bar], tips, "mouse")
    plot.x_range = Range1d(start=0, end=100)
    plot.ygrid.visible = False
    legend(plot, [(called(name), [bar]) for name, bar in zip(names, bars, strict=True)])
    first = shown[0].gpu_window
    busy = 0 if first is None else 100 * first.busy_ns / first.window_ns
    causes = ", ".join(f"{cause.cause.label} {format_ns(cause.total_ns)}" for cause in shown[0].idle[:3])
    summary = f"The device of {rows[0]} is busy {busy:.1f}% of its window" + (f"; idle by {causes}." if causes else ".")
    return made("devices", "Device activity", summary, plot, height=height)


def _parts(trace: TraceReport) -> dict[str, int]:
    """Return the parts of a trace's window, with its idle time by cause."""
    if trace.gpu_window is None:
        return {}
    parts = device_parts(trace.gpu_window)
    idle_ns = parts.pop("idle")
    for cause in trace.idle:
        parts[cause.cause] = parts.get(cause.cause, 0) + cause.total_ns
        idle_ns -= cause.total_ns
    return parts | ({"idle": idle_ns} if idle_ns > 0 else {})


def _names(traces: Sequence[TraceReport]) -> list[str]:
    names: list[str] = []
    for trace in traces:
        name = f"rank {trace.rank}" if trace.rank is not None else clean(trace.file.name)
        if len(name) > _LONGEST_NAME:
            name = f"{name[: _LONGEST_NAME - 1]}…"
        # Rows with the same name would overlap.
        names.append(name if name not in names else f"{name} ({len(names) + 1})")
    return names


def timeline_chart(timeline: DeviceTimeline, chart_id: str, where: str) -> Chart:
    """Return the activity of a trace's devices over time, as shares of short intervals."""
    count = len(timeline.shares["idle"])
    unit, scale = time_unit(count * timeline.stretch_ns)
    width = timeline.stretch_ns / scale
    left = np.arange(count) * width
    names = [name for name in STATES if any(share > 0 for share in timeline.shares[name])]
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
