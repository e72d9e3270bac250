"""Read a run directory: the files of every rank, and missing or damaged ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final, Literal

from msgspec.structs import asdict, replace

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
    parse_numbered,
    parse_pulse_name,
    parse_series_path,
    pulse_name,
    series_path,
    temporary_name,
)
from lightning_memprof.artifacts.pulse import decode_pulse
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.locate import find_run, names_in, ranks_in
from lightning_memprof.read.run.model import ArtifactFile, Rank, RecordedWindow, Run, Status, read_lines
from lightning_memprof.read.run.ooms import oom_events
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
_RAW_SUFFIX: Final = f".operator_trace.jsonl{_SUFFIX}"
_PARTIAL: Final = "is partial: its process is still writing it, could not, or died before it was complete"
_RAW: Final = "is torch's uncompressed trace: its process is still compressing it, could not, or died meanwhile"
_LESS: Final = MappingProxyType({"no_stack": "no Python stacks", "no_shapes": "no input shapes"})


def _resolved(directory: Path, path: str) -> Path | None:
    """Return where a file of a manifest is now; None if it is outside the run's root or not accessible.

    Args:
        directory: the run directory, wherever the run was written. The paths start from the directory above it.
        path: as in the manifest.
    """
    pure = PurePosixPath(path)
    if not pure.parts or (".." in pure.parts and not pure.is_absolute()):
        return None
    in_root = directory.parent.joinpath(*pure.parts)
    try:
        is_there = in_root.exists()
    except OSError:  # a name is too long for any file, or a directory may not be read
        return None
    if not is_there and parse_numbered(pure.parts[0])[0] == RUN_DIRECTORY:
        return directory.joinpath(*pure.parts[1:])
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
    found = ranks_in(place.directory)
    chosen = _within(place.directory, found, max_pulse_bytes)
    whole_ranks = in_full(chosen) | {rank}
    run = _joined([_read_rank(place.directory, number, in_full=number in whole_ranks) for number in chosen])
    orphans = [
        Problem(name, "its rank has no manifest", owner)
        for name in names_in(place.directory)
        if (owner := parse_pulse_name(name)) is not None and owner not in found
    ]
    return replace(
        run,
        others=place.others,
        notes=(*run.notes, *_rank_notes(run.ranks, left_out=len(found) - len(chosen))),
        problems=(*run.problems, *orphans),
    )


def load_rank(directory: Path, number: int) -> Run:
    """Read a single rank of a run directory, without its pulse.

    It is read where memory ran out: a pulse of a million steps would take ten seconds and some hundred megabytes.

    Raises:
        ArtifactError: its manifest cannot be read.
    """
    return _joined([_read_rank(directory, number, in_full=True, with_pulse=False)])


def _joined(parts: Sequence[Run]) -> Run:
    """Return a run of all ranks from runs of one rank each, or of none where its manifest cannot be read."""
    if not any(part.ranks for part in parts):
        raise ArtifactError(parts[0].problems[0].message)
    names = ("ranks", "artifacts", "errors", "unavailable", "notes", "problems", "ooms")
    joined = {name: tuple(chain.from_iterable(getattr(part, name) for part in parts)) for name in names}
    ranks: Sequence[Rank] = joined.pop("ranks")
    # A rank's own are not in its steps.
    pauses = tuple(pause for rank in ranks for pause in rank.profiler_pauses) if len(ranks) > 1 else ()
    ordered = sorted(ranks, key=lambda rank: rank.rank)
    return replace(parts[0], ranks=tuple(replace(rank, profiler_pauses=pauses) for rank in ordered), **joined)


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


def _read_rank(directory: Path, number: int, *, in_full: bool, with_pulse: bool = True) -> Run:
    manifest = read_manifest(directory / manifest_name(number), with_artifacts=in_full)
    problems = [Problem(manifest.path.name, manifest.damage, number)] if manifest.damage else []
    if manifest.run is None:
        return Run(directory, problems=tuple(problems))
    path = directory / pulse_name(number)
    has_pulse = in_full and with_pulse and path.exists()
    pulse, pulse_problems = read_lines(path, number, "step", decode_pulse) if has_pulse else ([], ())
    artifacts, artifact_problems = listed_files(directory, manifest, number)
    end = manifest.end
    rank = Rank(
        rank=number,
        directory=directory,
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
    return Run(
        directory,
        ranks=(rank,),
        problems=(
            *problems,
            *(problem for problem in pulse_problems if problem.message != CUT),
            *artifact_problems,
            *(problem for problem in pulse_problems if problem.message == CUT),
            *(_partial_files(directory, rank, manifest) if in_full else ()),
        ),
        artifacts=tuple(artifacts),
        errors=tuple(CollectorError(rank=number, **asdict(row)) for row in manifest.of(ErrorRow)),
        unavailable=tuple(Unavailable(number, row.collector, row.reason) for row in manifest.of(UnavailableRow)),
        notes=tuple(Note(number, collector, message) for collector, message in _notes(manifest)),
        ooms=oom_events(directory, number, manifest),
    )


def listed_files(directory: Path, manifest: Manifest, rank: int) -> tuple[list[ArtifactFile], list[Problem]]:
    """Return every listed file once, checked against the disk.

    A file that was written again is listed before the new version replaces it: it matches its last row, or the one
    before.
    """
    artifacts: list[ArtifactFile] = []
    problems: list[Problem] = []
    for path, versions in manifest.artifacts.items():
        file = _resolved(directory, path)
        if file is None:
            problems.append(Problem(path, "is outside the run's directory or not accessible, and is not read", rank))
            continue
        checked = [_on_disk(row, path, file, rank) for row in reversed(versions[-2:])]
        artifact = next((artifact for artifact in checked if artifact.state == "present"), checked[0])
        artifacts.append(artifact)
        if artifact.state == "missing":
            problems.append(Problem(path, "is listed but missing", rank))
        elif artifact.state == "torn":
            size = versions[-1].size_bytes
            problems.append(Problem(path, f"has {artifact.size_bytes} bytes where {size} were written", rank))
    return artifacts, problems


def _on_disk(row: ArtifactRow, path: str, file: Path, rank: int) -> ArtifactFile:
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


def window_rows(manifest: Manifest) -> Iterator[tuple[int, WindowRow, WindowRow | None]]:
    """Yield the index of each window, its plan, and its end; no end where the rank died in it."""
    rows = [(row.window, row) for row in manifest.of(WindowRow) if row.window is not None]
    opened = {index: row for index, row in rows if row.event == "open"}
    closed = {index: row for index, row in rows if row.is_closed}
    for index in sorted(opened.keys() | closed.keys()):
        yield index, opened.get(index, WindowRow()), closed.get(index)


def _windows(manifest: Manifest, artifacts: list[ArtifactFile], rank: int) -> tuple[RecordedWindow, ...]:
    series: dict[int | None, dict[str, Path]] = {}
    for artifact in artifacts:
        name = "/".join(PurePosixPath(artifact.path).parts[-2:])
        if artifact.type == "series" and artifact.state != "missing" and parse_series_path(name) is not None:
            series.setdefault(artifact.window, {})[artifact.collector] = artifact.file
    windows = []
    for index, plan, end in window_rows(manifest):
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


def _partial_files(directory: Path, rank: Rank, manifest: Manifest) -> Iterator[Problem]:
    """Yield the files that a rank has not finished, with their paths from the root.

    Only its last windows, and those in which a collector failed and could not remove its file, can have such files.
    """
    number, run = rank.rank, parse_numbered(directory.name)[1]
    failed = {row.window for row in manifest.of(ErrorRow) if row.window is not None}
    windows = {window.index for window in rank.windows[-_LAST_WINDOWS:]} | failed
    for place in (*((directory / series_path(window, number, "")).parent for window in sorted(windows)), directory):
        for file in _temporary(place):
            if any(own in file.name for own in (f"rank{number:05d}.", f"rank_{number}_", f"rank_{number}.")):
                message = _RAW if file.name.endswith(_RAW_SUFFIX) else _PARTIAL
                yield Problem(file.relative_to(directory.parent).as_posix(), message, number)
    for file in _temporary(directory.parent):
        name = TraceName.parse(file.name.partition(_SUFFIX)[0])
        if (
            name is not None
            and name.rank == number
            and name.filename == numbered(parse_numbered(name.filename)[0], run)
        ):
            yield Problem(file.name, _PARTIAL, number)


def _temporary(directory: Path) -> list[Path]:
    return [directory / name for name in names_in(directory) if name.endswith(_SUFFIXES)]
