"""Charts over the steps of a run: time by phase, and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from bokeh.models import ColumnDataSource
from bokeh.models.annotations import BoxAnnotation
from bokeh.plotting import figure
from numpy.typing import NDArray

from lightning_memprof.account.parts import PHASE_PARTS
from lightning_memprof.account.steps.statistics import Clock, pulse_timing
from lightning_memprof.artifacts.series import PulseRow
from lightning_memprof.read.run.model import Rank
from lightning_memprof.report.charts.embed import Chart, made
from lightning_memprof.report.charts.style import (
    MARK,
    Renderer,
    bytes_axis,
    colour,
    firsts,
    from_zero,
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

Array: TypeAlias = "NDArray[Any]"
Timed: TypeAlias = "tuple[int, int, Sequence[int | None]]"
"""A step, its duration and its phases, in ns."""


def steps_chart(view: View, lead: Rank) -> Chart | None:
    """Return the steps of the lead rank as stacked bars of their phases; None where no step was timed."""
    clock: Clock = view.lead.statistics.clock if view.lead.statistics else "host"
    rows = _timed(lead.pulse, clock)
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
    total = np.array([duration for _, duration, _ in rows]) / 1e6
    starts = firsts(len(rows), _BARS)
    is_grouped = len(starts) < len(rows)
    plot = new_figure(_HEIGHT, "step", "step time, ms")
    columns = _bars(rows, total, starts)
    shown = [part for place, part in enumerate(PHASE_PARTS.values()) if any(row[2][place] is not None for row in rows)]
    tips = [("step", "@name"), ("duration", "@total{0,0.00} ms")]
    if is_grouped:
        tips.append(("max", "@slowest{0,0.00} ms"))
    items = stacked(plot, shown, columns, tips, "{0,0.00} ms", line_color=None)
    if is_grouped:
        plot.step(columns["x"], columns["slowest"], mode="center", line_color=MARK, line_width=1)
    most = _cut_tall(plot, total)
    _windows(plot, lead)
    legend(plot, items)
    median = format_ns(float(np.median(total)) * 1e6)
    summary = f"Rank {lead.rank}, {format_count(len(rows), 'step')} of {source}; median of all {median}."
    if is_grouped:
        summary += f" A bar is the mean of {starts[1]} consecutive steps, the red line their max."
    if lead.windows:
        summary += " Shaded: windows, which include the cost of recording."
    return made("steps", "Time of each step", summary + most, plot, height=_HEIGHT)


def _timed(pulse: Sequence[PulseRow], clock: Clock) -> list[Timed]:
    return [
        (row.step, timing[0], list(timing[1].values()))
        for row in pulse
        if row.step is not None and (timing := pulse_timing(row, clock)) is not None
    ]


def _bars(rows: Sequence[Timed], total: Array, starts: Array) -> dict[str, Any]:
    steps = np.array([step for step, _, _ in rows])
    phases = np.array([[ns or 0 for ns in found] for _, _, found in rows]) / 1e6
    counts = np.diff(starts, append=len(rows))
    first, last = steps[starts], steps[starts + counts - 1]
    slowest = np.maximum.reduceat(total, starts)
    means = np.add.reduceat(phases, starts) / counts[:, None]
    return {
        "x": (first + last) / 2,
        "width": 0.9 * (last - first + 1),
        "left": first - 0.5,
        "right": last + 0.5,
        "total": np.add.reduceat(total, starts) / counts,
        "slowest": slowest,
        "top": np.full(len(starts), slowest.max()),
        "name": [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(first, last, strict=True)],
        **{part: means[:, place] for place, part in enumerate(PHASE_PARTS.values())},
    }


def _cut_tall(plot: figure, total: Array) -> str:
    usual, top = float(np.quantile(total, 0.95)), float(total.max())
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
    named = (("RSS", "rss_bytes"), ("device peak", "device_peak_bytes"))
    known = {
        name: [(row["step"], row[column]) for row in lead.pulse if None not in (row["step"], row[column])]
        for name, column in named
    }
    series = {name: np.array(points, dtype=float).T for name, points in known.items() if points}
    if not series:
        return None
    plot = new_figure(_LOW, "step", "")
    bytes_axis(plot)
    drawn: list[tuple[str, list[Renderer]]] = []
    peaks = []
    for place, (name, (steps, sizes)) in enumerate(series.items()):
        starts = firsts(len(steps), 2 * _BARS)
        x, most = steps[starts], np.maximum.reduceat(sizes, starts)
        data = ColumnDataSource({"x": x, "y": most})
        line = plot.line("x", "y", source=data, line_color=colour("", place), line_width=2)
        peak = int(most.argmax())
        dot = plot.scatter(x[[peak]], most[[peak]], size=8, color=MARK)
        label(plot, (x[peak], most[peak]), format_bytes(most[peak]), right=2 * peak < len(most))
        hover(plot, [line], [("step", "@x"), (name, "@y{0.[00] b}")], "vline")
        drawn.append((name, [line, dot]))
        peaks.append(f"{name} {format_bytes(most[peak])}")
    from_zero(plot, max(1, 1.2 * max(sizes.max() for _, sizes in series.values())))
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
    left = np.arange(count)
    totals = np.sum(list(live.values()), axis=0, dtype=float)
    columns = {"x": left + 0.5, "width": np.ones(count), "left": left, "right": left + 1, "top": totals, **live}
    legend(plot, stacked(plot, names, columns, [], "{0.[00] b}", line_color=None))
    from_zero(plot, max(1, 1.2 * totals.max()))
    summary = f"Peak of the step: {format_bytes(totals.max())}."
    return made("live", "Memory of tensors during a step", summary, plot, height=_HEIGHT)
