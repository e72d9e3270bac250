"""What remedies gained: the change of the step time with each, and its interval."""

from __future__ import annotations

from typing import Final

from bokeh.models import ColumnDataSource, FactorRange, NumeralTickFormatter
from bokeh.models.annotations import Span

from lightning_memprof.compare.trial import Trial
from lightning_memprof.report.charts.embed import Chart, made
from lightning_memprof.report.charts.style import MARK, Renderer, colour, hover, legend, new_figure

_ROW: Final = 34
_REST: Final = 110
_KEPT: Final = "optimizer"
_SAME: Final = "other"


def trial_chart(trial: Trial | None) -> Chart | None:
    """Return the changes of the step time as points with their intervals; None where nothing was measured."""
    tried = [] if trial is None else [found for found in trial.tried if found.time is not None]
    if trial is None or not tried:
        return None
    names = [found.remedy for found in tried]
    plot = new_figure(_REST + _ROW * len(tried), "change of the step time", y_range=FactorRange(factors=names[::-1]))
    plot.xaxis.formatter = NumeralTickFormatter(format="+0%")
    plot.ygrid.grid_line_color = None
    promised = [(found.remedy, found.promised) for found in tried if found.promised is not None]
    items: list[tuple[str, list[Renderer]]] = []
    if promised:
        bars = plot.hbar(
            y=[name for name, _ in promised],
            left=[-most for _, (_, most) in promised],
            right=[-least for _, (least, _) in promised],
            height=0.6,
            fill_color=colour("before"),
            fill_alpha=0.4,
            line_color=None,
        )
        items.append(("promised", [bars]))
    for words, color, is_faster in (("shorter steps", colour(_KEPT), True), ("not recommended", colour(_SAME), False)):
        shown = [(found.remedy, found.time) for found in tried if found.time and found.is_faster is is_faster]
        if not shown:
            continue
        columns = {part: [getattr(time, part) for _, time in shown] for part in ("low", "high", "change")}
        data = ColumnDataSource({"name": [name for name, _ in shown], **columns})
        lines = plot.segment("low", "name", "high", "name", source=data, line_width=3, line_color=color)
        points = plot.scatter("change", "name", source=data, size=11, color=color)
        tips = [("change", "@change{+0.0%}"), ("95% interval", "@low{+0.0%} to @high{+0.0%}")]
        hover(plot, [points, lines], tips, "mouse")
        items.append((words, [lines, points]))
    plot.add_layout(Span(location=0, dimension="height", line_color=MARK, line_dash="dashed"))
    legend(plot, items)
    summary = f"Each line is the 95% interval of up to {trial.rounds} rounds; left of 0 steps are shorter."
    return made("tried", "Change of the step time", summary, plot, height=_REST + _ROW * len(tried))
