"""Memory within a window: live bytes by category with the peak marked, and all blocks below."""

from __future__ import annotations

import heapq
from base64 import b64encode
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from bokeh.layouts import column
from bokeh.models import BooleanFilter, CDSView, ColumnDataSource, HoverTool
from bokeh.models.annotations import Span
from bokeh.plotting import figure
from numpy.typing import NDArray

from lightning_memprof.account.memory.block_lives import KINDS, BlockLives, live_by_kind
from lightning_memprof.report.charts.embed import Chart, Extra, made
from lightning_memprof.report.charts.style import (
    MARK,
    Renderer,
    bytes_axis,
    colour,
    from_zero,
    hover,
    label,
    legend,
    new_figure,
    time_unit,
)
from lightning_memprof.report.sections.labels import PEAKS, called
from lightning_memprof.units import format_bytes, format_count

_ABOVE: Final = 230
_BELOW: Final = 320
# Drawing this many takes a second or two; of more blocks the largest are drawn.
MAX_BLOCKS: Final = 100_000
# Searching every hole is quadratic in the worst case; a block that fits in none of these is placed on top.
_HOLES: Final = 64
_STAYS: Final = frozenset({"before", "parameter", "optimizer_state", "gradient", "other"})
_TIP: Final = (
    '<div style="max-width:46em">'
    '<div><b>@size{0.[00] b}</b> (@size{0,0} bytes) at <span style="font-family:monospace">@address</span></div>'
    "<div>KIND, from @left{0,0.000} to @right{0,0.000} UNIT</div>"
    '<pre style="margin:4px 0 0;white-space:pre-wrap;font-size:11px">@stack</pre></div>'
)


def memory_chart(lives: BlockLives, chart_id: str, where: str) -> Chart | None:
    """Return a window's memory over time."""
    if not len(lives):
        return None
    moments, live = live_by_kind(lives)
    unit, scale = time_unit(lives.end - lives.start) if lives.is_timed else ("", 1.0)
    above = new_figure(_ABOVE, "", "live")
    areas = _areas(above, [(moment - lives.start) / scale for moment in moments], live, unit)
    peak_bytes, peak_at = _peak(above, lives, moments, live, scale)
    below = new_figure(_BELOW, unit if lives.is_timed else "event", "blocks", x_range=above.x_range)
    shown = lives
    if len(lives) > MAX_BLOCKS:
        shown = lives.at(heapq.nlargest(MAX_BLOCKS, range(len(lives)), key=lives.size.__getitem__))
    quads = _blocks(below, shown, unit, scale)
    for plot in (above, below):
        bytes_axis(plot)
    above.xaxis.visible = False
    legend(above, [(called(name), [*areas[name], *quads.get(name, ())]) for name in areas])
    at = f", {peak_at:,.1f} {unit} after its start" if lives.is_timed else ""
    count = format_count(len(lives), "block")
    if shown is not lives:
        count = f"the {len(shown):,} largest of {count}"
    place = where if lives.device in where else f"{lives.device} in {where}"
    summary = (
        f"Live bytes on {place} peak at {format_bytes(peak_bytes)}{at} (red){_from_before(lives)}. "
        f"Below: {count}; height is size, width is lifetime, vertical position is arbitrary. "
        "Categories are inferred from when a block was allocated and freed."
    )
    extra = Extra(strings=lives.stacks, largest_bytes=max(shown.size))
    model = column(above, below, sizing_mode="stretch_width")
    return made(chart_id, f"Memory over time, {where}", summary, model, height=_ABOVE + _BELOW, extra=extra)


def _from_before(lives: BlockLives) -> str:
    """Return the part of the peak that was allocated before the first event, or that it is unknown."""
    if not lives.knows_before:
        return "; bytes allocated before the first event, mostly parameters, are unknown and not drawn"
    if not (before := _before_bytes(lives)):
        return ""
    parts = [f"{called(name)} {format_bytes(size)}" for name, size in lives.held_before.items()]
    named = f" ({', '.join(parts)}, counted at the end of a step)" if parts else ""
    return f", {format_bytes(before)} of it allocated before the first event{named}"


def _before_bytes(lives: BlockLives) -> int:
    return lives.before_bytes + sum(lives.held_before.values())


def _areas(plot: figure, times: Sequence[float], live: dict[str, list[int]], unit: str) -> dict[str, list[Renderer]]:
    """Draw the categories on top of each other as steps: bytes hold from one event to the next."""
    twice = np.repeat(np.array(times, dtype="f4"), 2)[1:]
    data = {"x": twice}
    lower = np.zeros(len(twice))
    for name, values in live.items():
        upper = lower + np.repeat(np.array(values, dtype=float), 2)[:-1]
        data |= {f"{name}_from": lower, f"{name}_to": upper, name: upper - lower}
        lower = upper
    source = ColumnDataSource(data | {"sum": lower})
    drawn: dict[str, list[Renderer]] = {}
    for name in live:
        area = plot.varea("x", f"{name}_from", f"{name}_to", source=source, fill_color=colour(name), fill_alpha=0.85)
        drawn[name] = [area]
    line = plot.line("x", "sum", source=source, line_alpha=0)
    tips = [("at", f"@x{{0,0.000}} {unit}"), ("live", "@sum{0.[00] b}")]
    hover(plot, [line], [*tips, *((called(name), f"@{name}{{0.[00] b}}") for name in reversed(live))], "vline")
    from_zero(plot)
    return drawn


def _peak(
    plot: figure, lives: BlockLives, moments: Sequence[int], live: dict[str, list[int]], scale: float
) -> tuple[int, float]:
    sums = [sum(values) for values in zip(*live.values(), strict=True)]
    highest = max(range(len(sums)), key=sums.__getitem__)
    at = (moments[highest] - lives.start) / scale
    plot.add_layout(Span(location=at, dimension="height", line_color=MARK, line_width=1, line_dash="dashed"))
    right = 2 * highest < len(sums)
    before = _before_bytes(lives)
    text = f"peak {format_bytes(sums[highest])}"
    if before:  # the table of peaks has the first of them
        text += f" = {PEAKS['live'].label} {format_bytes(sums[highest] - before)} + {format_bytes(before)} from before"
    label(plot, (at, sums[highest]), text, right=right)
    from_zero(plot, 1.15 * max(sums[highest], 1))
    return sums[highest], at


def _blocks(plot: figure, lives: BlockLives, unit: str, scale: float) -> dict[str, list[Renderer]]:
    size = np.array(lives.size, dtype="i8")
    address = np.array(lives.address, dtype="u8")
    bottom = _bottoms(lives)
    columns: dict[str, NDArray[Any]] = {
        "left": ((np.array(lives.born, dtype="i8") - lives.start) / scale).astype("f4"),
        "right": ((np.array(lives.died, dtype="i8") - lives.start) / scale).astype("f4"),
        "bottom": bottom.astype("f4"),
        "top": (bottom + size).astype("f4"),
        "size": size.astype("u4" if size.max() < 1 << 32 else "f8"),
    }
    # The page's script derives the columns address and stack from these: as text they would be ten times as long.
    packed: dict[str, NDArray[Any]] = {
        "low": address & np.uint64(0xFFFFFFFF),
        "high": address >> np.uint64(32),
        "text": np.array(lives.stack),
    }
    kinds = np.array(lives.kind)
    drawn: dict[str, list[Renderer]] = {}
    for place, name in enumerate(KINDS):
        chosen = kinds == place
        if not chosen.any():
            continue
        widen = {key: b64encode(values[chosen].astype("<u4").tobytes()).decode() for key, values in packed.items()}
        source = ColumnDataSource({key: values[chosen] for key, values in columns.items()}, tags=[{"widen": widen}])
        view = CDSView(filter=BooleanFilter(tags=["size"]))
        quad = plot.quad(
            "left", "right", "top", "bottom", source=source, view=view, fill_color=colour(name), line_color=None,
            hover_fill_color=MARK, hover_line_color=None,
        )  # fmt: skip
        quad.glyph.tags = ["plain"]
        tip = _TIP.replace("KIND", called(name)).replace("UNIT", unit)
        plot.add_tools(HoverTool(renderers=[quad], tooltips=tip, attachment="horizontal", visible=False))
        drawn[name] = [quad]
    from_zero(plot)
    return drawn


def _bottoms(lives: BlockLives) -> NDArray[Any]:
    """Return the lower edges: persistent blocks are below temporary ones, which would otherwise leave holes."""
    bottom = np.zeros(len(lives), dtype="f8")
    ground = 0
    stays = [KINDS[kind] in _STAYS for kind in lives.kind]
    for wanted in (True, False):
        chosen = [i for i, block in enumerate(stays) if block is wanted]
        part = lives.at(chosen)
        lower = offsets(part.born, part.died, part.size)
        for i, edge in zip(chosen, lower, strict=True):
            bottom[i] = ground + edge
        ground += max((edge + size for edge, size in zip(lower, part.size, strict=True)), default=0)
    return bottom


def offsets(born: Sequence[int], died: Sequence[int], size: Sequence[int]) -> list[int]:
    """Return the lower edge of each block, in bytes: the lowest place that is free from its birth to its death.

    A block that is born when another one dies may take its place. The upper edge is at least the peak of the sum, and
    more where blocks are freed in another order than they were allocated.
    """
    order = sorted(range(len(size)), key=lambda i: (born[i], -died[i]))
    ends = sorted(range(len(size)), key=died.__getitem__)
    placed = [0] * len(size)
    holes = _Holes()
    done = 0
    for i in order:
        # A block with no lifetime takes no place.
        while done < len(ends) and died[ends[done]] <= born[i]:
            gone = ends[done]
            done += 1
            if died[gone] > born[gone]:
                holes.free(placed[gone], size[gone])
        placed[i] = holes.take(size[i]) if died[i] > born[i] else holes.top
    return placed


class _Holes:
    """Free places between the blocks, in order."""

    def __init__(self) -> None:
        self._start: list[int] = []
        self._size: list[int] = []
        self.top = 0

    def take(self, size: int) -> int:
        for place in range(min(len(self._start), _HOLES)):
            if self._size[place] >= size:
                start = self._start[place]
                self._start[place] += size
                self._size[place] -= size
                if not self._size[place]:
                    del self._start[place], self._size[place]
                return start
        start = self.top
        self.top += size
        return start

    def free(self, start: int, size: int) -> None:
        place = bisect_left(self._start, start)
        if place < len(self._start) and self._start[place] == start + size:
            size += self._size[place]
            del self._start[place], self._size[place]
        if place and self._start[place - 1] + self._size[place - 1] == start:
            place -= 1
            start, size = self._start[place], size + self._size[place]
            del self._start[place], self._size[place]
        if start + size == self.top:
            self.top = start
            return
        self._start.insert(place, start)
        self._size.insert(place, size)
