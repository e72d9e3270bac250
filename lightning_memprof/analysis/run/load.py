"""Read a run directory: what every rank wrote, and what of it is missing or damaged."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, Literal

from lightning_memprof.analysis.oom.events import OomEvent, oom_events
from lightning_memprof.analysis.run.layout import Layout
from lightning_memprof.analysis.run.locate import find_run
from lightning_memprof.analysis.run.many_ranks import in_full, light_rows, missing_ranks, within
from lightning_memprof.analysis.run.messages import CollectorError, Note, Problem, Unavailable
from lightning_memprof.analysis.run.rows import (
    ManifestRows,
    Row,
    first_row,
    kept_artifacts,
    last_row,
    manifest_rows,
    mapping,
    noted,
    pulse_rows,
    rows_of,
    text,
    whole,
    whole_numbers,
)
from lightning_memprof.analysis.run.unfinished import cut_lines, unfinished_files
from lightning_memprof.analysis.steps.typical import TypicalSteps, typical_steps
from lightning_memprof.artifacts.naming import (
    manifest_name,
    parse_manifest_name,
    parse_pulse_name,
    parse_series_path,
    pulse_name,
)
from lightning_memprof.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lightning_memprof.artifacts.series import PulseRow

__all__ = [
    "Artifact",
    "CollectorError",
    "Note",
    "Problem",
    "Rank",
    "Run",
    "Status",
    "Unavailable",
    "Window",
    "load_run",
]

Status = Literal["finished", "exception", "running or killed"]

UNCHECKED_TYPES: Final = frozenset({"pulse"})


@dataclass(frozen=True)
class Artifact:
    """A file that the run wrote.

    ``path`` is as the manifest has it, ``file`` where it lies now. ``size_bytes`` is what is on disk, None where the
    file is missing.
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


@dataclass(frozen=True)
class Window:
    """One window of one rank; ``series`` maps a collector to its file, ``closed`` is False where it died in it."""

    rank: int
    index: int
    steps: tuple[int, ...]
    planned_steps: tuple[int, ...]
    warmup_steps: tuple[int, ...]
    closed: bool
    truncated: bool
    reason: str | None
    series: Mapping[str, Path]


@dataclass(frozen=True)
class Rank:
    """What one rank wrote. ``facts`` is the manifest's ``run`` row, ``training`` its ``training`` row.

    Of thousands of ranks most are not read ``in_full``: they have no pulse and no artifacts here.
    """

    rank: int
    facts: Mapping[str, Any]
    training: Mapping[str, Any] | None
    pulse: tuple[PulseRow, ...]
    windows: tuple[Window, ...]
    status: Status
    exception: str | None
    steps: int
    overhead: Mapping[str, Any] | None
    in_full: bool = True

    @cached_property
    def typical_steps(self) -> TypicalSteps | None:
        """The steps of the pulse that are typical, None where it has no timed step; several rules rest on them."""
        return typical_steps(self.pulse)


@dataclass(frozen=True)
class Run:
    """Everything that a run directory says. Damaged pieces are ``problems``; they hide nothing else."""

    directory: Path
    root: Path
    ranks: tuple[Rank, ...]
    artifacts: tuple[Artifact, ...]
    errors: tuple[CollectorError, ...]
    unavailable: tuple[Unavailable, ...]
    notes: tuple[Note, ...]
    problems: tuple[Problem, ...]
    others: tuple[Path, ...] = ()
    ooms: tuple[OomEvent, ...] = ()
    url: str | None = None

    @property
    def lead(self) -> Rank:
        """The lowest rank that measured something."""
        return next((rank for rank in self.ranks if rank.pulse or rank.windows), self.ranks[0])

    @property
    def status(self) -> Status:
        """How the run as a whole ended: the worst of its ranks."""
        found = {rank.status for rank in self.ranks}
        if "exception" in found:
            return "exception"
        return "running or killed" if "running or killed" in found else "finished"

    @property
    def in_full(self) -> Run:
        """The same run with only the ranks that were read in full."""
        return replace(self, ranks=tuple(rank for rank in self.ranks if rank.in_full))

    def with_problems(self, problems: Iterable[Problem]) -> Run:
        """Return the same run with more problems."""
        return replace(self, problems=(*self.problems, *problems))


def load_run(path: str | Path, *, max_pulse_bytes: int | None = None, rank: int | None = None) -> Run:
    """Read the run that ``path`` means: a run directory, a log directory that has one, or a parent with one run in it.

    Args:
        path: what to read.
        max_pulse_bytes: leave out the ranks after which this many bytes of pulse would have been read, and note it;
            None reads all. A pulse takes some 100 bytes a step and reads at about 10 MB/s.
        rank: a rank that is read in full however many there are.

    Raises:
        ArtifactError: there is no run, there are several, or none of its manifests can be read.

    """
    place = find_run(Path(path))
    layout = Layout(place.directory)
    names = sorted(entry.name for entry in os.scandir(place.directory))
    found = [number for name in names if (number := parse_manifest_name(name)) is not None]
    chosen = within(layout.directory, found, max_pulse_bytes)
    whole_ranks = in_full(chosen) | {rank}
    reports = [_read_rank(layout, number, in_full=number in whole_ranks) for number in chosen]
    orphans = [
        Problem(name, "its rank left no manifest", owner)
        for name in names
        if (owner := parse_pulse_name(name)) is not None and owner not in found
    ]
    if not any(report.rank for report in reports):
        raise ArtifactError(reports[0].problems[0].message)
    ranks = tuple(sorted((report.rank for report in reports if report.rank), key=lambda rank: rank.rank))
    return Run(
        directory=place.directory,
        root=layout.root,
        ranks=ranks,
        artifacts=tuple(artifact for report in reports for artifact in report.artifacts),
        errors=tuple(error for report in reports for error in report.errors),
        unavailable=tuple(row for report in reports for row in report.unavailable),
        notes=(
            *(note for report in reports for note in report.notes),
            *_rank_notes(ranks, left_out=len(found) - len(chosen)),
        ),
        problems=(*(problem for report in reports for problem in report.problems), *orphans),
        others=place.others,
        ooms=tuple(oom for report in reports for oom in report.ooms),
    )


@dataclass(frozen=True)
class _RankReport:
    rank: Rank | None
    artifacts: list[Artifact]
    errors: list[CollectorError]
    unavailable: list[Unavailable]
    notes: list[Note]
    problems: list[Problem]
    ooms: tuple[OomEvent, ...] = ()


def _read_rank(layout: Layout, rank: int, *, in_full: bool) -> _RankReport:
    name = manifest_name(rank)
    rows, damage = (manifest_rows if in_full else light_rows)(layout.directory / name)
    problems = _damage(name, damage, rank)
    facts = first_row(rows, "run")
    if facts is None:
        return _RankReport(None, [], [], [], [], problems)
    pulse, pulse_damage = pulse_rows(layout.directory / pulse_name(rank)) if in_full else ([], None)
    artifacts, artifact_problems = _artifacts(layout, rows, rank)
    end = last_row(rows, "end")
    read = Rank(
        rank=rank,
        facts=facts,
        training=last_row(rows, "training"),
        pulse=tuple(pulse),
        windows=_windows(rows, artifacts, rank),
        status=_status(end),
        exception=text(end, "exception") if end else None,
        steps=max(len(pulse), whole(end, "steps") or 0),
        overhead=mapping(end, "overhead"),
        in_full=in_full,
    )
    return _RankReport(
        read,
        artifacts,
        [
            CollectorError(
                rank,
                text(row, "collector") or "?",
                text(row, "where") or "?",
                whole(row, "window"),
                text(row, "message") or "no message",
                text(row, "traceback") or "",
            )
            for row in rows_of(rows, "error")
        ],
        [
            Unavailable(rank, text(row, "collector") or "?", text(row, "reason") or "no reason given")
            for row in rows_of(rows, "unavailable")
        ],
        [Note(rank, collector, message) for collector, message in noted(rows)],
        [
            *problems,
            *_damage(pulse_name(rank), pulse_damage, rank),
            *artifact_problems,
            *_unfinished(layout, read, rows),
        ],
        oom_events(layout.directory, rank, rows),
    )


def _damage(piece: str, message: str | None, rank: int) -> list[Problem]:
    return [Problem(piece, message, rank)] if message else []


def _unfinished(layout: Layout, rank: Rank, rows: ManifestRows) -> list[Problem]:
    if not rank.in_full:
        return []
    failed = {window for row in rows_of(rows, "error") if (window := whole(row, "window")) is not None}
    windows = [window.index for window in rank.windows]
    found = (*cut_lines(layout, rank.rank), *unfinished_files(layout, rank.rank, windows, failed))
    return [Problem(piece, message, rank.rank) for piece, message in found]


def _artifacts(layout: Layout, rows: ManifestRows, rank: int) -> tuple[list[Artifact], list[Problem]]:
    """Return every listed file once, checked against the disk.

    A file that was written again is listed before it takes its place: it is as its last row has it, or the one before.
    """
    listed: dict[str, list[Row]] = {}
    for row in kept_artifacts(rows):
        if path := text(row, "path"):
            listed.setdefault(path, []).append(row)
    artifacts: list[Artifact] = []
    problems: list[Problem] = []
    for path, versions in listed.items():
        file = layout.resolve(path)
        if file is None:
            problems.append(
                Problem(path, "points out of the run's directory or cannot be looked at, and is not read", rank)
            )
            continue
        checked = [_checked(row, path, file, rank) for row in reversed(versions[-2:])]
        artifact = next((artifact for artifact in checked if artifact.state == "present"), checked[0])
        artifacts.append(artifact)
        if artifact.state == "missing":
            problems.append(Problem(path, "is listed but missing", rank))
        elif artifact.state == "torn":
            size = whole(versions[-1], "size_bytes")
            problems.append(Problem(path, f"has {artifact.size_bytes} bytes where {size} were written", rank))
    return artifacts, problems


def _checked(row: Row, path: str, file: Path, rank: int) -> Artifact:
    kind = text(row, "type") or "blob"
    try:
        size: int | None = file.stat().st_size
    except (OSError, ValueError):
        size = None
    expected = whole(row, "size_bytes")
    differs = kind not in UNCHECKED_TYPES and expected is not None and size != expected
    state: Literal["present", "missing", "torn"] = "missing" if size is None else "torn" if differs else "present"
    collector = text(row, "collector") or "?"
    return Artifact(rank, collector, kind, path, file, whole(row, "window"), size, text(row, "sha256"), state)


def _windows(rows: ManifestRows, artifacts: list[Artifact], rank: int) -> tuple[Window, ...]:
    opened = {index: row for row in rows_of(rows, "window") if (index := _event(row, "open")) is not None}
    closed = {index: row for row in rows_of(rows, "window") if (index := _event(row, "close")) is not None}
    windows = []
    for index in sorted(opened.keys() | closed.keys()):
        plan, end = opened.get(index, {}), closed.get(index)
        series = {
            artifact.collector: artifact.file
            for artifact in artifacts
            if artifact.type == "series" and artifact.window == index and artifact.state != "missing"
            and parse_series_path("/".join(PurePosixPath(artifact.path).parts[-2:])) is not None
        }  # fmt: skip
        windows.append(
            Window(
                rank=rank,
                index=index,
                steps=whole_numbers(end, "steps") if end else whole_numbers(plan, "active_steps"),
                planned_steps=whole_numbers(plan, "active_steps"),
                warmup_steps=whole_numbers(plan, "warmup_steps"),
                closed=end is not None,
                truncated=end is None or bool(end.get("truncated")),
                reason=text(end, "reason") if end else None,
                series=series,
            )
        )
    return tuple(windows)


def _rank_notes(ranks: tuple[Rank, ...], *, left_out: int) -> list[Note]:
    if left_out:
        message = f"{left_out} more ranks are not on this page, it would take long: lightning-memprof show has them"
        return [Note(ranks[0].rank, "run", message)]
    world_size = max((whole(rank.facts, "world_size") or 1 for rank in ranks), default=1)
    missing = missing_ranks([rank.rank for rank in ranks], world_size)
    return [Note(ranks[0].rank, "run", missing)] if missing else []


def _status(end: Row | None) -> Status:
    if end is None:
        return "running or killed"
    return "exception" if end.get("status") == "exception" else "finished"


def _event(row: Row, event: str) -> int | None:
    return whole(row, "window") if row.get("event") == event else None
