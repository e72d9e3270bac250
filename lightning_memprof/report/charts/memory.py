"""Memory within a window: live bytes by category with the peak marked, and all blocks below."""

from __future__ import annotations

import heapq
from base64 import b64encode
from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

import numpy as np
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, HoverTool
from bokeh.models.annotations import Span
from bokeh.plotting import figure
from numpy.typing import NDArray

from lightning_memprof.account.memory.blocks import KINDS, Blocks, live_by_kind
from lightning_memprof.report.charts.embed import Chart, made
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


def memory_chart(blocks: Blocks, chart_id: str, where: str) -> Chart | None:
    """Return a window's memory over time."""
    if not len(blocks):
        return None
    moments, live = live_by_kind(blocks)
    unit, scale = time_unit(blocks.end - blocks.start) if blocks.is_timed else ("", 1.0)
    above = new_figure(_ABOVE, "", "live")
    areas = _areas(above, [(moment - blocks.start) / scale for moment in moments], live, unit)
    peak_bytes, peak_at = _peak(above, blocks, moments, live, scale)
    below = new_figure(_BELOW, unit if blocks.is_timed else "event", "blocks", x_range=above.x_range)
    shown = blocks
    if len(blocks) > MAX_BLOCKS:
        shown = blocks.chosen(heapq.nlargest(MAX_BLOCKS, range(len(blocks)), key=blocks.size.__getitem__))
    numbers, texts = shown.texts()
    quads = _blocks(below, shown, numbers, unit, scale)
    for plot in (above, below):
        bytes_axis(plot)
    above.xaxis.visible = False
    legend(above, [(called(name), [*areas[name], *quads.get(name, ())]) for name in areas])
    at = f", {peak_at:,.1f} {unit} after its start" if blocks.is_timed else ""
    count = format_count(len(blocks), "block")
    if shown is not blocks:
        count = f"the {len(shown):,} largest of {count}"
    place = where if blocks.device in where else f"{blocks.device} in {where}"
    summary = (
        f"Live bytes on {place} peak at {format_bytes(peak_bytes)}{at} (red){_from_before(blocks)}. "
        f"Below: {count}; height is size, width is lifetime, vertical position is arbitrary. "
        "Categories are inferred from when a block was allocated and freed."
    )
    model = column(above, below, sizing_mode="stretch_width")
    return made(chart_id, f"Memory over time, {where}", summary, model, height=_ABOVE + _BELOW, strings=texts)


def _from_before(blocks: Blocks) -> str:
    """Return the part of the peak that was allocated before the first event, or that it is unknown."""
    if blocks.before_bytes is None:
        return "; bytes allocated before the first event, mostly parameters, are unknown and not drawn"
    if not (before := _before_bytes(blocks)):
        return ""
    parts = [f"{called(name)} {format_bytes(size)}" for name, size in blocks.held_before.items()]
    named = f" ({', '.join(parts)}, counted at the end of a step)" if parts else ""
    return f", {format_bytes(before)} of it allocated before the first event{named}"


def _before_bytes(blocks: Blocks) -> int:
    return max(0, blocks.before_bytes or 0) + sum(blocks.held_before.values())


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
    plot: figure, blocks: Blocks, moments: Sequence[int], live: dict[str, list[int]], scale: float
) -> tuple[int, float]:
    sums = [sum(values) for values in zip(*live.values(), strict=True)]
    highest = max(range(len(sums)), key=sums.__getitem__)
    at = (moments[highest] - blocks.start) / scale
    plot.add_layout(Span(location=at, dimension="height", line_color=MARK, line_width=1, line_dash="dashed"))
    right = 2 * highest < len(sums)
    before = _before_bytes(blocks)
    text = f"peak {format_bytes(sums[highest])}"
    if before:  # the table of peaks has the first of them
        text += f" = {PEAKS['live'].label} {format_bytes(sums[highest] - before)} + {format_bytes(before)} from before"
    label(plot, (at, sums[highest]), text, right=right)
    from_zero(plot, 1.15 * max(sums[highest], 1))
    return sums[highest], at


def _blocks(plot: figure, blocks: Blocks, texts: Sequence[int], unit: str, scale: float) -> dict[str, list[Renderer]]:
    size = np.array(blocks.size, dtype="i8")
    address = np.array(blocks.address, dtype="i8").astype("u8")
    bottom = _bottoms(blocks)
    columns: dict[str, NDArray[Any]] = {
        "left": ((np.array(blocks.times_of(blocks.born), dtype="i8") - blocks.start) / scale).astype("f4"),
        "right": ((np.array(blocks.times_of(blocks.died), dtype="i8") - blocks.start) / scale).astype("f4"),
        "bottom": bottom.astype("f4"),
        "top": (bottom + size).astype("f4"),
        "size": size.astype("u4" if size.max() < 1 << 32 else "f8"),
    }
    # The page's script derives the columns address and stack from these: as text they would be ten times as long.
    packed: dict[str, NDArray[Any]] = {
        "low": address & np.uint64(0xFFFFFFFF),
        "high": address >> np.uint64(32),
        "text": np.array(texts),
    }
    kinds = np.array(blocks.kind)
    drawn: dict[str, list[Renderer]] = {}
    for place, name in enumerate(KINDS):
        chosen = kinds == place
        if not chosen.any():
            continue
        widen = {key: b64encode(values[chosen].astype("<u4").tobytes()).decode() for key, values in packed.items()}
        source = ColumnDataSource({key: values[chosen] for key, values in columns.items()}, tags=[{"widen": widen}])
        quad = plot.quad(
            "left", "right", "top", "bottom", source=source, fill_color=colour(name), line_color=None,
            hover_fill_color=MARK, hover_line_color=None,
        )  # fmt: skip
        quad.glyph.tags = ["plain"]
        tip = _TIP.replace("KIND", called(name)).replace("UNIT", unit)
        plot.add_tools(HoverTool(renderers=[quad], tooltips=tip, attachment="horizontal", visible=False))
        drawn[name] = [quad]
    from_zero(plot)
    return drawn


def _bottoms(blocks: Blocks) -> NDArray[Any]:
    """Return the lower edges: persistent blocks are below temporary ones, which would otherwise leave holes."""
    bottom = np.zeros(len(blocks), dtype="f8")
    ground = 0
    stays = [KINDS[kind] in _STAYS for kind in blocks.kind]
    for wanted in (True, False):
        chosen = [i for i, block in enumerate(stays) if block is wanted]
        part = blocks.chosen(chosen)
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
    """Free places between the blocks, each its edges, in order."""

    def __init__(self) -> None:
        self._edges: list[tuple[int, int]] = []
        self.top = 0

    def take(self, size: int) -> int:
        for place, (start, end) in enumerate(islice(self._edges, _HOLES)):
            if end - start >= size:
                self._edges[place : place + 1] = [(start + size, end)] if end - start > size else []
                return start
        self.top += size
        return self.top - size

    def free(self, start: int, size: int) -> None:
        end = start + size
        place = bisect_left(self._edges, (start, end))
        if place < len(self._edges) and self._edges[place][0] == end:
            end = self._edges.pop(place)[1]
        if place and self._edges[place - 1][1] == start:
            place -= 1
            start = self._edges.pop(place)[0]
        if end == self.top:
            self.top = start
        else:
            self._edges.insert(place, (start, end))
