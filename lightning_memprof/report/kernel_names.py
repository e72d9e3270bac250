"""Names of kernels that are short, and still tell one from another."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from lightning_memprof.report.words import clean

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["kernel_names"]


def kernel_names(names: Iterable[str]) -> list[str]:
    """Return each kernel's name without its template's arguments.

    Kernels that would then have one name keep what of their arguments differs: ``Kernel2<…256x128…>``.
    """
    full = [name.removeprefix("void ") for name in names]
    groups: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(full):
        groups[name.partition("<")[0] or name].append(name)
    shown = {name: short for short, alike in groups.items() for name, short in _apart(short, alike).items()}
    return [clean(shown[name]) for name in full]


def _apart(short: str, alike: list[str]) -> dict[str, str]:
    if len(alike) == 1:
        return {alike[0]: short}
    rests = [_arguments(name[len(short) :]) for name in alike]
    if len(set(rests)) < len(rests):
        rests = [name[len(short) :] for name in alike]
    front = _common(rests)
    ends = [rest[front:][::-1] for rest in rests]
    back = min(_common(ends), *(len(end) - 1 for end in ends))
    back = max(back, 0)
    parts = [rest[front : len(rest) - back] for rest in rests]
    before = "" if not front else "<" if front == 1 else "<…"
    after = "" if not back else f"{'…' * (back > 1)}{rests[0][-1]}"
    return {name: f"{short}{before}{part}{after}" for name, part in zip(alike, parts, strict=True)}


def _common(texts: list[str]) -> int:
    """Return how long the common beginning of some texts is, up to where a word or a number ends."""
    least, most = min(texts), max(texts)
    length = next((place for place, letter in enumerate(least) if letter != most[place]), len(least))
    while length and least[length - 1].isalnum():
        length -= 1
    return length


def _arguments(rest: str) -> str:
    """Return a template's arguments, without those of the function behind them."""
    depth = 0
    for place, letter in enumerate(rest):
        depth += (letter == "<") - (letter == ">" and rest[place - 1] != "-")
        if not depth:
            return rest[: place + 1]
    return rest
