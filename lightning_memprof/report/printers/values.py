"""The text of values: every number that a person reads is written here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from lightning_memprof.report.document import Cell, Table, Words
from lightning_memprof.units import format_bytes, format_ns, percent, printable

NONE: Final = "-"
MAX_TEXT: Final = 600
_PREFIXES: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# A prefix is written before these, and before no other unit.
_SYMBOLS: Final = frozenset({"", "/s", "FLOP", "FLOP/s", "W", "°C"})


def cell_text(cell: Cell) -> str:
    """Return the text of a value, ``-`` where it is not available."""
    value, unit = cell.value, cell.unit
    if value is None:
        return NONE
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return NONE
    if unit.endswith(" change"):
        return _change(value, unit.removesuffix(" change"))
    if unit in NUMBERS:
        return NUMBERS[unit](value)
    return amount(value, unit)


def words_text(words: Words | Cell) -> str:
    """Return the text of a sentence or of a value."""
    if isinstance(words, str):
        return words
    if isinstance(words, Cell):
        return cell_text(words)
    return "".join(part if isinstance(part, str) else cell_text(part) for part in words.parts)


def more_rows(table: Table, shown: int | None = None) -> str:
    """Return the line that counts the rows behind those that are shown, empty without one; None shows all it has."""
    hidden = (0 if shown is None else len(table.rows) - shown) + table.left_out
    return f"{hidden:,} more{': --format json' * bool(table.left_out)}" if hidden else ""


def amount(value: float, unit: str = "") -> str:
    """Write a number with three figures and a decimal prefix: ``"1.23 k"``, ``"45.6 TFLOP/s"``."""
    scale, prefix = next(((scale, prefix) for scale, prefix in _PREFIXES if abs(value) >= scale), (1.0, ""))
    # Everyone counts parameters in billions.
    prefix = "B" if unit == "parameters" and prefix == "G" else prefix
    scaled = value / scale
    digits = 0 if abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
    blank = " " if prefix and unit not in _SYMBOLS else ""
    return f"{scaled:.{digits}f} {prefix}{blank}{unit}".rstrip()


def clean(value: str, longest: int = MAX_TEXT) -> str:
    """Make control characters visible, since recorded text must not control a terminal, and cut long text."""
    return printable(value if len(value) <= longest else value[: longest - 1] + "…")


def _count(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def _change(value: float, unit: str) -> str:
    """Write a difference with its sign; of relative ones above 10 the factor."""
    if unit == "share":
        return f"x{1 + value:.0f}" if value >= 10 else f"{value * 100:+.{0 if abs(value) >= 0.1 else 1}f}%"
    return f"{'+' if value >= 0 else ''}{cell_text(Cell(value, unit))}"


# Units with a format of their own; any other unit follows the number, with a decimal prefix: "FLOP/s".
NUMBERS: Final[Mapping[str, Callable[[float], str]]] = {
    "bytes": format_bytes,
    "bytes/s": lambda value: f"{format_bytes(value)}/s",
    "ns": format_ns,
    "share": percent,
    "count": _count,
    "index": lambda value: f"{value:.0f}",
}
