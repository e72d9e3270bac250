"""What the machine did while the run was looked at: the mean and the extremes of each figure that was sampled."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.artifacts.naming import system_name
from lightning_memprof.artifacts.plain_file import open_plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from lightning_memprof.analysis.run.load import Rank, Run

__all__ = ["Figure", "RankSystem", "figures_of", "stretches", "systems"]

# No figures of the machine: where and when.
_PLACE: Final = frozenset({"step", "global_step", "point", "recorded", "time_ns"})
# No count of bytes is larger: what is, is damage, and too much for a float.
_MOST: Final = 1e18
MAX_RANKS: Final = 64
# Two days of a sample each half second and rank; of longer runs the last part is read.
MAX_BYTES: Final = 128 * 1024 * 1024


@dataclass(frozen=True)
class Figure:
    """One figure over all samples, in its own unit."""

    mean: float
    least: float
    most: float


@dataclass(frozen=True)
class RankSystem:
    """What one rank's samples say of its machine; a figure that no sample has is not there."""

    rank: int
    samples: int
    figures: Mapping[str, Figure]


@dataclass
class _Sum:
    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)


@dataclass
class _Sums:
    samples: int = 0
    figures: dict[str, _Sum] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any]) -> None:
        self.samples += 1
        for name, value in figures_of(row):
            self.figures.setdefault(name, _Sum()).add(value)


def systems(run: Run) -> tuple[RankSystem, ...]:
    """Return what the first ranks that sampled their machine saw, in their windows and, where asked, all the time."""
    found = (samples for rank in run.ranks if (samples := _of_rank(rank, run.directory)) is not None)
    return tuple(islice(found, MAX_RANKS))


def stretches(rank: Rank, directory: Path, most_bytes: int = MAX_BYTES) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the samples of each window, then those of the whole run: between two stretches nothing was sampled.

    Of a file of more than ``most_bytes`` the last part is read; a line that a dying process tore is left out.
    """
    for path in (*(window.series.get("system") for window in rank.windows), directory / system_name(rank.rank)):
        if path is not None and path.is_file():
            yield _rows(path, most_bytes)


def _rows(path: Path, most_bytes: int) -> Iterator[dict[str, Any]]:
    with open_plain(path) as file:
        if (too_long := path.stat().st_size - most_bytes) > 0:
            file.seek(too_long)
            file.readline()
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


def figures_of(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield what a sample says of the machine: each figure's name and value."""
    for name, value in row.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and name not in _PLACE and -_MOST < value < _MOST:
            yield name, float(value)


def _of_rank(rank: Rank, directory: Path) -> RankSystem | None:
    sums = _Sums()
    for row in chain.from_iterable(stretches(rank, directory)):
        sums.add(row)
    if not sums.samples:
        return None
    figures = {
        name: Figure(figure.total / figure.count, figure.least, figure.most) for name, figure in sums.figures.items()
    }
    return RankSystem(rank.rank, sums.samples, figures)
