"""Runs that are served to others, as over HTTP: no file outside one directory is read."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec.structs import replace

from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.load import load_run
from lightning_memprof.read.run.locate import find_run
from lightning_memprof.read.run.model import Rank, Run
from lightning_memprof.read.run.problems import Problem


def is_below(path: Path, top: Path) -> bool:
    """Return whether a file is below ``top``, a path without symbolic links, when all links are followed."""
    try:
        return Path(os.path.realpath(path)).is_relative_to(top)
    except (OSError, ValueError):
        return False


def load_confined(path: Path, top: Path | None, *, rank: int | None = None) -> Run:
    """Read a run as :func:`lightning_memprof.read.run.load.load_run`, without files outside ``top``.

    Listed files elsewhere are left out, each with a problem.

    Args:
        path: the run.
        top: a directory without symbolic links; None for no limit.
        rank: a rank that is read in full however many there are.

    Raises:
        ArtifactError: as there; or a file of the run directory is a link to another place.
    """
    if top is None:
        return load_run(path, rank=rank)
    directory = find_run(path).directory
    refuse_links(directory, top)
    run = load_run(directory, rank=rank)
    outside = [artifact for artifact in run.artifacts if not is_below(artifact.file, top)]
    if not outside:
        return run
    left_out = {artifact.file for artifact in outside}
    return replace(
        run,
        artifacts=tuple(artifact for artifact in run.artifacts if artifact.file not in left_out),
        ranks=tuple(_without(rank, left_out) for rank in run.ranks),
    ).with_problems(Problem(artifact.path, f"is outside {top} and is not read", artifact.rank) for artifact in outside)


def _without(rank: Rank, left_out: set[Path]) -> Rank:
    windows = (
        replace(window, series={name: file for name, file in window.series.items() if file not in left_out})
        for window in rank.windows
    )
    return replace(rank, windows=tuple(windows))


def refuse_links(directory: Path, top: Path) -> None:
    """Refuse a run with links that lead out of ``top``: some files are read by their names alone.

    Raises:
        ArtifactError: there is one.
    """
    pending = [directory]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_symlink() and not is_below(Path(entry.path), top):
                    raise ArtifactError(
                        f"{entry.path}: is a link that leads out of {top}; copy what it names, or start on its parent"
                    )
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
