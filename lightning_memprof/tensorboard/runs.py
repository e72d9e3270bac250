"""Runs below a log directory: their list, from manifests only, and the progress of live runs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from lightning_memprof.artifacts.files import open_plain
from lightning_memprof.artifacts.manifest import EndRow, Manifest, WindowRow, read_manifest
from lightning_memprof.artifacts.naming import RUN_DIRECTORY, manifest_name, parse_manifest_name, pulse_name
from lightning_memprof.artifacts.pulse import parse_pulse_row
from lightning_memprof.read.run.confined import refuse_links
from lightning_memprof.read.run.following import Follower
from lightning_memprof.read.run.locate import MAX_DEPTH, MAX_DIRECTORIES
from lightning_memprof.report.document import Chart, Document, Item, Lines, Stack, Table
from lightning_memprof.report.printers.layout import tops
from lightning_memprof.report.printers.values import cell_text, words_text
from lightning_memprof.report.sections.live import SILENT_NS, Watched, live_document, passed

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
        self._rows: OrderedDict[Path, tuple[tuple[int, int], Manifest]] = OrderedDict()

    def scan(self) -> list[FoundRun]:
        """Return all runs, at most 1 s old."""
        with self._lock:
            if time.monotonic() - self._scanned_at > SCAN_SECONDS:
                walk = _Walk()
                found = [run for prefix, top in self._tops.items() for run in walk.runs(prefix, top)]
                self._found = {run.id: run for run in found[:MAX_RUNS]}
                self._is_truncated = walk.is_truncated or len(found) > MAX_RUNS
                self._scanned_at = time.monotonic()
            return list(self._found.values())

    def find(self, run_id: str) -> FoundRun | None:
        """Return the run with this id or None; an id is a lookup key and never part of a path."""
        with self._lock:
            found = self._found.get(run_id)
        return found or next((run for run in self.scan() if run.id == run_id), None)

    def any(self) -> bool:
        """Whether there is a run; stops at the first."""
        with self._lock:
            if self._found:
                return True
        walk = _Walk()
        return any(True for prefix, top in self._tops.items() for _ in walk.runs(prefix, top))

    def document(self) -> dict[str, Any]:
        """Return the list of runs as a JSON object: state, steps, ranks and windows of each run."""
        runs = [self.facts(run) for run in self.scan()]
        runs.sort(key=lambda run_row: (-(run_row["started_ns"] or 0), run_row["label"]))
        tops = [str(top) for top in self._tops.values()]
        return {"places": tops, "is_cut": self._is_truncated, "runs": runs}

    def facts(self, found: FoundRun) -> dict[str, Any]:
        """Return the list row of one run."""
        lead = found.ranks[0]
        manifest = self._manifest(found, lead)
        run, end = manifest.run, manifest.end
        ends = [end, *(self._manifest(found, rank).end for rank in found.ranks[1:MAX_RANKS])]
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
            cached = self._rows.get(path)
            if cached is not None and cached[0] == state:
                self._rows.move_to_end(path)
                return cached[1]
        manifest = read_manifest(path, with_artifacts=False)
        with self._lock:
            self._rows[path] = state, manifest
            while len(self._rows) > MAX_CACHED:
                self._rows.popitem(last=False)
        return manifest


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


class LiveRuns:
    """Followers of live runs; each poll reads only new rows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followed: OrderedDict[str, tuple[threading.Lock, Follower]] = OrderedDict()

    def document(self, found: FoundRun) -> dict[str, Any]:
        """Return the live page of a run, as texts; it has no parts before the run has a rank.

        Raises:
            ArtifactError: a file of the run is a symlink to outside the log directory.
        """
        with self._lock:
            if found.id not in self._followed:
                refuse_links(found.directory, found.top)
                self._followed[found.id] = threading.Lock(), Follower(found.directory)
            lock, follower = self._followed[found.id]
            self._followed.move_to_end(found.id)
            while len(self._followed) > MAX_FOLLOWED:
                self._followed.popitem(last=False)
        # The first read of a long pulse takes a second; pages of other runs do not wait for it.
        with lock:
            follower.look()
            if not follower.ranks:
                return {"parts": []}
            watched = Watched(name=found.label, follower=follower, now_ns=time.time_ns())
            return {"parts": list(_parts(live_document(watched)))}


class _Walk:
    """A directory walk with a limit on the number of directories."""

    def __init__(self) -> None:
        self.is_truncated = False
        self._seen = 0

    def runs(self, prefix: str, top: Path) -> Iterator[FoundRun]:
        """Yield the runs below ``top``, sorted by name."""
        pending = [(top, 0)]
        while pending:
            here, depth = pending.pop()
            self._seen += 1
            if self._seen > MAX_DIRECTORIES:
                self.is_truncated = True
                return
            directories, ranks = _scan(here)
            if ranks:
                below = PurePosixPath(here.relative_to(top).as_posix())
                yield FoundRun(
                    name=str(PurePosixPath(prefix) / below), directory=here, top=top, ranks=tuple(sorted(ranks))
                )
            elif depth < MAX_DEPTH + 1:
                pending += [(here / name, depth + 1) for name in sorted(directories, reverse=True)]
            elif directories:
                self.is_truncated = True


def _scan(directory: Path) -> tuple[list[str], list[int]]:
    """Return the names of subdirectories and the ranks of manifests in a directory; symlinks are ignored."""
    directories: list[str] = []
    ranks: list[int] = []
    try:
        with os.scandir(directory) as entries:
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


def _windows(manifest: Manifest) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for row in manifest.of(WindowRow):
        index = row.window
        if index is None:
            continue
        closed = row.event == "close"
        steps = row.steps if closed else row.active_steps
        # A window that recorded nothing keeps its planned steps.
        planned = found.get(index, {}).get("steps") if not steps else None
        found[index] = {"index": index, "steps": planned or list(steps), "closed": closed}
    return [found[index] for index in sorted(found)]


def _parts(document: Document) -> Iterator[dict[str, Any]]:
    for section in document.sections:
        if section.lead:
            yield {"part": "lines", "rows": [["", words_text(section.lead), ""]]}
        yield from map(_part, section.parts)


def _part(part: Item) -> dict[str, Any]:
    """Return a part of the live page; shares and curve points are numbers, all other values are texts."""
    match part:
        case Lines():
            rows: list[Any] = [[row.label, words_text(row.words), row.style] for row in part.rows]
            return {"part": "lines", "rows": rows}
        case Table():
            rows = [list(map(cell_text, row)) for row in part.rows]
            return {"part": "table", "columns": [column.heading for column in part.columns], "rows": rows}
        case Stack():
            bars = [
                {"class": f"c-{bar.key}", "name": bar.name, "text": cell_text(bar.value), "share": bar.value.share or 0}
                for bar in part.bars
            ]
            return {"part": "stack", "title": f"{part.title}: {cell_text(part.total)}", "bars": bars}
        case Chart():
            return {"part": "chart", "title": part.title, "values": tops(part.values, MAX_POINTS)}
    raise TypeError(f"a live page has no {type(part).__name__}")
