"""Read a run directory: the files of every rank, and missing or damaged ones."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from lightning_memprof.artifacts.manifest import (
    ArtifactRow,
    BudgetRow,
    EndRow,
    ErrorRow,
    Manifest,
    NoteRow,
    PauseRow,
    RemovedRow,
    UnavailableRow,
    WindowRow,
    read_manifest,
)
from lightning_memprof.artifacts.naming import (
    RUN_DIRECTORY,
    TraceName,
    manifest_name,
    numbered,
    parse_manifest_name,
    parse_numbered,
    parse_pulse_name,
    parse_series_path,
    pulse_name,
    series_path,
    temporary_name,
)
from lightning_memprof.artifacts.pulse import decode_pulse
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.locate import Place, find_run
from lightning_memprof.read.run.model import ArtifactFile, Rank, RecordedWindow, Run, Status, read_lines
from lightning_memprof.read.run.ooms import OomEvent, oom_events
from lightning_memprof.read.run.problems import CUT, CollectorError, Note, Problem, Unavailable

UNCHECKED_TYPES: Final = frozenset({"pulse"})
# Their pulses and lists of files fit on a page and are read in seconds; of more ranks the windows' summaries are used.
FULL_RANKS: Final = 64
# These are always read in full: the columns of the page show the first ranks.
FIRST_RANKS: Final = 8
SHOWN: Final = 8
# A window is closed before its trace is compressed, and with two that wait the next one has none.
_LAST_WINDOWS: Final = 4
_SUFFIX: Final = temporary_name("")
# Kineto writes a trace under another temporary name first.
_SUFFIXES: Final = (_SUFFIX, f"{_SUFFIX}.tmp")
_PARTIAL: Final = "is partial: its process is still writing it, could not, or died before it was complete"
_RAW: Final = "is torch's uncompressed trace: its process is still compressing it, could not, or died meanwhile"
_LESS: Final = MappingProxyType({"no_stack": "no Python stacks", "no_shapes": "no input shapes"})


class Layout(msgspec.Struct, frozen=True):
    """Where the files of a run are now, wherever they were written; ``directory`` is the run directory."""

    directory: Path

    @property
    def root(self) -> Path:
        """The log directory that the manifest's paths start from."""
        return self.directory.parent

    def resolve(self, path: str) -> Path | None:
        """Return the file of a manifest's path; None where it is outside the run's root or cannot be looked at."""
        pure = PurePosixPath(path)
        if not pure.parts or (".." in pure.parts and not pure.is_absolute()):
            return None
        in_root = self.root.joinpath(*pure.parts)
        try:
            is_there = in_root.exists()
        except OSError:  # a name is too long for any file, or a directory may not be read
            return None
        if not is_there and parse_numbered(pure.parts[0])[0] == RUN_DIRECTORY:
            return self.directory.joinpath(*pure.parts[1:])
        return in_root


def load_run(path: str | Path, *, max_pulse_bytes: int | None = None, rank: int | None = None) -> Run:
    """Read the run at ``path``: a run directory, a log directory that has one, or a parent of some.

    Args:
        path: the run.
        max_pulse_bytes: leave out the ranks after which this many bytes of pulse would have been read, and note it;
            None reads all. A pulse takes some 100 bytes per step and is read at about 10 MB/s.
        rank: a rank that is read in full however many there are.

    Raises:
        ArtifactError: there is no run, or none of its manifests can be read.
    """
    place = find_run(Path(path))
    layout = Layout(place.directory)
    names = sorted(entry.name for entry in os.scandir(place.directory))
    found = [number for name in names if (number := parse_manifest_name(name)) is not None]
    chosen = _within(layout.directory, found, max_pulse_bytes)
    whole_ranks = in_full(chosen) | {rank}
    reports = [_read_rank(layout, number, in_full=number in whole_ranks) for number in chosen]
    orphans = [
        Problem(name, "its rank has no manifest", owner)
        for name in names
        if (owner := parse_pulse_name(name)) is not None and owner not in found
    ]
    run = _of_ranks(place, layout, reports)
    return replace(
        run,
        notes=(*run.notes, *_rank_notes(run.ranks, left_out=len(found) - len(chosen))),
        problems=(*run.problems, *orphans),
    )


def load_rank(directory: Path, number: int) -> Run:
    """Read a single rank of a run directory, without its pulse.

    It is read where memory ran out: a pulse of a million steps would take ten seconds and some hundred megabytes.

    Raises:
        ArtifactError: its manifest cannot be read.
    """
    layout = Layout(directory)
    return _of_ranks(find_run(directory), layout, [_read_rank(layout, number, in_full=True, with_pulse=False)])


def _of_ranks(place: Place, layout: Layout, reports: Sequence[_RankReport]) -> Run:
    ranks = tuple(sorted((report.rank for report in reports if report.rank), key=lambda rank: rank.rank))
    if not ranks:
        raise ArtifactError(reports[0].problems[0].message)
    # A rank's own are not in its steps.
    pauses = tuple(pause for rank in ranks for pause in rank.profiler_pauses) if len(ranks) > 1 else ()
    ranks = tuple(replace(rank, profiler_pauses=pauses) for rank in ranks)
    return Run(
        directory=place.directory,
        root=layout.root,
        ranks=ranks,
        artifacts=tuple(artifact for report in reports for artifact in report.artifacts),
        errors=tuple(error for report in reports for error in report.errors),
        unavailable=tuple(row for report in reports for row in report.unavailable),
        notes=tuple(note for report in reports for note in report.notes),
        problems=tuple(problem for report in reports for problem in report.problems),
        others=place.others,
        ooms=tuple(oom for report in reports for oom in report.ooms),
    )


def in_full(ranks: Sequence[int]) -> frozenset[int]:
    """Return the ranks that are read with everything they wrote."""
    return frozenset(ranks if len(ranks) <= FULL_RANKS else ranks[:FIRST_RANKS])


def _within(directory: Path, ranks: list[int], max_pulse_bytes: int | None) -> list[int]:
    """Return the first ranks whose pulses together are not too large, at least one; all where there is no limit."""
    if max_pulse_bytes is None:
        return ranks
    total = 0
    for count, rank in enumerate(ranks):
        pulse = directory / pulse_name(rank)
        total += pulse.stat().st_size if pulse.exists() else 0
        if count and total > max_pulse_bytes:
            return ranks[:count]
    return ranks


class _RankReport(msgspec.Struct, frozen=True):
    rank: Rank | None
    problems: list[Problem]
    artifacts: list[ArtifactFile] = msgspec.field(default_factory=list)
    errors: list[CollectorError] = msgspec.field(default_factory=list)
    unavailable: list[Unavailable] = msgspec.field(default_factory=list)
    notes: list[Note] = msgspec.field(default_factory=list)
    ooms: tuple[OomEvent, ...] = ()


def _read_rank(layout: Layout, number: int, *, in_full: bool, with_pulse: bool = True) -> _RankReport:
    manifest = read_manifest(layout.directory / manifest_name(number), with_artifacts=in_full)
    problems = [Problem(manifest.path.name, manifest.damage, number)] if manifest.damage else []
    if manifest.run is None:
        return _RankReport(None, problems)
    path = layout.directory / pulse_name(number)
    has_pulse = in_full and with_pulse and path.exists()
    pulse, pulse_problems = read_lines(path, number, "step", decode_pulse) if has_pulse else ([], ())
    artifacts, artifact_problems = _artifacts(layout, manifest, number)
    end = manifest.end
    rank = Rank(
        rank=number,
        directory=layout.directory,
        facts=manifest.run,
        training=manifest.training,
        pulse=tuple(pulse),
        windows=_windows(manifest, artifacts, number),
        status=_status(end),
        exception=end.exception if end else None,
        steps=max(len(pulse), (end.steps if end else None) or 0),
        overhead=end.overhead if end else None,
        high_water_bytes=end.peak_rss_bytes if end else None,
        in_full=in_full,
        profiler_pauses=tuple((row.time_ns - row.ns, row.time_ns) for row in manifest.of(PauseRow)),
    )
    return _RankReport(
        rank=rank,
        problems=[
            *problems,
            *(problem for problem in pulse_problems if problem.message != CUT),
            *artifact_problems,
            *(problem for problem in pulse_problems if problem.message == CUT),
            *(_partial_files(layout, rank, manifest) if in_full else ()),
        ],
        artifacts=artifacts,
        errors=[
            CollectorError(
                rank=number,
                collector=row.collector,
                where=row.where,
                window=row.window,
                message=row.message,
                traceback=row.traceback,
            )
            for row in manifest.of(ErrorRow)
        ],
        unavailable=[Unavailable(number, row.collector, row.reason) for row in manifest.of(UnavailableRow)],
        notes=[Note(number, collector, message) for collector, message in _notes(manifest)],
        ooms=oom_events(layout.directory, number, manifest),
    )


def _artifacts(layout: Layout, manifest: Manifest, rank: int) -> tuple[list[ArtifactFile], list[Problem]]:
    """Return every listed file once, checked against the disk.

    A file that was written again is listed before the new version replaces it: it matches its last row, or the one
    before.
    """
    listed: dict[str, list[ArtifactRow]] = {}
    for row in manifest.artifacts:
        if row.path:
            listed.setdefault(row.path, []).append(row)
    artifacts: list[ArtifactFile] = []
    problems: list[Problem] = []
    for path, versions in listed.items():
        file = layout.resolve(path)
        if file is None:
            problems.append(Problem(path, "is outside the run's directory or not accessible, and is not read", rank))
            continue
        checked = [artifact_file(row, path, file, rank) for row in reversed(versions[-2:])]
        artifact = next((artifact for artifact in checked if artifact.state == "present"), checked[0])
        artifacts.append(artifact)
        if artifact.state == "missing":
            problems.append(Problem(path, "is listed but missing", rank))
        elif artifact.state == "torn":
            size = versions[-1].size_bytes
            problems.append(Problem(path, f"has {artifact.size_bytes} bytes where {size} were written", rank))
    return artifacts, problems


def artifact_file(row: ArtifactRow, path: str, file: Path, rank: int) -> ArtifactFile:
    """Return a listed file as it is on disk."""
    try:
        size: int | None = file.stat().st_size
    except (OSError, ValueError):
        size = None
    differs = row.type not in UNCHECKED_TYPES and row.size_bytes is not None and size != row.size_bytes
    state: Literal["present", "missing", "torn"] = "missing" if size is None else "torn" if differs else "present"
    return ArtifactFile(
        rank=rank,
        collector=row.collector,
        type=row.type,
        path=path,
        file=file,
        window=row.window,
        size_bytes=size,
        sha256=row.sha256,
        state=state,
    )


def _windows(manifest: Manifest, artifacts: list[ArtifactFile], rank: int) -> tuple[RecordedWindow, ...]:
    rows = [row for row in manifest.of(WindowRow) if row.window is not None]
    opened = {row.window: row for row in rows if row.event == "open"}
    closed = {row.window: row for row in rows if row.event == "close"}
    series: dict[int | None, dict[str, Path]] = {}
    for artifact in artifacts:
        name = "/".join(PurePosixPath(artifact.path).parts[-2:])
        if artifact.type == "series" and artifact.state != "missing" and parse_series_path(name) is not None:
            series.setdefault(artifact.window, {})[artifact.collector] = artifact.file
    windows = []
    for index in sorted(index for index in opened.keys() | closed.keys() if index is not None):
        plan, end = opened.get(index, WindowRow()), closed.get(index)
        windows.append(
            RecordedWindow(
                rank=rank,
                index=index,
                steps=tuple(end.steps if end else plan.active_steps),
                planned_steps=tuple(plan.active_steps),
                warmup_steps=tuple(plan.warmup_steps),
                closed=end is not None,
                truncated=end is None or end.truncated is True,
                reason=end.reason if end else None,
                series=series.get(index, {}),
            )
        )
    return tuple(windows)


def _notes(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the collector and the text of every warning, and of every reduction by a budget."""
    for note in manifest.of(NoteRow):
        yield note.collector, note.message
    for row in manifest.of(BudgetRow):
        less = _LESS.get(
            row.level or "", f"at most {row.active_steps} active step{'' if row.active_steps == 1 else 's'}"
        )
        yield "budget", f"from window {row.window} on traces have {less}: {row.reason}"
    if removed := [row for row in manifest.of(RemovedRow) if row.window is not None]:
        last = removed[-1].window
        count = f"{len(removed)} windows (the last one {last})" if len(removed) > 1 else f"window {last}"
        yield "budget", f"the files of {count} were removed: {manifest.of(RemovedRow)[-1].reason}"


def _rank_notes(ranks: tuple[Rank, ...], *, left_out: int) -> list[Note]:
    if left_out:
        message = f"{left_out} more ranks would take long to read and are not on this page; see: lightning-memprof show"
        return [Note(ranks[0].rank, "run", message)]
    world_size = max((rank.facts.world_size or 1 for rank in ranks), default=1)
    if len(ranks) >= world_size:
        return []
    shown = ", ".join(str(rank.rank) for rank in ranks[:SHOWN]) + (", ..." if len(ranks) > SHOWN else "")
    return [Note(ranks[0].rank, "run", f"{len(ranks)} of {world_size} ranks are here: {shown}")]


def _status(end: EndRow | None) -> Status:
    if end is None:
        return "running or killed"
    return "exception" if end.status == "exception" else "finished"


def _partial_files(layout: Layout, rank: Rank, manifest: Manifest) -> list[Problem]:
    """Return the files that a rank has not finished, with their paths from the root.

    Only its last windows, and those in which a collector failed and could not remove its file, can have such files.
    """
    failed = {row.window for row in manifest.of(ErrorRow) if row.window is not None}
    last = [window.index for window in rank.windows[-_LAST_WINDOWS:]]
    files = _partial(layout, rank.rank, {*last, *failed})
    return [Problem(file.relative_to(layout.root).as_posix(), message, rank.rank) for file, message in files]


def _partial(layout: Layout, rank: int, windows: Collection[int]) -> Iterator[tuple[Path, str]]:
    raw = f".operator_trace.jsonl{_SUFFIX}"
    for window in sorted(windows):
        series = layout.directory / series_path(window, rank, "")
        for file in _temporary(series.parent):
            if file.name.startswith(f"rank{rank:05d}."):
                yield file, _RAW if file.name.endswith(raw) else _PARTIAL
    for file in _temporary(layout.directory):
        if f"rank{rank:05d}." in file.name or f"rank_{rank}_" in file.name or f"rank_{rank}." in file.name:
            yield file, _PARTIAL
    run = parse_numbered(layout.directory.name)[1]
    for file in _temporary(layout.root):
        name = TraceName.parse(file.name.partition(_SUFFIX)[0])
        if name is not None and name.rank == rank and name.filename == numbered(parse_numbered(name.filename)[0], run):
            yield file, _PARTIAL


def _temporary(directory: Path) -> list[Path]:
    with suppress(OSError), os.scandir(directory) as entries:
        return sorted(directory / entry.name for entry in entries if entry.name.endswith(_SUFFIXES))
    return []
