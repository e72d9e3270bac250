"""The text of values: every number that a person reads is written here."""

from __future__ import annotations

import math
from typing import Final

from lightning_memprof.report.document import Cell, Phrase, Words
from lightning_memprof.units import format_bytes, format_ns

__all__ = ["NONE", "amount", "cell_text", "clean", "percent", "words_text"]

NONE: Final = "-"
MAX_TEXT: Final = 600
_PREFIXES: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def cell_text(cell: Cell) -> str:
    """Return the text of a value, ``-`` where it is not available."""
    value, unit = cell.value, cell.unit
    if value is None:
        return NONE
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return NONE
    if unit in _NUMBERS:
        return _NUMBERS[unit](value)
    return amount(value, unit)


def words_text(words: Words | Cell) -> str:
    """Return the text of a sentence or of a value."""
    if isinstance(words, str):
        return words
    if isinstance(words, Cell):
        return cell_text(words)
    return "".join(part if isinstance(part, str) else cell_text(part) for part in words.parts)


def percent(share: float) -> str:
    """Write a share of 1: ``"47%"``, and ``"<1%"`` for what would round to nothing."""
    return "<1%" if 0 < share < 0.005 else f"{share * 100:.0f}%"


def amount(value: float, unit: str = "") -> str:
    """Write a number with three figures and a decimal prefix: ``"1.23 k"``, ``"45.6 TFLOP/s"``."""
    scale, prefix = next(((scale, prefix) for scale, prefix in _PREFIXES if abs(value) >= scale), (1.0, ""))
    scaled = value / scale
    digits = 0 if abs(scaled) >= 100 or float(value).is_integer() and scale == 1.0 else 1 if abs(scaled) >= 10 else 2
    return f"{scaled:.{digits}f} {prefix}{unit}".rstrip()


def clean(value: str, longest: int = MAX_TEXT) -> str:
    """Make control characters visible, since text from outside must not steer a terminal, and cut what is endless."""
    short = value if len(value) <= longest else value[: longest - 1] + "…"
    if short.isprintable():
        return short
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode("ascii")
        for letter in short
    )


def _count(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def _change(value: float) -> str:
    return f"{'+' if value >= 0 else ''}{format_bytes(value)}"


_NUMBERS: Final = {
    "bytes": format_bytes,
    "bytes change": _change,
    "bytes/s": lambda value: f"{format_bytes(value)}/s",
    "ns": format_ns,
    "share": percent,
    "count": _count,
    "index": lambda value: f"{value:.0f}",
}
