"""Find the run directory that a path means."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_memprof.artifacts.naming import RUN_DIRECTORY, parse_manifest_name, parse_numbered
from lightning_memprof.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MAX_DEPTH", "MAX_DIRECTORIES", "Place", "find_run", "has_run", "is_run_directory"]

STAGES: Final = ("validate", "test", "predict")
MAX_DEPTH: Final = 6
MAX_DIRECTORIES: Final = 20_000
MAX_LISTED: Final = 10


@dataclass(frozen=True)
class Place:
    """A run directory, and the other runs that lie beside it and were not chosen."""

    directory: Path
    others: tuple[Path, ...] = ()


def find_run(path: Path) -> Place:
    """Return the run directory that ``path`` means.

    Args:
        path: a run directory, a log directory that holds one, or a parent directory with one run somewhere in it.
            Of several runs in one log directory the newest is taken.

    Raises:
        ArtifactError: nothing is there, no run is in it, or several are.

    """
    if not path.exists():
        msg = f"{path}: there is no such directory; give a log directory, its {RUN_DIRECTORY} directory, or a parent"
        raise ArtifactError(msg)
    start = (path if path.is_dir() else path.parent).absolute()
    if is_run_directory(start):
        return Place(start)
    here = _runs_in(start)
    if here:
        return Place(here[-1], (*here[:-1], *_stage_runs(start)))
    homes = _homes(start)
    if not homes:
        msg = (
            f"{path}: no run is in it (a run has {RUN_DIRECTORY}/manifest.rank00000.jsonl); "
            "train with MemProfilerCallback, or give the log directory of a run"
        )
        raise ArtifactError(msg)
    if len(homes) > 1:
        raise ArtifactError(_several(path, homes))
    runs = _runs_in(homes[0])
    return Place(runs[-1], (*runs[:-1], *_stage_runs(homes[0])))


def has_run(path: Path) -> bool:
    """Say whether a directory is a run, or has one or several somewhere in it."""
    start = path.absolute()
    return is_run_directory(start) or bool(_runs_in(start) or _homes(start))


def is_run_directory(path: Path) -> bool:
    """Say whether a rank's manifest lies directly in ``path``."""
    try:
        with os.scandir(path) as entries:
            return any(parse_manifest_name(entry.name) is not None for entry in entries)
    except OSError:
        return False


def _runs_in(home: Path) -> list[Path]:
    """Return the runs of one log directory, oldest first."""
    try:
        names = [(parse_numbered(entry.name), entry.name) for entry in os.scandir(home) if entry.is_dir()]
    except OSError:
        return []
    runs = sorted((number, name) for (base, number), name in names if base == RUN_DIRECTORY)
    return [home / name for _, name in runs if is_run_directory(home / name)]


def _stage_runs(home: Path) -> Iterator[Path]:
    for stage in STAGES:
        yield from _runs_in(home / stage)


def _homes(start: Path) -> list[Path]:
    """Return the log directories below ``start``; those of a stage beside its fit's are left to the fit's."""
    homes: set[Path] = set()
    depth_of_start = len(start.parts)
    for seen, (current, directories, _) in enumerate(os.walk(start)):
        here = Path(current)
        if any(parse_numbered(name)[0] == RUN_DIRECTORY for name in directories) and _runs_in(here):
            homes.add(here)
        directories[:] = sorted(name for name in directories if parse_numbered(name)[0] != RUN_DIRECTORY)
        if len(here.parts) - depth_of_start >= MAX_DEPTH:
            directories.clear()
        if seen >= MAX_DIRECTORIES:
            break
    return sorted(home for home in homes if not (home.name in STAGES and home.parent in homes))


def _several(path: Path, homes: list[Path]) -> str:
    listed = ", ".join(str(home) for home in homes[:MAX_LISTED])
    more = f" and {len(homes) - MAX_LISTED} more" if len(homes) > MAX_LISTED else ""
    return f"{path}: {len(homes)} runs are in it, name one of them: {listed}{more}"
