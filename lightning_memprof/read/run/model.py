"""The data of a run: ranks, windows, their series, and missing or damaged files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from lightning_memprof.artifacts.files import read_plain
from lightning_memprof.artifacts.manifest import OverheadFacts, RunFacts, TrainingFacts
from lightning_memprof.artifacts.naming import heartbeat_name, system_name
from lightning_memprof.artifacts.rows import decode_rows
from lightning_memprof.artifacts.series import (
    ActionTotalRow,
    HangRow,
    PulseRow,
    SeriesRow,
    StallRow,
)
from lightning_memprof.read.run.ooms import OomEvent
from lightning_memprof.read.run.problems import CUT, CollectorError, Note, Problem, Unavailable
from lightning_memprof.read.run.samples import SystemSamples, read_samples
from lightning_memprof.units import format_count

Status = Literal["finished", "exception", "running or killed"]
R = TypeVar("R", bound=SeriesRow)
T = TypeVar("T")


class ArtifactFile(msgspec.Struct, frozen=True):
    """A file that the run wrote.

    ``path`` is as in the manifest, ``file`` where it is now. ``size_bytes`` is its size on disk, None where the file is
    missing.
    """

    rank: int
    collector: str
    type: str
    path: str
    file: Path
    window: int | None
    size_bytes: int | None
    sha256: str | None = None
    state: Literal["present", "missing", "torn"] = "present"


class Series(msgspec.Struct, Generic[R], frozen=True, dict=True):
    """The readable rows of a series; ``problems`` names its first damaged line."""

    rows: Sequence[R] = ()
    problems: tuple[Problem, ...] = ()

    @cached_property
    def recorded(self) -> list[R]:
        """The rows of recorded steps, without those of warmup."""
        return [row for row in self.rows if row.recorded is not False]

    @cached_property
    def by_step(self) -> Mapping[int, list[R]]:
        """The rows of each recorded step."""
        steps: dict[int, list[R]] = defaultdict(list)
        for row in self.recorded:
            if row.step is not None:
                steps[row.step].append(row)
        return dict(steps)


class _Reader(msgspec.Struct, frozen=True, dict=True):
    """Reads each series once."""

    @cached_property
    def _series(self) -> dict[tuple[type[SeriesRow], Path | None], Series[Any]]:
        return {}

    @property
    def problems(self) -> list[Problem]:
        """The problems of the series that were read so far."""
        return [problem for series in self._series.values() for problem in series.problems]

    def _read(self, kind: type[R], path: Path | None, rank: int) -> Series[R]:
        found = self._series.get((kind, path))
        if found is None:
            found = self._series[kind, path] = Series() if path is None else read_series(path, kind, rank)
        return found


def read_series(path: Path, kind: type[R], rank: int) -> Series[R]:
    """Return the readable rows of a file of JSON lines."""
    return Series(*read_lines(path, rank, "row", lambda content: decode_rows(content, kind)))


def read_lines(
    path: Path, rank: int, unit: str, decode: Callable[[bytes], tuple[list[T], str | None]]
) -> tuple[list[T], tuple[Problem, ...]]:
    """Return the readable rows of a file of lines and its problems; ``unit`` is what a row is of."""
    try:
        content = read_plain(path)
    except OSError as error:
        message = f"{path}: cannot be read ({error.strerror}); is the run directory complete?; 0 {unit}s could be read"
        return [], (Problem(path.name, message, rank),)
    rows, damage = decode(content)
    messages = [f"{path}:{damage}; {format_count(len(rows), unit)} could be read"] if damage else []
    if content and not content.endswith(b"\n"):
        messages.append(CUT)
    return rows, tuple(Problem(path.name, message, rank) for message in messages)


class RecordedWindow(_Reader, frozen=True):
    """One window of one rank; ``series`` maps a collector to its file; not ``closed`` where the rank died in it."""

    rank: int
    index: int
    steps: tuple[int, ...]
    planned_steps: tuple[int, ...]
    warmup_steps: tuple[int, ...]
    closed: bool
    truncated: bool
    reason: str | None
    series: Mapping[str, Path]

    def read(self, kind: type[R], name: str | None = None) -> Series[R]:
        """Return the rows of a series, empty where it was not recorded; each file is read once.

        Args:
            kind: the row class.
            name: the series, where it is not the one that the row class names.
        """
        return self._read(kind, self.series.get(name or kind.series), self.rank)


class Rank(_Reader, frozen=True, dict=True):
    """The files of one rank. ``facts`` is the manifest's ``run`` row, ``training`` its ``training`` row.

    Of thousands of ranks most are not read ``in_full``: they have no pulse and no artifacts here. ``profiler_pauses``
    are the long ones between two steps of any rank of several, ``(begin, end)`` in nanoseconds since the epoch.
    ``high_water_bytes`` is the kernel's maximum of the resident memory, of the whole process, when the run ended.
    """

    rank: int
    directory: Path
    facts: RunFacts
    training: TrainingFacts | None
    pulse: tuple[PulseRow, ...]
    windows: tuple[RecordedWindow, ...]
    status: Status
    exception: str | None
    steps: int
    overhead: OverheadFacts | None
    high_water_bytes: int | None = None
    in_full: bool = True
    profiler_pauses: tuple[tuple[int, int], ...] = ()

    @cached_property
    def computed(self) -> dict[Callable[[Rank], Any], Any]:
        """The values of functions that are :func:`once_for_a_rank`."""
        return {}

    @cached_property
    def system(self) -> SystemSamples:
        """The samples of the machine."""
        windows = (window.series.get("system") for window in self.windows)
        return read_samples(self.rank, windows, self.directory / system_name(self.rank))

    @property
    def actions(self) -> tuple[ActionTotalRow, ...]:
        """The totals of each action over the steps of the run; empty where the run has none."""
        return tuple(row for row in self.read(ActionTotalRow).rows if row.kind == "total")

    @property
    def stalls(self) -> tuple[StallRow, ...]:
        """The steps outside windows that took more than twice the median at that time, in order."""
        return tuple(row for row in self.read(StallRow).rows if row.kind == "stall")

    def read(self, kind: type[R]) -> Series[R]:
        """Return the rows of a series over the whole run, empty where there is none; each file is read once."""
        path = self.directory / f"{kind.series}.rank{self.rank:05d}.jsonl"
        return self._read(kind, path if path.exists() else None, self.rank)

    def last_place(self) -> HangRow | None:
        """Return where the rank was at its last heartbeat, at most 5 s ago while it runs; None once it has ended."""
        path = self.directory / heartbeat_name(self.rank)
        rows = self._read(HangRow, path if path.exists() else None, self.rank).rows
        return rows[0] if rows else None

    def in_windows(self, kind: type[R]) -> list[R]:
        """Return the rows of all windows, those of warmup included."""
        return [row for window in self.windows for row in window.read(kind).rows]

    def recorded(self, kind: type[R]) -> list[R]:
        """Return the rows of recorded steps of all windows."""
        return [row for window in self.windows for row in window.read(kind).recorded]


def once_for_a_rank(function: Callable[[Rank], T]) -> Callable[[Rank], T]:
    """Return a function of a rank that computes its value once: a pulse may have a million rows."""

    @wraps(function)
    def computed(rank: Rank) -> T:
        if function not in rank.computed:
            rank.computed[function] = function(rank)
        found: T = rank.computed[function]
        return found

    return computed


class Run(msgspec.Struct, frozen=True):
    """Everything in a run directory. Damaged pieces are ``problems``; they hide nothing else."""

    directory: Path
    ranks: tuple[Rank, ...] = ()
    artifacts: tuple[ArtifactFile, ...] = ()
    errors: tuple[CollectorError, ...] = ()
    unavailable: tuple[Unavailable, ...] = ()
    notes: tuple[Note, ...] = ()
    problems: tuple[Problem, ...] = ()
    others: tuple[Path, ...] = ()
    ooms: tuple[OomEvent, ...] = ()
    url: str | None = None

    @property
    def root(self) -> Path:
        """The directory that the manifest's paths start from."""
        return self.directory.parent

    @property
    def lead(self) -> Rank:
        """The lowest rank that measured something."""
        return next((rank for rank in self.ranks if rank.pulse or rank.windows), self.ranks[0])

    @property
    def status(self) -> Status:
        """The worst status of its ranks."""
        found = {rank.status for rank in self.ranks}
        if "exception" in found:
            return "exception"
        return "running or killed" if "running or killed" in found else "finished"

    @property
    def in_full(self) -> Run:
        """The same run with only the ranks that were read in full."""
        return replace(self, ranks=tuple(rank for rank in self.ranks if rank.in_full))

    @property
    def series_problems(self) -> list[Problem]:
        """The problems of the series that were read so far, and of the samples of the machine, by rank."""
        found: list[Problem] = []
        for rank in self.ranks:
            found += [problem for reader in (*rank.windows, rank) for problem in reader.problems]
            found += rank.system.problems if rank.in_full else ()
        return found

    def files(self, *types: str, rank: int | None = None) -> list[ArtifactFile]:
        """Return the complete files of these types, of one rank or of all."""
        return [
            artifact
            for artifact in self.artifacts
            if artifact.type in types and artifact.state == "present" and rank in {None, artifact.rank}
        ]

    def with_problems(self, problems: Iterable[Problem]) -> Run:
        """Return the same run with more problems."""
        return replace(self, problems=(*self.problems, *problems))
