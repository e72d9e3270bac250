"""Runs below a log directory: their list, from manifests only, and the progress of live runs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Final

from lightning_memprof.artifacts.files import open_plain
from lightning_memprof.artifacts.manifest import EndRow, Manifest, read_manifest
from lightning_memprof.artifacts.naming import RUN_DIRECTORY, manifest_name, parse_manifest_name, pulse_name
from lightning_memprof.artifacts.pulse import parse_pulse_row
from lightning_memprof.read.run.confined import refuse_links
from lightning_memprof.read.run.following import Follower
from lightning_memprof.read.run.load import window_rows
from lightning_memprof.read.run.locate import Walk
from lightning_memprof.report.document import Chart, Item, Lines, Table
from lightning_memprof.report.live import SILENT_NS, Live
from lightning_memprof.report.printers.layout import tops
from lightning_memprof.report.printers.values import cell_text, words_text
from lightning_memprof.report.sections.live import live_section, passed

# The tab polls every 2 s.
SCAN_SECONDS: Final = 1.0
# Ranks whose manifests are read to determine how the run ended.
MAX_RANKS: Final = 8
# Longest list in the tab.
MAX_RUNS: Final = 1000
MAX_CACHED: Final = 4 * MAX_RUNS
TAIL_BYTES: Final = 4096
# A live run's page is rendered again when its pulse has grown by this factor.
GROWTH: Final = 1.5
# About 50 steps; a shorter pulse does not trigger a new page.
SMALL_BYTES: Final = 4096
# A follower keeps a few hundred numbers per rank; the least recently viewed is dropped.
MAX_FOLLOWED: Final = 16
# A curve is a few hundred pixels wide.
MAX_POINTS: Final = 120


@dataclass(frozen=True)
class FoundRun:
    """A run directory; ``name`` is its POSIX path relative to ``top``, the log directory. Neither contains symlinks."""

    name: str
    directory: Path
    top: Path
    ranks: tuple[int, ...]

    @property
    def id(self) -> str:
        """Identifier in URLs: hexadecimal digits for any name, never a path."""
        return hashlib.sha256(os.fsencode(self.name)).hexdigest()[:16]

    @property
    def label(self) -> str:
        """Displayed name: without the run directory, or the log directory's own name."""
        pure = PurePosixPath(self.name)
        short = pure.parent if pure.name == RUN_DIRECTORY else pure
        return self.top.name if str(short) == "." else str(short)


class RunList:
    """Runs below the log directories; thread-safe. Symbolic links are not followed, as in TensorBoard.

    Args:
        tops: log directories by the prefix of their runs' names ("" for a single directory).
    """

    def __init__(self, tops: Mapping[str, Path]) -> None:
        self._tops = {prefix: Path(os.path.realpath(top)) for prefix, top in tops.items()}
        self._lock = threading.Lock()
        self._scanned_at = -math.inf
        self._found: dict[str, FoundRun] = {}
        self._is_truncated = False

    def scan(self) -> list[FoundRun]:
        """Return all runs, at most 1 s old."""
        with self._lock:
            if time.monotonic() - self._scanned_at > SCAN_SECONDS:
                walks = {top: Walk(top) for top in self._tops.values()}
                found = [run for prefix, top in self._tops.items() for run in _runs(prefix, walks[top], top)]
                self._found = {run.id: run for run in found[:MAX_RUNS]}
                self._is_truncated = any(walk.is_cut for walk in walks.values()) or len(found) > MAX_RUNS
                self._scanned_at = time.monotonic()
            return list(self._found.values())

    def any(self) -> bool:
        """Whether there is a run; stops at the first."""
        with self._lock:
            if self._found:
                return True
        return any(True for prefix, top in self._tops.items() for _ in _runs(prefix, Walk(top), top))

    def find(self, run_id: str) -> FoundRun | None:
        """Return the run with this id or None; an id is a lookup key and never part of a path."""
        with self._lock:
            found = self._found.get(run_id)
        return found or next((run for run in self.scan() if run.id == run_id), None)

    def document(self) -> dict[str, Any]:
        """Return the list of runs as a JSON object: state, steps, ranks and windows of each run."""
        runs = [self.facts(run) for run in self.scan()]
        runs.sort(key=lambda run_row: (-(run_row["started_ns"] or 0), run_row["label"]))
        tops = [str(top) for top in self._tops.values()]
        return {"places": tops, "is_cut": self._is_truncated, "runs": runs}

    def facts(self, found: FoundRun) -> dict[str, Any]:
        """Return the list row of one run."""
        lead = found.ranks[0]
        manifest = _manifest(found, lead)
        run, last = manifest.run, manifest.end
        ends = [last, *(_manifest(found, rank).end for rank in found.ranks[1:MAX_RANKS])]
        steps = last.steps if last else None
        state, words = _state(found, ends)
        return {
            "id": found.id,
            "label": found.label,
            "state": state,
            "words": words,
            "stage": run.stage if run else None,
            "model": manifest.training.model if manifest.training else None,
            "world_size": run.world_size if run else None,
            "ranks": list(found.ranks),
            "steps": _steps_so_far(found, lead) if steps is None else steps,
            # A window that recorded nothing keeps its planned steps.
            "windows": [
                {"index": index, "steps": (end and end.steps) or plan.active_steps, "closed": end is not None}
                for index, plan, end in window_rows(manifest)
            ],
            "started_ns": run.time_ns if run else None,
            "revision": revision(found),
        }


@lru_cache(maxsize=MAX_CACHED)
def _read(path: Path, state: tuple[int, int]) -> Manifest:  # noqa: ARG001 a file that has changed is read again
    return read_manifest(path, with_artifacts=False)


def _manifest(found: FoundRun, rank: int) -> Manifest:
    path = found.directory / manifest_name(rank)
    return _read(path, _state_of(path))


def revision(found: FoundRun) -> str:
    """Return a hash that changes when a page of the run has more to show.

    It changes when a manifest grows and each time a pulse grows by half.
    """
    state: list[Any] = []
    for rank in found.ranks:
        state.append(_state_of(found.directory / manifest_name(rank)))
        size = _state_of(found.directory / pulse_name(rank))[0]
        state.append(int(math.log(max(size, SMALL_BYTES), GROWTH)))
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]


@lru_cache(maxsize=MAX_FOLLOWED)
def _followed(found: FoundRun) -> tuple[threading.Lock, Follower]:
    refuse_links(found.directory, found.top)
    return threading.Lock(), Follower(found.directory)


def live_document(found: FoundRun) -> dict[str, Any]:
    """Return the live page of a run, as texts; it has no parts before the run has a rank. Only new rows are read.

    Raises:
        ArtifactError: a file of the run is a symlink to outside the log directory.
    """
    lock, follower = _followed(found)
    # The first read of a long pulse takes a second; pages of other runs do not wait for it.
    with lock:
        follower.look()
        section = live_section(Live(follower, time.time_ns()))
        return {"parts": [] if section is None else list(map(_part, section.parts))}


def _runs(prefix: str, walk: Walk, top: Path) -> Iterator[FoundRun]:
    """Yield the runs where a walk from ``top`` leads; links are not followed."""
    for here, directories, files in walk:
        named = ((name, parse_manifest_name(name)) for name in files)
        ranks = [rank for name, rank in named if rank is not None and not (here / name).is_symlink()]
        if ranks:
            # No run is below another one.
            directories.clear()
            below = PurePosixPath(here.relative_to(top).as_posix())
            name = str(PurePosixPath(prefix) / below)
            yield FoundRun(name=name, directory=here, top=top, ranks=tuple(sorted(ranks)))


def _state_of(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


def _state(found: FoundRun, ends: Sequence[EndRow | None]) -> tuple[str, str]:
    """Return ``running``, ``silent``, ``exception`` or ``finished``, and its text."""
    for end in ends:
        if end is not None and end.status == "exception":
            return "exception", end.exception or "ended with an exception"
    if all(end is not None for end in ends):
        return "finished", "finished"
    names = [(manifest_name(rank), pulse_name(rank)) for rank in found.ranks[:MAX_RANKS]]
    last = max(_state_of(found.directory / name)[1] for pair in names for name in pair)
    silent = max(time.time_ns() - last, 0)
    if silent < SILENT_NS:
        return "running", "running"
    return "silent", f"silent for {passed(silent)}: blocked or killed"


def _steps_so_far(found: FoundRun, rank: int) -> int | None:
    """Return the steps of a live run, from the last complete row of its pulse."""
    path = found.directory / pulse_name(rank)
    try:
        if path.is_symlink():
            return None
        with open_plain(path) as stream:
            stream.seek(max(stream.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
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


def _part(part: Item) -> dict[str, Any]:
    """Return a part of the live section; curve points are numbers, all other values are texts."""
    match part:
        case Lines():
            rows: list[Any] = [[row.label, words_text(row.words), row.style] for row in part.rows]
            return {"part": "lines", "rows": rows}
        case Table():
            rows = [list(map(cell_text, row)) for row in part.rows]
            return {"part": "table", "columns": [column.heading for column in part.columns], "rows": rows}
        case Chart():
            return {"part": "chart", "title": part.title, "values": tops(part.values, MAX_POINTS)}
    raise TypeError(f"the live section has no {type(part).__name__}")
