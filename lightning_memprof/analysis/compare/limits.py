"""Limits of a comparison: ``peak_allocated_bytes>5%``, ``step_ns>2ms``, ``samples_per_s<-5%``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.compare.model import QUANTITIES
from lightning_memprof.errors import ConfigError
from lightning_memprof.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from lightning_memprof.analysis.compare.model import Comparison

__all__ = ["Limit", "Outcome", "check", "parse_limit"]

_LIMIT: Final = re.compile(
    r"\s*(?P<name>\w+)\s*(?P<sign>[<>])\s*(?P<amount>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))\s*(?P<unit>%|[A-Za-z]*)\s*",
    re.ASCII,
)
_SCALES: Final = {
    "ns": {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9},
    "bytes": {"B": 1.0, "KiB": float(KIB), "MiB": float(MIB), "GiB": float(GIB)},
    "count": {"": 1.0},
    "per_s": {"": 1.0},
}
_EXAMPLE: Final = "write it as in 'peak_allocated_bytes>5%', 'step_ns>2ms' or 'samples_per_s<-5%', in quotes"
_MOST_DIGITS: Final = 40


@dataclass(frozen=True)
class Limit:
    """How much more (``>``), or less (``<`` with a negative amount), B may have than A.

    ``amount`` is a part of 1 where ``is_relative``, else in the quantity's unit.
    """

    text: str
    name: str
    is_upper: bool
    amount: float
    is_relative: bool


@dataclass(frozen=True)
class Outcome:
    """What came of a limit; ``is_broken`` also where it could not be checked. ``sentence`` says which figures."""

    limit: Limit
    is_broken: bool
    sentence: str


def parse_limit(given: str) -> Limit:
    """Read one limit.

    Raises:
        ConfigError: it is none, names no quantity that is compared, or has another unit than that.

    """
    match = _LIMIT.fullmatch(given) if len(given) <= _MOST_DIGITS * 2 else None
    if match is None:
        raise ConfigError(
            f"--fail-on {given[: _MOST_DIGITS * 2]!r}: is no limit; {_EXAMPLE}: a shell takes > for a file"
        )
    name, unit = match["name"], match["unit"]
    if name not in QUANTITIES:
        raise ConfigError(f"--fail-on {given!r}: {name!r} is not compared; name one of {', '.join(QUANTITIES)}")
    amount = float(match["amount"])
    is_upper = match["sign"] == ">"
    if amount < 0 if is_upper else amount > 0:
        raise ConfigError(
            f"--fail-on {given!r}: {'>' if is_upper else '<'} is for what {'rises' if is_upper else 'falls'}, so the "
            f"amount may not be {'negative' if is_upper else 'positive'}; {_EXAMPLE}"
        )
    if unit == "%":
        return Limit(given, name, is_upper, amount / 100, is_relative=True)
    scales = _SCALES[QUANTITIES[name]]
    if unit not in scales:
        known = ", ".join(scale for scale in scales if scale) or "a number alone"
        raise ConfigError(f"--fail-on {given!r}: {unit or 'no unit'} is no unit of {name}; use % or {known}")
    return Limit(given, name, is_upper, amount * scales[unit], is_relative=False)


def check(comparison: Comparison, limit: Limit) -> Outcome:
    """Say whether B keeps a limit.

    A change beyond the limit that is not more than noise does not break it. A quantity that cannot be compared breaks
    it: what was asked for was not checked.
    """
    found = comparison.difference(limit.name)
    change = found.change if found is not None else None
    if found is None or change is None or found.a is None or found.b is None:
        why = found.problem if found is not None else "measured in neither"
        return Outcome(limit, is_broken=True, sentence=f"{limit.name} cannot be checked: {why}")
    value = change
    if limit.is_relative:
        value = found.relative if found.relative is not None else math.copysign(math.inf, change) if change else 0.0
    beyond = value > limit.amount if limit.is_upper else value < limit.amount
    if beyond and not found.is_above_noise:
        return Outcome(limit, is_broken=False, sentence=f"{limit.name} is beyond it, by no more than noise")
    moved = "rises" if change > 0 else "falls" if change < 0 else "is the same"
    return Outcome(limit, is_broken=beyond, sentence=f"{limit.name} {moved}")
