"""Find the run directory that a path means."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_memprof.artifacts.files import open_plain
from lightning_memprof.artifacts.manifest import decode_fact
from lightning_memprof.artifacts.naming import RUN_DIRECTORY, manifest_name, parse_manifest_name, parse_numbered
from lightning_memprof.errors import ArtifactError

if TYPE_CHECKING:
    from lightning_memprof.read.run.model import Run

STAGES: Final = ("validate", "test", "predict")
MAX_DEPTH: Final = 6
# A second or two; of more a person meant another directory.
MAX_DIRECTORIES: Final = 5_000
_MAX_LINE_BYTES: Final = 1 << 20


class Place(msgspec.Struct, frozen=True):
    """A run directory, and the other runs in the same directory."""

    directory: Path
    others: tuple[Path, ...] = ()


class Walk:
    """A directory and those below it, the nearest first, as ``os.walk`` gives them: as deep and as many as is quick.

    Links to directories are named, and not followed.

    Attributes:
        is_cut: whether the walk has left directories out; known at its end.
    """

    def __init__(self, start: Path) -> None:
        self._start = start
        self._looked_at = 0
        self.is_cut = False

    def __iter__(self) -> Iterator[tuple[Path, list[str], list[str]]]:
        """Yield a directory, the names of the directories in it (what is taken out is not walked) and of the files."""
        ahead = deque([(self._start, 0)])
        while ahead:
            if self._looked_at == MAX_DIRECTORIES:
                self.is_cut = True
                return
            here, depth = ahead.popleft()
            self._looked_at += 1
            directories, files = _entries(here)
            yield here, directories, files
            if depth < MAX_DEPTH:
                ahead += [(below, depth + 1) for name in directories if not (below := here / name).is_symlink()]

    def check_whole(self, path: Path) -> None:
        """Refuse to say what is not there of a directory that is too large to look through.

        Raises:
            ArtifactError: the walk, which has come to its end, has left directories out.
        """
        if self.is_cut:
            raise ArtifactError(
                f"{path}: {self._looked_at:,} directories were looked at, no run, trace or snapshot is in them, and "
                "there are more; name a run's log directory or a file itself"
            )


def find_run(path: Path) -> Place:
    """Return the run directory that ``path`` means.

    Args:
        path: a run directory; a log directory, which means the newest run in it; or a parent of log directories, which
            means the newest run below it. The newest run is the one that started last.

    Raises:
        ArtifactError: the path does not exist, or there is no run in it.
    """
    if not path.exists():
        raise ArtifactError(
            f"{path}: there is no such directory; give a log directory, its {RUN_DIRECTORY} directory, or a parent"
        )
    start = (path if path.is_dir() else path.parent).absolute()
    if is_run_directory(start):
        return Place(start)
    if (here := _place(start)) is not None:
        return here
    walk = Walk(start)
    found = _newest(_homes(walk))
    if found is None:
        walk.check_whole(path)
        raise ArtifactError(
            f"{path}: no run is in it (a run has {RUN_DIRECTORY}/manifest.rank00000.jsonl); "
            "train with MemProfilerCallback, or give the log directory of a run"
        )
    return found


def newest_run(path: Path) -> Path:
    """Return the newest run directory anywhere below a directory; without a run, the directory.

    Unlike :func:`find_run`, it also searches below a log directory: a working directory may happen to be one.
    """
    start = path.absolute()
    found = None if is_run_directory(start) else _newest(_homes(Walk(start)))
    return path if found is None else found.directory


def has_run(path: Path) -> bool:
    """Say whether a directory is a run, or has one or several somewhere in it."""
    start = path.absolute()
    return is_run_directory(start) or bool(_runs_in(start) or _homes(Walk(start)))


def is_run_directory(path: Path) -> bool:
    """Say whether a rank's manifest lies directly in ``path``."""
    return bool(ranks_in(path))


def ranks_in(directory: Path) -> list[int]:
    """Return the ranks that have a manifest in a directory, the lowest first."""
    return sorted(rank for name in names_in(directory) if (rank := parse_manifest_name(name)) is not None)


def names_in(directory: Path) -> list[str]:
    """Return the names of what is in a directory; none where it is none, or may not be looked at."""
    try:
        return sorted(os.listdir(directory))  # noqa: PTH208 names of thousands
    except OSError:
        return []


def shown_path(path: Path) -> str:
    """Return a path to type here: relative if it is below the working directory."""
    try:
        return os.fspath(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return os.fspath(path)


def shown_place(path: Path, root: Path, url: str | None) -> str:
    """Return a path or URL of a run to type here.

    Args:
        path: a file or a directory.
        root: the directory above the run directory.
        url: the URL that ``root`` is a copy of; None for a local run.
    """
    if url is not None and path == root.parent:
        return url.rpartition("/")[0]
    if url is None or not path.is_relative_to(root):
        return shown_path(path)
    return f"{url}/{path.relative_to(root).as_posix()}".removesuffix("/.")


def log_directory(run: Run) -> Path:
    """Return the Trainer's log directory: a stage other than fit keeps its files one level below."""
    stage = run.lead.facts.stage
    return run.root.parent if stage != "fit" and run.root.name == stage else run.root


def trace_directory(run: Run, trace: Path) -> Path:
    """Return the directory in which TensorBoard finds a trace: the log directory, or the trace's own if elsewhere."""
    home = log_directory(run)
    return home if trace.is_relative_to(home) else trace.parent


def _entries(directory: Path) -> tuple[list[str], list[str]]:
    """Return the names of the directories in one, and of its files; none where it may not be looked at."""
    _, directories, files = next(os.walk(directory), ("", [], []))
    return sorted(directories), sorted(files)


def _runs_in(home: Path) -> list[Path]:
    """Return the runs of one log directory, oldest first."""
    names = [(parse_numbered(name), name) for name in _entries(home)[0]]
    runs = sorted((number, name) for (base, number), name in names if base == RUN_DIRECTORY)
    return [home / name for _, name in runs if is_run_directory(home / name)]


def _started_ns(home: Path) -> int:
    """Return when the newest run of a log directory started, by its lowest rank's manifest; 0 where that is unknown.

    File times are not used: other processes change them, for example by writing a report into an older run.
    """
    directory = _runs_in(home)[-1]
    try:
        with open_plain(directory / manifest_name(ranks_in(directory)[0])) as stream:
            row = decode_fact(stream.readline(_MAX_LINE_BYTES))
    except (OSError, ValueError):
        return 0
    return getattr(row, "time_ns", None) or 0


def _newest(homes: Sequence[Path]) -> Place | None:
    """Return the newest run of several log directories; None without one."""
    return _place(max(homes, key=lambda home: (_started_ns(home), home))) if homes else None


def _place(home: Path) -> Place | None:
    """Return the newest run of a log directory and the others in it, stages included; None where there is none."""
    runs = _runs_in(home)
    if not runs:
        return None
    return Place(runs[-1], (*runs[:-1], *(run for stage in STAGES for run in _runs_in(home / stage))))


def _homes(walk: Walk) -> list[Path]:
    """Return the log directories where it leads; those of a stage beside its fit's are left to the fit's."""
    homes: set[Path] = set()
    for here, directories, _ in walk:
        if any(parse_numbered(name)[0] == RUN_DIRECTORY for name in directories) and _runs_in(here):
            homes.add(here)
        directories[:] = [name for name in directories if parse_numbered(name)[0] != RUN_DIRECTORY]
    return sorted(home for home in homes if not (home.name in STAGES and home.parent in homes))
