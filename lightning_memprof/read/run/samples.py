"""The samples of the machine that a rank took, as columns."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lightning_memprof.artifacts.files import open_plain
from lightning_memprof.read.run.problems import CUT, Problem

# Not figures of the machine, but place and time.
_PLACE: Final = frozenset({"step", "global_step", "point", "recorded", "time_ns"})
# No count of bytes is larger; what is larger is damage, and too much for a float.
_MOST: Final = 1e18
# Two days of a sample each half second and rank; of longer runs the last part is read.
MAX_BYTES: Final = 128 * 1024 * 1024


class SystemStretch(msgspec.Struct, frozen=True):
    """Samples without a pause between them: ``times_ns``, None where unknown, and each figure, NaN where unknown."""

    times_ns: Sequence[int | None]
    figures: Mapping[str, Sequence[float]]

    def __len__(self) -> int:
        return len(self.times_ns)


class SystemSamples(msgspec.Struct, frozen=True):
    """The samples of each window of a rank, then those of the whole run."""

    stretches: tuple[SystemStretch, ...]
    problems: tuple[Problem, ...]


def read_samples(
    rank: int, windows: Iterable[Path | None], whole_run: Path, most_bytes: int = MAX_BYTES
) -> SystemSamples:
    """Return the samples of a rank; of a file of more than ``most_bytes`` the last part.

    Args:
        rank: its number.
        windows: the file of each window, None where it has none.
        whole_run: the file of the whole run.
        most_bytes: limit of each file.
    """
    stretches: list[SystemStretch] = []
    problems: list[Problem] = []
    for path in (*windows, whole_run):
        if path is not None and path.is_file():
            stretch, is_whole = _stretch(path, most_bytes)
            stretches.append(stretch)
            if path == whole_run and not is_whole:
                problems.append(Problem(path.name, CUT, rank))
    return SystemSamples(tuple(stretches), tuple(problems))


def _stretch(path: Path, most_bytes: int) -> tuple[SystemStretch, bool]:
    """Return the samples of a file, and whether its last line is whole."""
    times: list[int | None] = []
    figures: dict[str, array[float]] = {}
    line = b"\n"
    with open_plain(path) as file:
        if (too_long := os.fstat(file.fileno()).st_size - most_bytes) > 0:
            file.seek(too_long)
            file.readline()
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                time_ns = row.get("time_ns")
                for name, value in _figures(row):
                    column = figures.setdefault(name, array("d"))
                    column.extend([math.nan] * (len(times) - len(column)))
                    column.append(value)
                times.append(time_ns if type(time_ns) is int else None)
    for column in figures.values():
        column.extend([math.nan] * (len(times) - len(column)))
    return SystemStretch(times, figures), line.endswith(b"\n")


def _figures(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and name not in _PLACE and -_MOST < value < _MOST:
            yield name, float(value)
