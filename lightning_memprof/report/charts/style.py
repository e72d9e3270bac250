"""Common style of all charts: colours for light and dark pages, axes in bytes and times, empty figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from bokeh.models import (
    AdaptiveTicker,
    BasicTicker,
    BoxZoomTool,
    ColumnDataSource,
    DataRange1d,
    HoverTool,
    NumeralTickFormatter,
    PanTool,
    Range1d,
    ResetTool,
    SaveTool,
    Ticker,
    WheelZoomTool,
)
from bokeh.models.annotations import Label, Legend, LegendItem
from bokeh.models.renderers import GlyphRenderer
from bokeh.plotting import figure
from numpy.typing import NDArray

from lightning_memprof.report.sections.labels import called

_SHADES: Final[Mapping[str, tuple[str, ...]]] = {
    "#e09f3e": ("data_wait", "input", "idle_data"),
    "#4a8fe7": ("forward", "activation", "compute"),
    "#9168d8": ("backward", "gradient", "collective"),
    "#2f9e8f": ("optimizer", "optimizer_state", "copy"),
    "#d8576b": ("callback", "temporary"),
    "#5c9f4a": ("parameter",),
    "#8b96a5": ("other", "untracked"),
    "#b4bcc8": ("before", "idle"),
    "#a67c52": ("workspace",),
}
COLOURS: Final[Mapping[str, str]] = {name: shade for shade, names in _SHADES.items() for name in names}
# For names without a color, in the order of their appearance.
_MORE: Final = ("#4a8fe7", "#e09f3e", "#2f9e8f", "#9168d8", "#d8576b", "#5c9f4a", "#c77dba", "#8b96a5")
MARK: Final = "#e5484d"
# At run time the class is not generic.
Renderer: TypeAlias = "GlyphRenderer[Any]"
Mode: TypeAlias = Literal["mouse", "hline", "vline"]
_FONT: Final = "12px"


def colour(name: str, position: int = 0) -> str:
    """Return the colour of a category or phase, or of the n-th of other names."""
    return COLOURS.get(name) or _MORE[position % len(_MORE)]


def new_figure(height: int, x_label: str, y_label: str = "", **options: Any) -> figure:
    """Return an empty figure as wide as its place, ``height`` pixels high, with its tools to the right."""
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        tools="",
        x_axis_label=x_label,
        y_axis_label=y_label or None,
        # The wheel scrolls the page; it zooms a chart only after its button was pressed.
        toolbar_location="right",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_left=72,
        **options,
    )
    box = BoxZoomTool()
    plot.add_tools(box, PanTool(), WheelZoomTool(), ResetTool(), SaveTool())
    plot.toolbar.active_drag = box
    plot.toolbar.active_scroll = None
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.grid.grid_line_alpha = 0.6
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.axis_label_text_font_size = _FONT
    plot.axis.major_label_text_font_size = _FONT
    plot.axis.minor_tick_line_color = None
    return plot


def bytes_axis(plot: figure) -> None:
    """Label the vertical axis and its grid in KiB, MiB and GiB."""
    plot.ygrid.ticker = bytes_ticks(plot.yaxis)


def bytes_ticks(axis: Any) -> Ticker:
    """Label an axis in KiB, MiB and GiB, with ticks at multiples of these."""
    ticker = AdaptiveTicker(base=1024, mantissas=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512], desired_num_ticks=5)
    axis.ticker = ticker
    axis.formatter = NumeralTickFormatter(format="0.[0] b")
    return ticker


def from_zero(plot: figure, top: float | None = None) -> None:
    """Start the vertical axis at 0, and end it at ``top`` if given."""
    plot.y_range = DataRange1d(start=0) if top is None else Range1d(start=0, end=top)


def label(plot: figure, place: tuple[float, float], text: str, *, right: bool) -> None:
    """Write a word to the right or left of a point, a little above it."""
    written = Label(x=place[0], y=place[1], text=text, text_font_size=_FONT, tags=["text"])
    written.update(x_offset=7 if right else -7, y_offset=4, text_align="left" if right else "right")
    plot.add_layout(written)


def whole_numbers(plot: figure) -> None:
    """Restrict the ticks of the horizontal axis to whole numbers."""
    ticker = BasicTicker(min_interval=1)
    plot.xaxis.ticker = ticker
    plot.xgrid.ticker = ticker


def legend(plot: figure, items: Sequence[tuple[str, Sequence[Renderer]]]) -> None:
    """Put a legend above a figure; a click on a name hides its series."""
    if not items:
        return
    shown = [LegendItem(label=name, renderers=list(renderers)) for name, renderers in items]
    made = Legend(items=shown, orientation="horizontal", click_policy="hide", border_line_color=None, margin=0)
    made.label_text_font_size = _FONT
    made.background_fill_alpha = 0
    made.update(padding=4, spacing=10)
    plot.add_layout(made, "above")


def hover(plot: figure, renderers: Sequence[Renderer], tips: Sequence[tuple[str, str]], mode: Mode) -> None:
    """Show a row for each of ``tips`` (name, bokeh's ``@column{format}``) under the mouse.

    The names must not come from the run: bokeh does not escape them.
    """
    plot.add_tools(HoverTool(renderers=list(renderers), tooltips=list(tips), mode=mode, attachment="horizontal"))


def stacked(
    plot: figure,
    names: Sequence[str],
    columns: Mapping[str, Any],
    tips: Sequence[tuple[str, str]],
    form: str,
    **options: Any,
) -> list[tuple[str, list[Renderer]]]:
    """Draw stacked bars that show their values under the mouse.

    Args:
        plot: the figure.
        names: the parts, from the bottom.
        columns: ``x``, ``width``, ``left``, ``right`` and ``top`` of each bar, and the values of each part by its name.
        tips: rows that are shown before those of the parts.
        form: bokeh's format of the values.
        options: of bokeh's ``vbar_stack``.

    Returns:
        The legend.
    """
    data = ColumnDataSource(dict(columns))
    colours = [colour(name) for name in names]
    bars = plot.vbar_stack(list(names), x="x", width="width", source=data, color=colours, **options)
    cover = plot.quad("left", "right", "top", 0, source=data, fill_alpha=0, line_alpha=0)
    hover(plot, [cover], [*tips, *((called(name), f"@{name}{form}") for name in names)], "vline")
    return [(called(name), [bar]) for name, bar in zip(names, bars, strict=True)]


def time_unit(ns: float) -> tuple[str, float]:
    """Return the unit of an axis that is as long as this, and its nanoseconds."""
    return ("s", 1e9) if ns > 1e10 else ("ms", 1e6)


def firsts(count: int, most: int) -> NDArray[np.intp]:
    """Return the first of each group of neighbours: at most ``most`` groups, all of one length but the last."""
    return np.arange(0, count, max(1, -(-count // most)))
