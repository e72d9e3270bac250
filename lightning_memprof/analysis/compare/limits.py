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
    """The largest allowed increase (``>``), or decrease (``<``, a negative amount), from A to B.

    ``amount`` is a fraction if ``is_relative``, else in the unit of the quantity.
    """

    text: str
    name: str
    is_upper: bool
    amount: float
    is_relative: bool


@dataclass(frozen=True)
class Outcome:
    """The outcome of a limit; ``is_broken`` also if it could not be checked. ``sentence`` has the reason."""

    limit: Limit
    is_broken: bool
    sentence: str


def parse_limit(given: str) -> Limit:
    """Parse one limit.

    Raises:
        ConfigError: it is malformed, names an unknown quantity, or has the wrong unit.

    """
    match = _LIMIT.fullmatch(given) if len(given) <= _MOST_DIGITS * 2 else None
    if match is None:
        raise ConfigError(f"--fail-on {given[: _MOST_DIGITS * 2]!r}: not a limit; {_EXAMPLE}")
    name, unit = match["name"], match["unit"]
    if name not in QUANTITIES:
        raise ConfigError(f"--fail-on {given!r}: unknown quantity {name!r}; use one of {', '.join(QUANTITIES)}")
    amount = float(match["amount"])
    is_upper = match["sign"] == ">"
    if amount < 0 if is_upper else amount > 0:
        raise ConfigError(
            f"--fail-on {given!r}: {'>' if is_upper else '<'} limits {'an increase' if is_upper else 'a decrease'}, so "
            f"the amount must not be {'negative' if is_upper else 'positive'}; {_EXAMPLE}"
        )
    if unit == "%":
        return Limit(text=given, name=name, is_upper=is_upper, amount=amount / 100, is_relative=True)
    scales = _SCALES[QUANTITIES[name]]
    if unit not in scales:
        known = ", ".join(scale for scale in scales if scale) or "a number alone"
        raise ConfigError(f"--fail-on {given!r}: {unit or 'no unit'} is not a unit of {name}; use % or {known}")
    return Limit(text=given, name=name, is_upper=is_upper, amount=amount * scales[unit], is_relative=False)


def check(comparison: Comparison, limit: Limit) -> Outcome:
    """Return whether B exceeds a limit.

    A change beyond the limit but within noise does not break it. A quantity that cannot be compared does, and a change
    beyond the limit of too few steps.
    """
    found = comparison.difference(limit.name)
    change = found.change if found is not None else None
    if found is None or change is None or found.a is None or found.b is None:
        why = found.problem if found is not None else "not measured in either"
        return Outcome(limit, is_broken=True, sentence=f"{limit.name} cannot be checked: {why}")
    value = change
    if limit.is_relative:
        value = found.relative if found.relative is not None else math.copysign(math.inf, change) if change else 0.0
    beyond = value > limit.amount if limit.is_upper else value < limit.amount
    if beyond and found.has_too_few_steps:
        steps = f"{found.a.samples} in A, {found.b.samples} in B"
        return Outcome(limit, is_broken=True, sentence=f"{limit.name} cannot be checked: not enough steps ({steps})")
    if beyond and not found.is_above_noise:
        return Outcome(limit, is_broken=False, sentence=f"{limit.name} exceeds the limit, but within noise")
    moved = "increases" if change > 0 else "decreases" if change < 0 else "is unchanged"
    return Outcome(limit, is_broken=beyond, sentence=f"{limit.name} {moved}")
