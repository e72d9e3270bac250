"""What the memory page is drawn with: tables, bars and curves of plain characters."""

from __future__ import annotations

import itertools
import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.memory.checkpointing import patterns
from lightning_memprof.report.words import clean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_memprof.analysis.memory.allocations import Site
    from lightning_memprof.analysis.memory.report import Activations, ModuleBytes

__all__ = [
    "DIM",
    "NONE",
    "Line",
    "ModuleRow",
    "SiteRow",
    "bar",
    "cut",
    "module_rows",
    "notes",
    "over_time",
    "short_line",
    "site_rows",
    "sparkline",
    "table",
    "tops",
]

# A line is what stands on it, piece by piece, each with the name of its style.
Line = tuple[tuple[str, str], ...]

DIM: Final = "bright_black"
NONE: Final = "-"
EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
LEVELS: Final = "▁▂▃▄▅▆▇█"
ASCII_LEVELS: Final = "_.:-=+*#"
GAP: Final = 2
NUMBER_AND_UNIT: Final = re.compile(r"(\d) (?=(?:[KMGT]i)?B\b|[num]?s\b)")
ROOT: Final = "(the model)"
LINE_WIDTH: Final = 20
TEXT_WIDTH: Final = 8


@dataclass(frozen=True)
class ModuleRow:
    """One module, or all that are alike: the sums of their bytes and calls; None where one of them is not known."""

    name: str
    own_bytes: int
    inclusive_bytes: int
    parameter_bytes: int | None
    gradient_bytes: int | None
    calls: int


def module_rows(kept: Activations) -> list[ModuleRow]:
    """Return the modules, repeated blocks as one row, the largest inclusive bytes first."""
    shared = patterns((module.name for module in kept.modules), kept.parameters)
    groups: dict[str, list[ModuleBytes]] = {}
    for module in kept.modules:
        groups.setdefault(shared[module.name], []).append(module)
    rows = [
        ModuleRow(
            name or ROOT,
            sum(module.own_activation_bytes for module in found),
            sum(module.inclusive_activation_bytes for module in found),
            _sum([module.parameter_bytes for module in found]),
            _sum([module.gradient_bytes for module in found]),
            sum(module.calls for module in found),
        )
        for name, found in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row.inclusive_bytes, -row.own_bytes, row.name))


@dataclass(frozen=True)
class SiteRow:
    """What one operator of one module and line holds, or of all modules that are alike: the sums.

    Where neither the module nor the line is known, ``place`` is the phase.
    """

    operator: str
    place: str
    line: str
    bytes: int
    blocks: int


def site_rows(sites: Sequence[Site], parameters: Mapping[str, int]) -> list[SiteRow]:
    """Return the sites, those of repeated blocks as one row, the largest first; whatever the step and its phase."""
    shared = patterns({site.module for site in sites if site.module}, parameters)
    sums: dict[tuple[str, str, str], list[int]] = {}
    for site in sites:
        place = shared[site.module] if site.module else f"({site.phase})" if site.phase else NONE
        operator = site.operator.removeprefix("aten::")
        row = sums.setdefault((operator, place, short_line(site.line)), [0, 0])
        row[0] += site.bytes
        row[1] += site.blocks
    rows = [SiteRow(*key, *row) for key, row in sums.items()]
    return sorted(rows, key=lambda row: (-row.bytes, row.operator, row.place, row.line))


def table(
    names: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, dim: int = 0, tail: bool = False
) -> list[Line]:
    """Lay out rows: the first column to the left and cut to what is left of ``width``, the others to the right.

    Args:
        names: the heads of the columns.
        rows: as many cells each.
        width: of a line; columns that would leave no room for the text are left out, the last ones first.
        dim: how many rows at the end are drawn dimly.
        tail: whether the last column is text too: it then takes what is left, and the first at most a quarter.

    """
    least = TEXT_WIDTH * (1 + tail) + GAP * tail
    middle = list(range(1, len(names) - tail))
    widths = {place: max([len(names[place]), *(len(row[place]) for row in rows)]) for place in middle}
    while (room := width - 2 - sum(widths[place] + GAP for place in middle)) < least and len(middle) > 1:
        middle.pop()
    longest = max([len(names[0]), *(len(clean(row[0])) for row in rows)])
    first = min(longest, max(width // 4, 8) if tail else room)
    last = room - first - GAP
    lines: list[Line] = []
    for index, row in enumerate([names, *rows]):
        cells = [f"  {cut(clean(row[0]), first):<{first}}"]
        cells += [f"{row[place]:>{widths[place]}}" for place in middle]
        if tail:
            cells.append(cut(clean(row[-1]), last))
        style = "bold" if index == 0 else DIM if index > len(rows) - dim else ""
        lines.append((((" " * GAP).join(cells).rstrip(), style),))
    return lines


def notes(words: str, width: int, indent: int = 2) -> list[Line]:
    """Return words as dim lines that all begin in one column; a number is not parted from its unit."""
    kept = NUMBER_AND_UNIT.sub("\\1\u00a0", clean(words))
    lines = textwrap.wrap(kept, max(width - indent, 20), break_on_hyphens=False)
    return [((f"{'':<{indent}}{line}".replace("\u00a0", " "), DIM),) for line in lines]


def bar(share: float, width: int, *, ascii_only: bool) -> str:
    """Draw a share of ``width`` characters, to an eighth of one; what is not nothing is never drawn as nothing."""
    share = max(0.0, min(1.0, share))
    if ascii_only:
        return "#" * max(round(share * width), share > 0)
    eighths = max(round(share * width * 8), share > 0)
    return EIGHTHS[8] * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")


def sparkline(values: Sequence[int], *, ascii_only: bool) -> str:
    """Draw each value as one character, from 0 to the largest."""
    levels = ASCII_LEVELS if ascii_only else LEVELS
    most = max(values, default=0)
    return "".join(levels[min(7, max(0, value) * 8 // (most + 1))] for value in values)


def tops(values: Sequence[int], width: int) -> list[int]:
    """Return at most ``width`` values: of those that share a place, the largest."""
    count = min(width, len(values))
    bounds = [place * len(values) // count for place in range(count + 1)] if count else []
    return [max(values[start:end]) for start, end in itertools.pairwise(bounds)]


def over_time(curve: Sequence[tuple[int, int]], width: int) -> list[int]:
    """Return ``width`` values of a curve of ``(time, value)`` at equal distances in time.

    Each is the most since the one before; between two points the curve stays where it was.
    """
    start, end = curve[0][0], curve[-1][0]
    places = [min(width - 1, (time - start) * width // max(1, end - start)) for time, _ in curve]
    values = [0] * width
    for (_, value), place, following in zip(curve, places, [*places[1:], width - 1], strict=True):
        for column in range(place, following + 1):
            values[column] = max(values[column], value)
    return values


def short_line(line: str | None) -> str:
    """Return ``file.py(12)`` of ``directory/file.py(12): function``, empty where there is none."""
    return "" if line is None else cut(clean(line.rpartition(": ")[0].rpartition("/")[2] or line), LINE_WIDTH)


def cut(text: str, width: int) -> str:
    """Cut the front of a text that is too long: the end of a path says more than its start."""
    return text if len(text) <= width else f"…{text[len(text) - width + 1 :]}" if width > 1 else "…"[:width]


def _sum(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
