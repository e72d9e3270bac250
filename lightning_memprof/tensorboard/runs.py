"""The runs below a log directory, from their manifests alone."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.run.locate import MAX_DEPTH, MAX_DIRECTORIES
from lightning_memprof.artifacts.manifest import Manifest, WindowRow, read_manifest
from lightning_memprof.artifacts.naming import RUN_DIRECTORY, manifest_name, parse_manifest_name, pulse_name
from lightning_memprof.artifacts.plain_file import open_plain
from lightning_memprof.artifacts.series import parse_pulse_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lightning_memprof.artifacts.manifest import EndRow

__all__ = ["FoundRun", "RunList", "revision"]

SECOND_NS: Final = 1_000_000_000
# A pulse is written every few seconds; a run that has been silent for longer waits, or was killed.
SILENT_NS: Final = 30 * SECOND_NS
# Looking more often than a page asks shows nothing new.
FRESH_SECONDS: Final = 1.0
# Their ends are read to say how the run ended; of more ranks the first speak for all.
MOST_RANKS: Final = 8
# More fit into no list that a person reads.
MOST_RUNS: Final = 1000
MOST_KEPT: Final = 4 * MOST_RUNS
LAST_BYTES: Final = 4096
# The page of a live run is made again when its pulse is this much longer.
GROWTH: Final = 1.5
# Below this, some fifty steps, it would be made again with every few of them.
SMALL_BYTES: Final = 4096


@dataclass(frozen=True)
class FoundRun:
    """A run directory. ``name`` is its path below the log directory ``top``, with ``/``; neither path has a link."""

    name: str
    directory: Path
    top: Path
    ranks: tuple[int, ...]

    @property
    def id(self) -> str:
        """What pages ask for it by: no path, and letters and digits whatever its name is."""
        return hashlib.sha256(os.fsencode(self.name)).hexdigest()[:16]

    @property
    def label(self) -> str:
        """Its name as people know it: the log directory's, where only one run is in that."""
        pure = PurePosixPath(self.name)
        short = pure.parent if pure.name == RUN_DIRECTORY else pure
        return self.top.name if str(short) == "." else str(short)


class RunList:
    """The runs below a log directory; symbolic links are not followed, as TensorBoard does not follow them.

    Safe to use from several threads.

    Args:
        tops: the log directories, by the name that stands before their runs' ("" for the only one).

    """

    def __init__(self, tops: Mapping[str, Path]) -> None:
        self._tops = {prefix: Path(os.path.realpath(top)) for prefix, top in tops.items()}
        self._lock = threading.Lock()
        self._looked_at = -math.inf
        self._found: dict[str, FoundRun] = {}
        self._is_cut = False
        self._rows: OrderedDict[Path, tuple[tuple[int, int], Manifest]] = OrderedDict()

    def look(self) -> list[FoundRun]:
        """Return all runs, the latest made last."""
        with self._lock:
            if time.monotonic() - self._looked_at > FRESH_SECONDS:
                walk = _Walk()
                found = [run for prefix, top in self._tops.items() for run in walk.runs(prefix, top)]
                self._found = {run.id: run for run in found[:MOST_RUNS]}
                self._is_cut = walk.is_cut or len(found) > MOST_RUNS
                self._looked_at = time.monotonic()
            return list(self._found.values())

    def find(self, run_id: str) -> FoundRun | None:
        """Return the run of this id, None where there is none; an id is looked up and never part of a path."""
        with self._lock:
            found = self._found.get(run_id)
        return found or next((run for run in self.look() if run.id == run_id), None)

    def any(self) -> bool:
        """Say whether there is a run; looks no further than the first."""
        with self._lock:
            if self._found:
                return True
        walk = _Walk()
        return any(True for prefix, top in self._tops.items() for _ in walk.runs(prefix, top))

    def document(self) -> dict[str, Any]:
        """Return what the page lists, as JSON: of each run how far it is, its ranks and its windows."""
        runs = [self.facts(run) for run in self.look()]
        runs.sort(key=lambda run_row: (-(run_row["started_ns"] or 0), run_row["label"]))
        places = [str(top) for top in self._tops.values()]
        return {"places": places, "is_cut": self._is_cut, "runs": runs}

    def facts(self, found: FoundRun) -> dict[str, Any]:
        """Return the row of one run."""
        lead = found.ranks[0]
        manifest = self._manifest(found, lead)
        run, end = manifest.run, manifest.end
        ends = [end, *(self._manifest(found, rank).end for rank in found.ranks[1:MOST_RANKS])]
        steps = end.steps if end else None
        state, words = _state(found, ends)
        return {
            "id": found.id,
            "label": found.label,
            "state": state,
            "words": words,
            "stage": run.stage if run else None,
            "model": manifest.training.model if manifest.training else None,
            "device": run.device if run else None,
            "world_size": run.world_size if run else None,
            "ranks": list(found.ranks),
            "steps": _steps_so_far(found, lead) if steps is None else steps,
            "windows": _windows(manifest),
            "started_ns": run.time_ns if run else None,
            "revision": revision(found),
        }

    def _manifest(self, found: FoundRun, rank: int) -> Manifest:
        path = found.directory / manifest_name(rank)
        state = _state_of(path)
        with self._lock:
            kept = self._rows.get(path)
            if kept is not None and kept[0] == state:
                self._rows.move_to_end(path)
                return kept[1]
        manifest = read_manifest(path, with_artifacts=False)
        with self._lock:
            self._rows[path] = state, manifest
            while len(self._rows) > MOST_KEPT:
                self._rows.popitem(last=False)
        return manifest


def revision(found: FoundRun) -> str:
    """Return what changes when a page of the run has more to show.

    That is whenever a manifest gets a line, when a pulse is half as long again, and when the pulse of a run that has
    ended is whole.
    """
    state: list[Any] = []
    for rank in found.ranks:
        state.append(_state_of(found.directory / manifest_name(rank)))
        size = _state_of(found.directory / pulse_name(rank))[0]
        state.append(int(math.log(max(size, SMALL_BYTES), GROWTH)))
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]


class _Walk:
    """A walk through directories that ends where it would take long."""

    def __init__(self) -> None:
        self.is_cut = False
        self._seen = 0

    def runs(self, prefix: str, top: Path) -> Iterator[FoundRun]:
        """Yield the runs below ``top``, by name."""
        pending = [(top, 0)]
        while pending:
            here, depth = pending.pop()
            self._seen += 1
            if self._seen > MAX_DIRECTORIES:
                self.is_cut = True
                return
            directories, ranks = _listed(here)
            if ranks:
                below = PurePosixPath(here.relative_to(top).as_posix())
                yield FoundRun(
                    name=str(PurePosixPath(prefix) / below), directory=here, top=top, ranks=tuple(sorted(ranks))
                )
            elif depth < MAX_DEPTH + 1:
                pending += [(here / name, depth + 1) for name in sorted(directories, reverse=True)]
            elif directories:
                self.is_cut = True


def _listed(place: Path) -> tuple[list[str], list[int]]:
    """Return the names of the directories in one, and the ranks whose manifests are; links are neither."""
    directories: list[str] = []
    ranks: list[int] = []
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.name)
                elif (rank := parse_manifest_name(entry.name)) is not None and entry.is_file(follow_symlinks=False):
                    ranks.append(rank)
    except OSError:
        return [], []
    return directories, ranks


def _state_of(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _state(found: FoundRun, ends: Sequence[EndRow | None]) -> tuple[str, str]:
    """Return ``running``, ``silent``, ``exception`` or ``finished``, and that in words."""
    for end in ends:
        if end is not None and end.status == "exception":
            return "exception", end.exception or "ended with an exception"
    if all(end is not None for end in ends):
        return "finished", "finished"
    names = [(manifest_name(rank), pulse_name(rank)) for rank in found.ranks[:MOST_RANKS]]
    last = max(_state_of(found.directory / name)[1] for both in names for name in both)
    silent = max(time.time_ns() - last, 0)
    if silent < SILENT_NS:
        return "running", "running"
    return "silent", f"silent for {_duration(silent)}: it waits, or was killed"


def _duration(ns: int) -> str:
    minutes = ns // (60 * SECOND_NS)
    if minutes < 1:
        return f"{ns // SECOND_NS} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 48 * 60 else f"{minutes // 1440} days"


def _steps_so_far(found: FoundRun, rank: int) -> int | None:
    """Return the steps of a live run, by the last whole row of its pulse."""
    path = found.directory / pulse_name(rank)
    try:
        if path.is_symlink():
            return None
        with open_plain(path) as stream:
            stream.seek(max(stream.seek(0, os.SEEK_END) - LAST_BYTES, 0))
            lines = stream.read().split(b"\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        try:
            step = parse_pulse_row(line.decode("ascii"))["step"]
        except ValueError:
            continue
        return None if step is None else step + 1
    return 0


def _windows(manifest: Manifest) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for row in manifest.of(WindowRow):
        index = row.window
        if index is None:
            continue
        closed = row.event == "close"
        steps = row.steps if closed else row.active_steps
        # A window that recorded nothing has no steps of its own; those that were planned say where it lay.
        kept = found.get(index, {}).get("steps") if not steps else None
        found[index] = {"index": index, "steps": kept or list(steps), "closed": closed}
    return [found[index] for index in sorted(found)]
