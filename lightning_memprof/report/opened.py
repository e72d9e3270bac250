"""From the targets on a command line to the view of a run, or of files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.memory.allocations import run_allocations
from lightning_memprof.account.trace.operators import ensure_operator_tables
from lightning_memprof.artifacts.remote import is_url
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.confined import load_confined
from lightning_memprof.read.run.fetch import LocalRun, local_run
from lightning_memprof.read.run.model import ArtifactFile, Run
from lightning_memprof.read.run.problems import Note
from lightning_memprof.read.run.targets import Targets, find_targets
from lightning_memprof.report.files_view import FileReports, FilesView, files_view, read_files
from lightning_memprof.report.live import live_run
from lightning_memprof.report.view import View, run_view
from lightning_memprof.units import format_list, quoted

# Size on disk of traces and snapshots together, read in about a minute. Larger ones are named one at a time.
MAX_FILE_BYTES: Final = 256 << 20
MAX_LISTED: Final = 8
MAX_NAMED: Final = 3


class OpenOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a target to analyse.

    ``rank`` leads the page instead of the lowest one, and of files only its traces are read; ``window`` leaves out the
    others. ``max_file_bytes`` bounds the traces and snapshots of a run that are analysed, in bytes on disk.
    Nothing of a run is read outside ``below``, a directory without symbolic links; None is no such limit.
    """

    rank: int | None = None
    window: int | None = None
    max_file_bytes: int = MAX_FILE_BYTES
    below: Path | None = None


@contextmanager
def opened(
    names: Sequence[str],
    options: OpenOptions | None = None,
    progress: Callable[[Path, int, int], None] | None = None,
) -> Iterator[View | FilesView]:
    """Yield the view of the named targets; the copy of a URL exists until the context is left.

    Args:
        names: one run, by path or URL, or any number of traces, snapshots and directories of them.
        options: the parts to analyse.
        progress: is called with the file, the bytes read and the bytes of the file.

    Raises:
        ArtifactError: there is none of these, several runs are named, there is no such rank or window, or nothing can
            be read.
        ConfigError: the protocol of a URL is not known here.
    """
    options = options or OpenOptions()
    with located(names) as found:
        if isinstance(found, LocalRun):
            yield _run(found, options, progress)
        elif options.window is not None:
            raise ArtifactError(f"--window {options.window}: a file has no windows; name a run, or leave --window out")
        else:
            yield files_view(found, rank=options.rank, progress=progress)


@contextmanager
def located(names: Sequence[str]) -> Iterator[LocalRun | Targets]:
    """Yield the run or the files that names mean, as :func:`opened` does, without reading them."""
    if len(names) == 1 and is_url(names[0]):
        with local_run(names[0]) as found:
            yield found
        return
    if remote := next((name for name in names if is_url(name)), None):
        raise ArtifactError(f"{remote}: is one of several; a run at a URL is named alone, files are copied here first")
    targets = find_targets([Path(name) for name in names])
    yield targets if targets.run is None else LocalRun(targets.run)


def _run(found: LocalRun, options: OpenOptions, progress: Callable[[Path, int, int], None] | None) -> View:
    loaded = load_confined(found.path, options.below, rank=options.rank)
    run = replace(loaded, url=found.url)
    run = ensure_operator_tables(_of_window(_led_by(run, options.rank), options.window))
    run, reports = _with_files(run, options.max_file_bytes, progress)
    view = run_view(run, run_allocations(run), traces=reports.traces, snapshots=reports.snapshots)
    # A follower reads files that are not confined.
    return view if found.url or options.below else replace(view, live=live_run(run))


def _led_by(run: Run, rank: int | None) -> Run:
    if rank is None:
        return run
    ranks = sorted(run.ranks, key=lambda candidate: candidate.rank != rank)
    if ranks[0].rank != rank:
        there = format_list([rank.rank for rank in run.ranks], MAX_LISTED)
        raise ArtifactError(f"--rank {rank}: the run has no such rank; there are {there}")
    return replace(run, ranks=tuple(ranks))


def _of_window(run: Run, window: int | None) -> Run:
    if window is None:
        return run
    there = sorted({candidate.index for rank in run.ranks for candidate in rank.windows})
    if window not in there:
        what = f"there are {format_list(there, MAX_LISTED)}" if there else "it recorded none"
        raise ArtifactError(f"--window {window}: the run has no such window; {what}")
    ranks = (
        replace(rank, windows=tuple(candidate for candidate in rank.windows if candidate.index == window))
        for rank in run.ranks
    )
    return replace(
        run,
        ranks=tuple(ranks),
        artifacts=tuple(artifact for artifact in run.artifacts if artifact.window in {None, window}),
    )


def _with_files(run: Run, max_bytes: int, progress: Callable[[Path, int, int], None] | None) -> tuple[Run, FileReports]:
    """Analyse the traces and snapshots of the rank that leads, the smallest first as long as they are not too large."""
    lead = run.lead.rank
    files = run.files("trace", "snapshot", rank=lead)
    ordered = sorted(files, key=lambda file: file.size_bytes or 0)
    sums = accumulate(file.size_bytes or 0 for file in ordered)
    chosen = [file for file, taken in zip(ordered, sums, strict=True) if taken <= max_bytes]
    kept = [file for file in files if file in chosen]
    reports = read_files(
        [file.file for file in kept if file.type == "trace"],
        [file.file for file in kept if file.type == "snapshot"],
        progress,
        rank=lead,
    )
    by_file = {str(file.file): file.path for file in kept}
    problems = [
        replace(problem, piece=by_file.get(problem.piece, problem.piece), rank=lead) for problem in reports.problems
    ]
    known = {problem.piece for problem in run.problems}
    run = run.with_problems(problem for problem in problems if problem.piece not in known)
    if left_out := [file for file in files if file not in chosen]:
        run = replace(run, notes=(*run.notes, Note(lead, "files", _not_analysed(left_out, len(files), run.url))))
    return run, reports


def _not_analysed(left_out: Sequence[ArtifactFile], count: int, url: str | None) -> str:
    """Name the files that were too large, and the command that analyses one of them."""
    named = format_list([artifact.path for artifact in left_out], MAX_NAMED)
    where = left_out[0].path if url is not None else str(left_out[0].file.absolute())
    command = f"lightning-memprof report {quoted(where)} -o trace.html"
    return (
        f"{len(left_out)} of {count} traces and snapshots are large and were not analysed: {named}; "
        f"to analyse one: {command}"
    )
