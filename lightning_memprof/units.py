"""Text for bytes, nanoseconds, shares and names. The only module that uses 1024."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Final

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3
AT_ONCE_US: Final = 2.0**42
"""Below this, 51 days, ``round(us * 1000)`` is :func:`nanoseconds`, at a third of its cost in a loop."""

_BYTE_STEPS: Final = ((1024**4, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
# A damaged file may hold integers that no float can.
_MOST: Final = 1e300
_NS_STEPS: Final = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"))


def nanoseconds(microseconds: float) -> int:
    """Return whole nanoseconds; exact up to 2**43 µs, 101 days.

    Multiplied at once, the product of a time above ``AT_ONCE_US`` is often that of its neighbour.
    """
    whole = int(microseconds)
    return whole * 1000 + round((microseconds - whole) * 1000)


def format_bytes(n: float) -> str:
    """Write a number of bytes with a binary unit and three significant figures: ``"1.23 GiB"``."""
    n = max(min(n, _MOST), -_MOST)
    for scale, unit in _BYTE_STEPS:
        if abs(n) >= scale:
            return f"{_three_figures(n / scale)} {unit}"
    return f"{n:.0f} B"


def format_count(number: int, noun: str) -> str:
    """Write a count with its noun, in the singular or the plural: ``"1 event"``, ``"12,345 events"``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_list(items: Sequence[object], most: int) -> str:
    """Write the first items of a list and count the others: ``"1, 2 and 3 more"``."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def sentence(*clauses: str) -> str:
    """Return the clauses that are not empty as one sentence; empty without any."""
    text = "; ".join(filter(None, clauses))
    return f"{text[0].upper()}{text[1:]}." if text else ""


def format_ns(ns: float) -> str:
    """Write a duration in nanoseconds with a decimal unit and three significant figures: ``"18.2 ms"``."""
    ns = max(min(ns, _MOST), -_MOST)
    for scale, unit in _NS_STEPS:
        if abs(ns) >= scale:
            return f"{_three_figures(ns / scale)} {unit}"
    return f"{ns:.0f} ns"


def format_steps(steps: Sequence[int]) -> str:
    """Write consecutive steps: ``"step 2"``, ``"steps 2–5"``, ``"no steps"``."""
    if not steps:
        return "no steps"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}–{steps[-1]}"


def percent(share: float) -> str:
    """Write a share of 1 as a percentage: ``"47%"``, and ``"<1%"`` for what would round to 0."""
    return "<1%" if 0 < share < 0.005 else f"{share * 100:.0f}%"


def printable(text: str) -> str:
    """Return a text with control characters and line breaks escaped: a name must not control a terminal."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode("ascii")
        for letter in text
    )


def quoted(name: str | os.PathLike[str]) -> str:
    """Return a path or a URL as a printable shell argument; ``$'...'`` is bash's quoting with escapes."""
    text = os.fspath(name)
    if text.startswith("-"):
        text = f"./{text}"
    if text.isprintable():
        return shlex.quote(text)
    letters = (
        f"\\{letter}" * (letter in "\\'")
        or (letter if letter.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(letter)))
        for letter in text
    )
    return f"$'{''.join(letters)}'"


def _three_figures(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"
