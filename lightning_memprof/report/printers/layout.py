"""Text pages in lines of a fixed width: wrapped words, tables, bars and curves. Nothing here knows a terminal."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Final

from lightning_memprof.report.document import Cell, Column, Row, Table
from lightning_memprof.report.printers.values import cell_text, clean, more_rows, words_text
from lightning_memprof.units import percent

# A line is its pieces, each with the name of its style.
Line = tuple[tuple[str, str], ...]

DIM: Final = "bright_black"
STYLES: Final = {"": "", "dim": DIM, "good": "green", "warn": "yellow", "bad": "red"}
EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
LEVELS: Final = "▁▂▃▄▅▆▇█"
GAP: Final = 2
BAR_WIDTH: Final = 10
# A name keeps this much before a column is dropped for it, this much before one is repeated below, and this much at
# least.
NAME_WIDTH: Final = 22
SHORT_NAME_WIDTH: Final = 16
LEAST_WIDTH: Final = 8
SEPARATORS: Final = frozenset("./:_-(, ")


def text_width(text: str) -> int:
    """Return how many columns a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def pad(text: str, width: int, alignment: str = "left") -> str:
    """Fill a text with blanks."""
    blanks = " " * max(0, width - text_width(text))
    return blanks + text if alignment == "right" else text + blanks


def cut(text: str, width: int, *, front: bool = False) -> str:
    """Cut a text that is too wide; a path at the front, since its end is more specific."""
    if text_width(text) <= width:
        return text
    if width < 2:
        return "…"[:width]
    letters = text[::-1] if front else text
    kept, taken = "", 1
    for letter in letters:
        taken += text_width(letter)
        if taken > width:
            break
        kept += letter
    return f"…{kept[::-1]}" if front else f"{kept}…"


def wrap(text: str, width: int) -> list[str]:
    """Break a text into lines at its blanks; a word that is wider than a line is broken, a value keeps its unit."""
    width = max(width, 1)
    lines: list[str] = []
    line = ""
    for word in _bound(clean(text).split()):
        if line and text_width(line) + 1 + text_width(word) <= width:
            line += f" {word}"
            continue
        if line:
            lines.append(line)
        while text_width(word) > width:
            head = cut(word, width + 1)[:-1] or word[0]
            lines.append(head)
            word = word[len(head) :]  # noqa: PLW2901 the rest of the word
        line = word
    return [*lines, line] if line or not lines else lines


_UNITS: Final = frozenset({"B", "KiB", "MiB", "GiB", "TiB", "ns", "us", "µs", "ms", "s"})


def _bound(words: Sequence[str]) -> Iterator[str]:
    """Join each number with the unit behind it."""
    held = ""
    for word in words:
        if held and held[-1].isdigit() and word.rstrip(".,;:)") in _UNITS:
            held += f" {word}"
            continue
        if held:
            yield held
        held = word
    if held:
        yield held


def hang(label: str, text: str, width: int, indent: int, styles: tuple[str, str] = ("bold", "")) -> list[Line]:
    """Return a text behind its label, on as many lines as it takes."""
    if indent and width - indent < LEAST_WIDTH:
        return [((cut(label, width), styles[0]),), *(((line, styles[1]),) for line in wrap(text, width))]
    return [
        ((pad("" if place else label, indent), styles[0]), (line, styles[1]))
        for place, line in enumerate(wrap(text, width - indent))
    ]


def bar(share: float, width: int) -> str:
    """Draw a share of ``width`` characters, to an eighth of one; a positive share is never empty."""
    share = max(0.0, min(1.0, share))
    eighths = max(round(share * width * 8), share > 0)
    return EIGHTHS[8] * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")


def sparkline(values: Sequence[int], width: int) -> str:
    """Draw values as characters, from 0 to the largest."""
    shown = tops(values, width)
    most = max(shown, default=0)
    return "".join(LEVELS[min(7, max(0, value) * 8 // (most + 1))] for value in shown)


def tops(values: Sequence[int], width: int) -> list[int]:
    """Return at most ``width`` values: of those that share a place, the largest."""
    number = min(width, len(values))
    bounds = [place * len(values) // number for place in range(number + 1)] if number else []
    return [max(values[start:end]) for start, end in itertools.pairwise(bounds)]


def table_lines(table: Table, width: int) -> list[Line]:
    """Lay out a table in lines of at most ``width`` characters.

    Where they are too short, columns with a priority are dropped, then names take two lines; what still has no room is
    repeated below with the first column.
    """
    shown = table.shown
    places, more = table.known, more_rows(table, len(shown))
    lines: list[Line] = []
    while places:
        taken, rest = _fitting(table.columns, [*shown, *table.footer], places, width)
        lines += [()] * bool(lines)
        block = _block(table, shown, taken, width)
        places = [0, *rest] if rest else []
        lines += [*block[0], *([((cut(f"  {more}", width), DIM),)] if more and not rest else []), *block[1]]
    return lines


def written(cell: Cell, column: Column) -> str:
    """Return the text of a cell in its column."""
    words = clean(cell_text(cell))
    if column.has_share and cell.value is not None:
        words += f" {percent(cell.share):>5}" if cell.share is not None else " " * 6
    return words


def _natural(columns: Sequence[Column], rows: Sequence[Row], place: int) -> int:
    column = columns[place]
    heads = (clean(column.heading), clean(words_text(column.hint)) if column.has_share else "")
    return max([*map(text_width, heads), *(text_width(written(row[place], column)) for row in rows)], default=0)


def _fitting(
    columns: Sequence[Column], rows: Sequence[Row], places: list[int], width: int
) -> tuple[dict[int, int], list[int]]:
    """Return the width of each column that fits, and the places of those that have to be repeated below."""
    natural = {place: _natural(columns, rows, place) for place in places}
    names = {place for place in places if columns[place].alignment == "left"}
    taken = list(places)
    rest: list[int] = []

    def needed(least: int) -> int:
        return sum(min(natural[place], least) if place in names else natural[place] for place in taken) + GAP * len(
            taken
        )

    while needed(NAME_WIDTH) > width and (drop := max(taken, key=lambda place: (columns[place].priority, place))):
        if not columns[drop].priority:
            break
        taken.remove(drop)
    while needed(SHORT_NAME_WIDTH) > width and len(taken) > 2:
        rest.insert(0, taken.pop())
    widths = {place: natural[place] for place in taken}
    while (over := sum(widths.values()) + GAP * len(taken) - width) > 0:
        widest = max(names & set(taken) or taken, key=lambda place: widths[place])
        if widths[widest] <= 1:
            break
        others = [widths[place] for place in names & set(taken) if place != widest]
        step = max(1, min(over, widths[widest] - max([*others, LEAST_WIDTH])))
        widths[widest] = max(1, widths[widest] - step)
    return widths, rest


def _block(table: Table, rows: Sequence[Row], widths: dict[int, int], width: int) -> tuple[list[Line], list[Line]]:
    """Return the lines of the headings and the rows, and those of the footer."""
    columns = table.columns
    room = width - sum(widths.values()) - GAP * len(widths)
    bars = next((place for place in widths if any(row[place].share is not None for row in rows)), None)
    drawn = min(room - GAP, BAR_WIDTH) if bars is not None and not columns[bars].has_share else 0
    lines: list[Line] = []
    for hint in (False, True):
        heads = [clean(words_text(columns[place].hint) if hint else columns[place].heading) for place in widths]
        if hint and not any(columns[place].has_share for place in widths):
            continue
        cells = [
            (pad(cut(head, widths[place]), widths[place], columns[place].alignment), DIM if hint else "bold")
            for head, place in zip(heads, widths, strict=True)
        ]
        lines.append(_joined(cells))
    footer: list[Line] = []
    for number, row in enumerate([*rows, *table.footer]):
        parts = [_cell_lines(row[place], columns[place], widths[place]) for place in widths]
        fill = row[bars].share if bars is not None and drawn > 2 and number < len(rows) else None
        for height in range(max(map(len, parts))):
            cells = [
                (
                    pad(part[height] if height < len(part) else "", widths[place], columns[place].alignment),
                    STYLES[row[place].style] or (DIM if row[place].value in {None, 0} else ""),
                )
                for part, place in zip(parts, widths, strict=True)
            ]
            tail = bar(fill, drawn) if fill is not None and height == 0 else ""
            (lines if number < len(rows) else footer).append(_joined(cells, tail))
    return lines, footer


def _cell_lines(cell: Cell, column: Column, width: int) -> list[str]:
    words = written(cell, column)
    if text_width(words) <= width:
        return [words]
    if isinstance(cell.value, str) and cell.unit == "text":
        return wrap(words, width)
    return _halves(words, width) if column.alignment == "left" else [cut(words, width)]


def _halves(name: str, width: int) -> list[str]:
    """Break a name into two lines, behind a separator if possible; without what does not fit at its front."""
    name = cut(name, 2 * width, front=True)
    ends = [end for end, letter in enumerate(name, 1) if letter in SEPARATORS and text_width(name[:end]) <= width]
    end = next((end for end in reversed(ends) if text_width(name[end:]) <= width), 0)
    end = end or len(cut(name, width + 1)) - 1 or 1
    return [name[:end], cut(name[end:], width, front=True)]


def _joined(cells: Sequence[tuple[str, str]], tail: str = "") -> Line:
    pieces = [(" " * GAP, "")]
    for place, (words, style) in enumerate(cells):
        pieces.append((words + " " * GAP * (place < len(cells) - 1), style))
    if tail:
        pieces.append((" " * GAP + tail, "cyan"))
    return tuple(pieces)
