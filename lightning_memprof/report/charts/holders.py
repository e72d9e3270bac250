"""Allocation sites at the peak as a flame graph from the top: callers above, callees below."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Final

import msgspec
from bokeh.core.properties import value
from bokeh.models import ColumnDataSource, HoverTool, Range1d

from lightning_memprof.account.memory.model import Site
from lightning_memprof.account.snapshot.replay import Holder
from lightning_memprof.read.stacks import is_library, parse_frame
from lightning_memprof.report.charts.embed import Chart, made
from lightning_memprof.report.charts.style import bytes_ticks, new_figure
from lightning_memprof.report.printers.values import clean
from lightning_memprof.units import format_bytes, format_count

# Light fills: dark letters are readable on them, on light and dark pages.
_FILLS: Final = ("#f3c98b", "#f2b08f", "#eba6a6", "#e4b7da", "#c5bbf2", "#a9c9f5", "#a3d9d0", "#bcd9a3")
_LETTERS: Final = "#1b1f24"
_ROW: Final = 22
_DEEPEST: Final = 30
# Narrower than a pixel.
_LEAST_SHARE: Final = 0.001
# A name like 0 is meaningless without its parents.
_SHOWN: Final = 4
_SIZE: Final = "11px"
_FAMILY: Final = "helvetica"
_PADDING: Final = 4
# The page's script cuts the labels: only the browser knows the width of a letter.
_FIT: Final = MappingProxyType({"fit": (f"{_SIZE} {_FAMILY}", _PADDING)})
_TIP: Final = (
    '<div style="max-width:46em"><b>@size{0.[00] b}</b> (@share{0.0%}) in @blocks{0,0} blocks'
    '<div style="overflow-wrap:anywhere">@name</div></div>'
)


class _Node(msgspec.Struct):
    name: str
    bytes: int = 0
    blocks: int = 0
    below: dict[str, _Node] = msgspec.field(default_factory=dict)


def site_path(site: Site) -> tuple[str, ...]:
    """Return the path of an allocation site: the parts of its module, the operator, the line."""
    modules = tuple(site.module.split(".")) if site.module else (site.phase or "outside of modules",)
    return (*modules, site.operator or "?", *((site.line,) if site.line else ()))


def holder_path(holder: Holder) -> tuple[str, ...]:
    """Return a stack, outermost frame first: the user's frames, else Python's, else the allocation site."""
    own = [
        frame
        for frame in holder.stack
        if (parsed := parse_frame(frame)) is not None and not is_library(parsed.filename)
    ]
    if own:
        return tuple(reversed(own))
    python = [frame for frame in holder.stack if (parsed := parse_frame(frame)) is not None and parsed.is_python]
    if python:
        return tuple(reversed(python))
    return ("native code", holder.site) if holder.site else ("no stack",)


def holders_chart(holders: Iterable[tuple[Sequence[str], int, int]], chart_id: str, where: str) -> Chart | None:
    """Return the flame graph of ``(path from the outside in, bytes, blocks)``; None without bytes."""
    root = _Node("all")
    for path, size, blocks in holders:
        if size <= 0:
            continue
        node = root
        for name in ("", *path[:_DEEPEST]):
            if name:
                node = node.below.setdefault(name, _Node(name))
            node.bytes += size
            node.blocks += blocks
    if not root.bytes:
        return None
    rows: list[tuple[_Node, int, int, str]] = []
    _lay(root, (0, 0), (), root.bytes * _LEAST_SHARE, rows)
    depth = 1 + max(row for _, _, row, _ in rows)
    height = _ROW * depth + 60
    plot = new_figure(height, "bytes at the peak")
    data = ColumnDataSource(
        {
            "left": [left for _, left, _, _ in rows],
            "right": [left + node.bytes for node, left, _, _ in rows],
            "top": [-row for _, _, row, _ in rows],
            "bottom": [-row - 0.94 for _, _, row, _ in rows],
            "middle": [-row - 0.47 for _, _, row, _ in rows],
            "size": [node.bytes for node, _, _, _ in rows],
            "share": [node.bytes / root.bytes for node, _, _, _ in rows],
            "blocks": [node.blocks for node, _, _, _ in rows],
            "name": [path for _, _, _, path in rows],
            "fill": [_fill(node.name) for node, _, _, _ in rows],
            "words": [_words(node.name) for node, _, _, _ in rows],
            "label": [""] * len(rows),
            "begin": [left for _, left, _, _ in rows],
        },
        tags=[dict(_FIT)],
    )
    quads = plot.quad(
        "left", "right", "top", "bottom", source=data, fill_color="fill", line_color=None, hover_line_color=_LETTERS,
        hover_fill_color="fill",
    )  # fmt: skip
    plot.text(
        "begin", "middle", "label", source=data, text_font=value(_FAMILY), text_font_size=_SIZE,
        text_baseline="middle", x_offset=_PADDING, text_color=_LETTERS,
    )  # fmt: skip
    plot.x_range = Range1d(start=0, end=root.bytes, bounds=(0, root.bytes))
    plot.y_range = Range1d(start=-depth, end=0)
    plot.yaxis.visible = False
    plot.grid.visible = False
    bytes_ticks(plot.xaxis)
    plot.add_tools(HoverTool(renderers=[quads], tooltips=_TIP, attachment="vertical"))
    first = max(root.below.values(), key=lambda node: node.bytes)
    summary = (
        f"{format_bytes(root.bytes)} in {format_count(root.blocks, 'block')} at the peak of {where}; the largest "
        f"part is {clean(first.name)} ({format_bytes(first.bytes)}). Width is bytes; parts below 0.1% are omitted."
    )
    return made(chart_id, f"Allocation sites at the peak, {where}", summary, plot, height=height)


def _lay(
    node: _Node, place: tuple[int, int], above: tuple[str, ...], least: float, rows: list[tuple[_Node, int, int, str]]
) -> None:
    left, row = place
    for child in sorted(node.below.values(), key=lambda node_below: -node_below.bytes):
        if child.bytes < least:
            return
        path = (*above, clean(child.name))[-_SHOWN:]
        rows.append((child, left, row, " > ".join(path)))
        _lay(child, (left, row + 1), path, least, rows)
        left += child.bytes


def _fill(name: str) -> str:
    # A file name that is not UTF-8 has surrogates in Python, which cannot be encoded.
    return _FILLS[zlib.crc32(name.encode(errors="backslashreplace")) % len(_FILLS)]


def _words(name: str) -> str:
    frame = parse_frame(name)
    if frame is None:
        return name.removeprefix("aten::")
    return f"{frame.name} ({frame.filename.replace(chr(92), '/').rpartition('/')[2]}:{frame.line})"
