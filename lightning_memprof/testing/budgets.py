"""Budgets of a test's training runs: the arguments of the mark, the baseline file, and what exceeds them."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import msgspec

from lightning_memprof.account.estimate import parse_bytes
from lightning_memprof.artifacts.files import own_temporary, read_plain
from lightning_memprof.errors import ConfigError
from lightning_memprof.testing.figures import BYTES, COUNTS, LIGHTNING_SYNCS, Figures
from lightning_memprof.units import format_bytes, format_count

_QUANTITIES: Final = (*BYTES, *COUNTS)
_PERCENT: Final = re.compile(r"\s*(-?\d{1,9}(?:\.\d{1,9})?)\s*%\s*", re.ASCII)
_VERSION: Final = 1
_UPDATE: Final = "pytest --memprof-update writes it"
_SHOWN: Final = 5
_LONGEST_NAME: Final = 100


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of each training run of a test, by quantity; and a baseline that none may exceed by more than a share."""

    limits: Mapping[str, int] = field(default_factory=dict)
    baseline: Path | None = None
    tolerance: Fraction = Fraction(0)


class _Baseline(msgspec.Struct):
    """A baseline file: the figures of each test's training runs, by the test's name."""

    tests: dict[str, list[Figures]]
    version: int = _VERSION


def budget_of(marks: Iterable[Mapping[str, Any]], root: Path) -> Budget:
    """Return the budget of several marks; of an argument that several have, the first one counts.

    Args:
        marks: their arguments, those of the test's own mark first.
        root: directory of relative baselines.

    Raises:
        ConfigError: an argument is unknown or invalid.
    """
    given: dict[str, Any] = {}
    for arguments in marks:
        given = {**arguments, **given}
    baseline, tolerance = given.pop("baseline", None), given.pop("tolerance", None)
    if baseline is not None and not (isinstance(baseline, str | os.PathLike) and os.fspath(baseline)):
        raise ConfigError(f"baseline={baseline!r}: must be the path of a JSON file")
    if tolerance is not None and baseline is None:
        raise ConfigError(f"tolerance={tolerance!r}: applies to a baseline; add baseline='tests/baselines/gpt.json'")
    share = Fraction(0) if tolerance is None else parse_share("tolerance", tolerance)
    if share < 0:
        raise ConfigError(f"tolerance={tolerance!r}: must not be negative")
    return Budget(
        limits={name: _limit(name, value) for name, value in given.items()},
        baseline=None if baseline is None else root / os.fspath(baseline),
        tolerance=share,
    )


def _limit(name: str, value: Any) -> int:
    if name not in _QUANTITIES:
        near = difflib.get_close_matches(name, (*_QUANTITIES, "baseline", "tolerance"), n=1)
        hint = f"did you mean {near[0]}?" if near else f"use {', '.join(_QUANTITIES)}, baseline or tolerance"
        raise ConfigError(f"{name}={value!r}: unknown quantity; {hint}")
    if name in BYTES and isinstance(value, str):
        return parse_bytes(name, value)
    if type(value) is not int or value < 0:
        kind = f"a size, as in {name}='600 MiB'" if name in BYTES else "a count, an integer of at least 0"
        raise ConfigError(f"{name}={value!r}: must be {kind}")
    return value


def parse_share(name: str, value: Any) -> Fraction:
    """Return the share of ``"5%"``.

    Raises:
        ConfigError: it is something else; ``name`` is in the message.
    """
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"{name}={value!r}: must be a percentage, as in {name}='1%'")
    return Fraction(match[1]) / 100


def amount(quantity: str, value: int) -> str:
    """Return a value of a quantity as text."""
    return format_bytes(value) if quantity in BYTES else f"{value:,}"


def excesses(budget: Budget, trainings: Sequence[Figures], baseline: Sequence[Figures] | None) -> list[str]:
    """Return what exceeds the budget, a paragraph each; ``baseline`` are the figures to compare with."""
    found = []
    if baseline is not None and len(baseline) != len(trainings):
        counts = f"{format_count(len(trainings), 'training')}, its baseline {len(baseline)}"
        found.append(f"the test has {counts}: pytest --memprof-update writes a new one")
        baseline = None
    for index, figures in enumerate(trainings):
        before = None if baseline is None else baseline[index]
        where = f"training {index + 1} of {len(trainings)}: " if len(trainings) > 1 else ""
        found += [where + text for text in _over(budget, figures, before)]
    return found


def reductions(trainings: Sequence[Figures], baseline: Sequence[Figures]) -> list[str]:
    """Return the quantities that are below the baseline, with their change."""
    pairs = zip(trainings, baseline, strict=False)
    changes = [
        (name, figures.values.get(name, was) - was) for figures, old in pairs for name, was in old.values.items()
    ]
    return [f"{name} -{amount(name, -change)}" for name, change in changes if change < 0]


def _over(budget: Budget, figures: Figures, before: Figures | None) -> Iterator[str]:
    allowed = f"; {float(budget.tolerance * 100):g}% is allowed" if budget.tolerance else ""
    bounds = [(name, limit, limit, f"the budget of {amount(name, limit)}") for name, limit in budget.limits.items()]
    if before is not None:
        bounds += [
            (name, int(was * (1 + budget.tolerance)), was, f"its baseline of {amount(name, was)}{allowed}")
            for name, was in before.values.items()
        ]
    for name, bound, base, described in bounds:
        value = figures.values.get(name)
        if value is None:
            yield f"{name} was not measured: {figures.missing.get(name, 'unknown reason')}"
        elif value > bound:
            over = f"{amount(name, value - base)}{f' ({(value - base) / base:.1%})' if base else ''}"
            yield "\n".join(
                [f"{name} {amount(name, value)} is {over} over {described}", *_where(name, figures, before)]
            )


def _where(name: str, figures: Figures, before: Figures | None) -> Iterator[str]:
    """Yield lines that say where a quantity has grown, or its largest parts."""
    for part in (name, "saved_activations") if name in {"peak", "activations"} else (name,):
        after = figures.parts.get(part, {})
        old = {} if before is None else before.parts.get(part, {})
        changes = {place: size - old.get(place, 0) for place, size in after.items() if size > old.get(place, 0)}
        ordered = sorted(changes, key=lambda place: (-changes[place], place))
        if part != name and ordered:
            yield f"  {part}:"
        for place in ordered[:_SHOWN]:
            yield f"  {_growth(part, place, changes[place], old.get(place, 0), is_new=before is None)}"
        if len(ordered) > _SHOWN:
            yield f"  and {len(ordered) - _SHOWN} more"
    if name == "syncs" and (uncounted := sum(figures.parts.get(LIGHTNING_SYNCS, {}).values())):
        yield f"  not counted: {format_count(uncounted, 'sync')} of Lightning's own code"
    if before is not None and before.made_with != figures.made_with:
        yield f"  the baseline is from {before.made_with}, this is {figures.made_with}"


def _growth(quantity: str, place: str, change: int, was: int, *, is_new: bool) -> str:
    # Names of kernels have thousands of characters.
    place = f"{place[:_LONGEST_NAME]}..." if len(place) > _LONGEST_NAME else place
    if is_new:
        return f"{place}: {amount(quantity, change)}"
    return f"{place}: +{amount(quantity, change)} ({amount(quantity, was)} to {amount(quantity, was + change)})"


def read_baseline(path: Path, test: str) -> Sequence[Figures]:
    """Return the figures of a test's training runs.

    Raises:
        ConfigError: the file is missing or damaged, or does not have this test.
    """
    if not path.exists():
        raise ConfigError(f"baseline {path} does not exist: {_UPDATE}")
    found = _read(path).tests.get(test)
    if found is None:
        raise ConfigError(f"baseline {path} does not have {test}: {_UPDATE}")
    return found


def _read(path: Path) -> _Baseline:
    try:
        found = msgspec.json.decode(read_plain(path), type=_Baseline)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"baseline {path} cannot be read ({error}): remove it, and {_UPDATE}") from error
    if found.version != _VERSION:
        raise ConfigError(f"baseline {path} has version {found.version}: this package reads version {_VERSION}")
    return found


def write_baseline(path: Path, test: str, trainings: Sequence[Figures]) -> None:
    """Put the figures of a test's training runs into a file that other tests, and other processes, write too.

    Raises:
        ConfigError: the file cannot be read or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The file itself is replaced: its lock would be that of the old one.
        with _locked(path.parent):
            tests = {**(_read(path).tests if path.exists() else {}), test: list(trainings)}
            content = msgspec.json.encode(_Baseline(tests=dict(sorted(tests.items()))))
            temporary = own_temporary(path)
            temporary.write_bytes(msgspec.json.format(content, indent=1) + b"\n")
            temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"baseline {path} cannot be written ({error.strerror})") from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock a directory against other processes; Windows has no such lock."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)
