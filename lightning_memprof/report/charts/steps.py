"""Charts over the steps of a run: time by phase, throughput, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from bokeh.models import ColumnDataSource
from bokeh.models.annotations import BoxAnnotation
from bokeh.plotting import figure

from lightning_memprof.account.parts import PHASE_PARTS
from lightning_memprof.account.steps.statistics import Timing, device_timing, host_timing
from lightning_memprof.artifacts.series import PulseRow
from lightning_memprof.read.run.model import Rank
from lightning_memprof.report.charts.embed import Chart, made
from lightning_memprof.report.charts.style import (
    MARK,
    Renderer,
    bytes_axis,
    colour,
    from_zero,
    grouped,
    hover,
    label,
    legend,
    new_figure,
    stacked,
    whole_numbers,
)
from lightning_memprof.report.view import View
from lightning_memprof.units import format_bytes, format_count, format_ns

_HEIGHT: Final = 300
_LOW: Final = 220
# A bar needs two pixels; of more steps neighbours are drawn together.
_BARS: Final = 500
_WINDOWS: Final = 40
# Steps above this multiple of the 95th percentile, as a first step that compiles, are cut off with a note: they would
# flatten the others.
_TALL: Final = 3.0


class _Times:
    """Durations and phases of steps in ms, one row a step."""

    def __init__(self, rows: Sequence[tuple[int, int, Sequence[int | None]]]) -> None:
        self.steps = np.array([step for step, _, _ in rows], dtype=np.int64)
        self.total = np.array([duration for _, duration, _ in rows], dtype=float) / 1e6
        self.phases = np.array([[ns or 0 for ns in phases] for _, _, phases in rows], dtype=float) / 1e6
        self.known = [any(row[2][place] is not None for row in rows) for place in range(len(PHASE_PARTS))]


def steps_chart(view: View, lead: Rank) -> Chart | None:
    """Return the steps of the lead rank as stacked bars of their phases; None where no step was timed."""
    clock = view.lead.statistics.clock if view.lead.statistics else "host"
    rows = _timed(lead.pulse, device_timing if clock == "device" else host_timing)
    source = f"the pulse, on the {clock}'s clock"
    if not rows:
        rows = [
            (step.step, step.duration_ns, [step.breakdown_ns.get(phase) for phase in PHASE_PARTS])
            for window in view.lead.windows
            for step in window.steps
            if step.duration_ns is not None and step.breakdown_ns is not None
        ]
        source = "the recorded steps of the windows"
    if not rows:
        return None
    times = _Times(rows)
    groups = grouped(len(rows), _BARS)
    plot = new_figure(_HEIGHT, "step", "step time, ms")
    columns = _bars(times, groups)
    shown = [part for part, known in zip(PHASE_PARTS.values(), times.known, strict=True) if known]
    tips = [("step", "@name"), ("duration", "@total{0,0.00} ms")]
    if len(groups) < len(rows):
        tips.append(("max", "@slowest{0,0.00} ms"))
    items = stacked(plot, shown, columns, tips, "{0,0.00} ms", line_color=None)
    if len(groups) < len(rows):
        plot.step(columns["x"], columns["slowest"], mode="center", line_color=MARK, line_width=1)
    most = _cut_tall(plot, times)
    _windows(plot, lead)
    legend(plot, items)
    median = format_ns(float(np.median(times.total)) * 1e6)
    summary = f"Rank {lead.rank}, {format_count(len(rows), 'step')} of {source}; median of all {median}."
    if len(groups) < len(rows):
        summary += f" A bar is the mean of {len(groups[0])} consecutive steps, the red line their max."
    if lead.windows:
        summary += " Shaded: windows, which include the cost of recording."
    return made("steps", "Time of each step", summary + most, plot, height=_HEIGHT)


def _timed(
    pulse: Sequence[PulseRow], timing_of: Callable[[PulseRow], Timing | None]
) -> list[tuple[int, int, list[int | None]]]:
    return [
        (row.step, timing[0], list(timing[1].values()))
        for row in pulse
        if row.step is not None and (timing := timing_of(row)) is not None
    ]


def _bars(times: _Times, groups: Sequence[range]) -> dict[str, list[float] | list[str]]:
    firsts = [float(times.steps[group[0]]) for group in groups]
    lasts = [float(times.steps[group[-1]]) for group in groups]
    means = np.array([times.phases[group.start : group.stop].mean(axis=0) for group in groups])
    total = np.array([times.total[group.start : group.stop].mean() for group in groups])
    slowest = [float(times.total[group.start : group.stop].max()) for group in groups]
    columns: dict[str, list[float] | list[str]] = {
        "x": [(first + last) / 2 for first, last in zip(firsts, lasts, strict=True)],
        "width": [0.9 * (last - first + 1) for first, last in zip(firsts, lasts, strict=True)],
        "left": [first - 0.5 for first in firsts],
        "right": [last + 0.5 for last in lasts],
        "total": total.tolist(),
        "slowest": slowest,
        "top": [max(slowest)] * len(groups),
        "name": [
            f"{first:.0f}" if first == last else f"{first:.0f} to {last:.0f}"
            for first, last in zip(firsts, lasts, strict=True)
        ],
    }
    return columns | {part: means[:, place].tolist() for place, part in enumerate(PHASE_PARTS.values())}


def _cut_tall(plot: figure, times: _Times) -> str:
    usual = float(np.quantile(times.total, 0.95))
    top = float(times.total.max())
    cut = 0 < _TALL * usual < top
    from_zero(plot, 1.05 * (1.5 * usual if cut else max(top, 1e-6)))
    return f" Steps of up to {format_ns(top * 1e6)} exceed the axis: drag the chart down to see them." if cut else ""


def _windows(plot: figure, lead: Rank) -> None:
    whole_numbers(plot)
    for window in lead.windows[:_WINDOWS]:
        steps = (*window.warmup_steps, *(window.steps or window.planned_steps))
        if steps:
            box = BoxAnnotation(
                left=min(steps) - 0.5, right=max(steps) + 0.5, fill_color="#8b96a5", fill_alpha=0.18, line_color=None
            )
            box.level = "underlay"
            plot.add_layout(box)


def run_memory_chart(lead: Rank) -> Chart | None:
    """Return the memory of the lead rank at each step: RSS and device peak; None without."""
    series = {
        name: [(row["step"], row[column]) for row in lead.pulse if row["step"] is not None and row[column] is not None]
        for name, column in (("RSS", "rss_bytes"), ("device peak", "device_peak_bytes"))
    }
    series = {name: points for name, points in series.items() if points}
    if not series:
        return None
    plot = new_figure(_LOW, "step", "")
    bytes_axis(plot)
    drawn: list[tuple[str, list[Renderer]]] = []
    peaks = []
    for place, (name, points) in enumerate(series.items()):
        groups = grouped(len(points), 2 * _BARS)
        steps = [points[group[0]][0] for group in groups]
        most = [max(points[i][1] or 0 for i in group) for group in groups]
        data = ColumnDataSource({"x": steps, "y": most})
        shade = colour("", place)
        line = plot.line("x", "y", source=data, line_color=shade, line_width=2)
        peak = max(range(len(most)), key=most.__getitem__)
        dot = plot.scatter([steps[peak]], [most[peak]], size=8, color=MARK)
        label(plot, (steps[peak] or 0, most[peak]), format_bytes(most[peak]), right=2 * peak < len(most))
        hover(plot, [line], [("step", "@x"), (name, "@y{0.[00] b}")], "vline")
        drawn.append((name, [line, dot]))
        peaks.append(f"{name} {format_bytes(most[peak])}")
    top = max(size or 0 for points in series.values() for _, size in points)
    from_zero(plot, max(1, 1.2 * top))
    _windows(plot, lead)
    legend(plot, drawn)
    summary = f"Rank {lead.rank}, maximum (marked): {', '.join(peaks)}."
    return made("memory-run", "Memory over the run", summary, plot, height=_LOW)


def live_chart(live: Mapping[str, Sequence[int]]) -> Chart | None:
    """Return the bytes of a step by category, in the order of the allocator's requests; None without."""
    if not live:
        return None
    names = sorted(live, key=lambda name: -min(live[name]))
    count = len(live[names[0]])
    plot = new_figure(_HEIGHT, "allocations and frees of the step, in order", "")
    bytes_axis(plot)
    plot.xaxis.major_label_text_font_size = "0pt"
    places = [place + 0.5 for place in range(count)]
    totals = [sum(live[name][place] for name in names) for place in range(count)]
    columns = {
        "x": places,
        "width": [1.0] * count,
        "left": [place - 0.5 for place in places],
        "right": [place + 0.5 for place in places],
        "top": totals,
        **live,
    }
    legend(plot, stacked(plot, names, columns, [], "{0.[00] b}", line_color=None))
    from_zero(plot, max(1, 1.2 * max(totals)))
    summary = f"Peak of the step: {format_bytes(max(totals))}."
    return made("live", "Memory of tensors during a step", summary, plot, height=_HEIGHT)


def throughput_chart(view: View, lead: Rank) -> Chart | None:
    """Return the throughput of the lead rank over its steps; None where no step was timed."""
    rows = _timed(lead.pulse, host_timing)
    of = next((rate for rate in view.throughput if rate.rank == lead.rank), None)
    if len(rows) < 2:
        return None
    amount, unit = (of.samples, "samples") if of and of.samples else (1.0, "steps")
    if of and of.tokens:
        amount, unit = of.tokens, "tokens"
    groups = grouped(len(rows), _BARS)
    steps = [rows[group[0]][0] for group in groups]
    rates = [amount * len(group) / max(1e-9, sum(rows[i][1] for i in group) / 1e9) for group in groups]
    plot = new_figure(_LOW, "step", f"{unit} per second")
    data = ColumnDataSource({"x": steps, "y": rates})
    line = plot.line("x", "y", source=data, line_color=colour("forward"), line_width=2)
    hover(plot, [line], [("step", "@x"), (f"{unit} per second", "@y{0,0.0}")], "vline")
    from_zero(plot)
    _windows(plot, lead)
    mean = amount * len(rows) / (sum(duration for _, duration, _ in rows) / 1e9)
    summary = f"Rank {lead.rank}: {mean:,.1f} {unit} per second over all {len(rows)} steps, windows included."
    return made("throughput", "Throughput", summary, plot, height=_LOW)
