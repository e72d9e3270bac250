"""Comparison of two runs, traces or snapshots: the differences above noise, and limits such as ``step_ns>2ms``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal

import msgspec

from lightning_memprof.compare.model import (
    GROUPS,
    QUANTITIES,
    Change,
    Comparison,
    Difference,
    Measure,
    NamedChange,
    Side,
    Unit,
)
from lightning_memprof.compare.significance import drift, rank_test
from lightning_memprof.errors import ConfigError
from lightning_memprof.units import GIB, KIB, MIB

# The median of n samples has a standard error of 1.2533 standard deviations / sqrt(n); a difference of three errors is
# chance in fewer than 1 of 300 comparisons.
_MEDIAN_ERROR: Final = 1.2533
_ERRORS: Final = 3.0
# Smaller phases and operators are not reported, whatever their change.
_LEAST_SHARE_OF_STEP: Final = 0.01
# Resolution of clocks and schedulers.
_LEAST_NS: Final = 20_000
# What is timed in a few recorded steps only: two runs of the same program differ by up to a quarter.
_NAMED_TIME_SHARE: Final = 0.25
_NAMED_BYTES_SHARE: Final = 0.01
# Of the bytes at the peak; smaller sites vary with allocator rounding.
_LEAST_SHARE_OF_PEAK: Final = 0.005
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


def compare(a: Side, b: Side) -> Comparison:
    """Compare two sides.

    A change of steps is above noise if a rank test confirms it and it exceeds the resolution and the drift within a
    side; another change if it exceeds the spread of either side's samples, three standard errors of the difference of
    their medians, and the resolution. Of steps too few for a test it must also exceed a quarter.

    Raises:
        ConfigError: the two are of different kinds, such as a run and a trace.
    """
    if a.kind != b.kind:
        raise ConfigError(
            f"{a.label} is {_KIND_WORDS[a.kind]} and {b.label} {_KIND_WORDS[b.kind]}: compare two of the same kind"
        )
    names = [name for name in QUANTITIES if name in a.measures or name in b.measures]
    scale = _scale(a, b)
    return Comparison(
        a=a,
        b=b,
        differences=tuple(_difference(name, a.measures.get(name), b.measures.get(name), scale) for name in names),
        changes=tuple(change for group in GROUPS for change in _changes(group, a, b, scale)),
        left_out={
            group: f"only in {side.label}"
            for group in GROUPS
            for side, other in ((a, b), (b, a))
            if group in side.named and group not in other.named
        },
    )


_KIND_WORDS: Final = {"run": "a run", "traces": "a trace", "snapshots": "a snapshot"}


def _scale(a: Side, b: Side) -> Mapping[str, float]:
    """Return the step time in ns and the peak in bytes of the smaller side, and the noise as a share of the step."""
    steps = [side.measures["step_ns"] for side in (a, b) if "step_ns" in side.measures]
    peaks = [
        side.measures[name].value
        for side in (a, b)
        for name in ("peak_allocated_bytes", "peak_requested_bytes")
        if name in side.measures
    ]
    noise = max((step.noise / step.value for step in steps if step.value), default=0.0)
    return {
        "ns": min((step.value for step in steps), default=0.0),
        "bytes": min(peaks, default=0.0),
        "noise": noise,
    }


def _difference(name: str, a: Measure | None, b: Measure | None, scale: Mapping[str, float]) -> Difference:
    unit = QUANTITIES[name]
    problem = None
    if a is None or b is None:
        problem = f"not measured in {'A' if a is None else 'B'}"
    elif a.source != b.source:
        problem = f"different sources: A {a.source}, B {b.source}"
    needed, tested = 0.0, None
    if a is not None and b is not None and a.steps and b.steps:
        least = _least_ns(scale) if unit == "ns" else _LEAST_SHARE_OF_STEP * min(a.value, b.value)
        needed, tested = max(least, drift(a.steps), drift(b.steps)), rank_test(a.steps, b.steps)
        alone = max(_needed_of_value(a, b, unit, scale), _NAMED_TIME_SHARE * max(a.value, b.value))
        if tested.confidence is None and abs(b.value - a.value) > alone:
            needed, tested = alone, None
    elif a is not None and b is not None:
        needed = _needed_of_value(a, b, unit, scale)
    return Difference(name=name, unit=unit, a=a, b=b, needed=needed, rank_test=tested, problem=problem)


def _least_ns(scale: Mapping[str, float]) -> float:
    return max(_LEAST_NS, _LEAST_SHARE_OF_STEP * scale["ns"])


def _needed_of_value(a: Measure, b: Measure, unit: Unit, scale: Mapping[str, float]) -> float:
    error = math.sqrt(sum((_MEDIAN_ERROR * measure.noise) ** 2 / max(measure.samples, 1) for measure in (a, b)))
    needed = max(a.noise, b.noise, _ERRORS * error if min(a.samples, b.samples) > 1 else 0.0)
    return max(needed, _least_ns(scale)) if unit == "ns" else needed


def _changes(group: str, a: Side, b: Side, scale: Mapping[str, float]) -> list[NamedChange]:
    """Return the entries of a group that appeared, disappeared or changed, the largest change first."""
    if group not in a.named or group not in b.named:
        return []
    found = list(_changes_by_name(group, a, b, scale))
    return sorted(found, key=lambda change: (-abs((change.b or 0) - (change.a or 0)), change.name))


def _changes_by_name(group: str, a: Side, b: Side, scale: Mapping[str, float]) -> Iterator[NamedChange]:
    unit = GROUPS[group][0]
    before, after = a.named[group], b.named[group]
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        spread = max(side.spreads.get(group, {}).get(name, 0.0) for side in (a, b))
        if old is not None and new is not None and unit == "ns":
            # A slow phase of the machine slows every operator of a step.
            spread = max(spread, scale["noise"] * max(old, new))
        if abs((new or 0) - (old or 0)) <= max(spread, _needed(group, max(old or 0, new or 0), scale)):
            continue
        kind: Change = "appeared" if old is None else "disappeared" if new is None else "changed"
        sentence = (b if new is not None else a).sentences.get(name) if group == "findings" else None
        yield NamedChange(group=group, name=name, kind=kind, unit=unit, a=old, b=new, title=sentence)


def _needed(group: str, value: float, scale: Mapping[str, float]) -> float:
    unit = GROUPS[group][0]
    if unit == "ns":
        return max(_least_ns(scale), _NAMED_TIME_SHARE * value)
    if group == "stacks":
        return max(_NAMED_BYTES_SHARE * value, _LEAST_SHARE_OF_PEAK * scale["bytes"])
    return _NAMED_BYTES_SHARE * value if unit == "bytes" else 0.0


class Limit(msgspec.Struct, frozen=True):
    """The largest allowed increase (``>``), or decrease (``<``, a negative amount), from A to B.

    ``amount`` is a fraction if ``is_relative``, else in the unit of the quantity.
    """

    text: str
    name: str
    is_upper: bool
    amount: float
    is_relative: bool


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a limit; ``sentence`` has the reason.

    ``fail`` also if it could not be checked, ``inconclusive`` if the change exceeds the limit but is within noise.
    """

    limit: Limit
    status: Literal["pass", "fail", "inconclusive"]
    title: str


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

    A quantity that cannot be compared fails, and a change beyond the limit of too few steps.
    """
    found = comparison.difference(limit.name)
    change = found.change if found is not None else None
    if found is None or change is None or found.a is None or found.b is None:
        why = found.problem if found is not None else "not measured in either"
        return Outcome(limit, "fail", title=f"{limit.name} cannot be checked: {why}")
    value = change
    if limit.is_relative:
        value = found.relative if found.relative is not None else math.copysign(math.inf, change) if change else 0.0
    beyond = value > limit.amount if limit.is_upper else value < limit.amount
    if beyond and found.has_too_few_steps:
        steps = f"{found.a.samples} in A, {found.b.samples} in B"
        return Outcome(limit, "fail", title=f"{limit.name} cannot be checked: not enough steps ({steps})")
    if beyond and not found.is_above_noise:
        return Outcome(limit, "inconclusive", title=f"{limit.name} exceeds the limit, but within noise")
    moved = "increases" if change > 0 else "decreases" if change < 0 else "is unchanged"
    return Outcome(limit, "fail" if beyond else "pass", title=f"{limit.name} {moved}")
