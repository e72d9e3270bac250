"""The view model of traces and snapshots without a run, recorded by any tool."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from lightning_memprof.account.snapshot.report import SnapshotReport, snapshot_report
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.artifacts.naming import SnapshotName
from lightning_memprof.errors import ArtifactError
from lightning_memprof.judge import Finding, examine_files, nothing_in_files
from lightning_memprof.judge.finding import Severity, severity_of
from lightning_memprof.read.run.locate import shown_path
from lightning_memprof.read.run.problems import Problem
from lightning_memprof.read.run.targets import Targets
from lightning_memprof.report.document import Command
from lightning_memprof.units import quoted

MAX_NAMED: Final = 2
T = TypeVar("T")


class FileReports(msgspec.Struct, frozen=True):
    """The reports of traces and snapshots; a file that cannot be read is a problem and hides no other."""

    traces: tuple[TraceReport, ...] = ()
    snapshots: tuple[SnapshotReport, ...] = ()
    problems: tuple[Problem, ...] = ()


class FilesView(msgspec.Struct, frozen=True):
    """Traces and snapshots as they are shown.

    ``findings`` has at least one, which makes the verdict. ``sizes`` are the files' bytes on disk. ``problems`` are the
    files that cannot be read, a line each. ``commands`` are the next commands. ``left_out`` counts the files of a
    directory that were not looked at.
    """

    traces: tuple[TraceReport, ...]
    snapshots: tuple[SnapshotReport, ...]
    findings: tuple[Finding, ...]
    sizes: Mapping[Path, int]
    problems: tuple[Problem, ...] = ()
    commands: tuple[Command, ...] = ()
    left_out: int = 0

    @property
    def verdict(self) -> Finding:
        """The first finding."""
        return self.findings[0]

    @property
    def is_one_program(self) -> bool:
        """Whether the files are those of the ranks of one program, or a single file."""
        names = (SnapshotName.parse(snapshot.file.name) for snapshot in self.snapshots)
        ranks = [(0, trace.rank) for trace in self.traces] + [(1, name.rank if name else None) for name in names]
        return len(ranks) <= 1 or (len(set(ranks)) == len(ranks) and all(rank is not None for _, rank in ranks))


def read_files(
    traces: Iterable[Path],
    snapshots: Iterable[Path],
    progress: Callable[[Path, int, int], None] | None = None,
    *,
    rank: int | None = None,
) -> FileReports:
    """Analyse traces and snapshots, one after the other.

    Args:
        traces: Kineto JSON, plain or gzip-compressed.
        snapshots: pickles of ``torch.cuda.memory._snapshot()``, plain or gzip-compressed.
        progress: is called with the file, the bytes read and the bytes of the file.
        rank: whose traces they are where they do not say so themselves, as the manifest of a run knows.
    """
    problems: list[Problem] = []

    def analysed(paths: Iterable[Path], analyse: Callable[[Path], T]) -> Iterator[T]:
        for path in paths:
            try:
                yield analyse(path)
            except ArtifactError as error:
                # Its line begins with the path.
                problems.append(Problem(os.fspath(path), str(error).removeprefix(f"{path}: ")))

    def trace(path: Path) -> TraceReport:
        # numpy, which a page without traces spares
        from lightning_memprof.account.trace.report import of_rank, trace_report

        report = trace_report(path, progress and partial(progress, path))
        return report if rank is None else of_rank(report, rank)

    read = [*analysed(traces, trace)]
    taken = tuple(analysed(snapshots, snapshot_report))
    if len(read) > 1:
        from lightning_memprof.account.ledger.ranks import across_ranks

        read = [*across_ranks(read)]
    return FileReports(tuple(read), taken, tuple(problems))


def files_view(
    targets: Targets, *, rank: int | None = None, progress: Callable[[Path, int, int], None] | None = None
) -> FilesView:
    """Analyse traces and snapshots.

    Args:
        targets: the files; a run in it is left out.
        rank: only the traces of this global rank; those that do not say whose they are stay.
        progress: as for :func:`read_files`.

    Raises:
        ArtifactError: none of the files can be read, or none is of the rank.
    """
    reports = read_files(targets.traces, targets.snapshots, progress)
    traces = tuple(trace for trace in reports.traces if rank is None or trace.rank in {rank, None})
    if not traces and not reports.snapshots:
        raise ArtifactError(_nothing(reports, rank))
    found = traces, reports.snapshots
    findings = examine_files(*found)
    if not findings or max(findings[0].severity, severity_of(findings[0].weight)) <= Severity.INFO:
        findings = (nothing_in_files(*found), *findings)
    files = [*(trace.file for trace in traces), *(snapshot.file for snapshot in reports.snapshots)]
    return FilesView(
        traces=traces,
        snapshots=reports.snapshots,
        findings=findings,
        sizes={file: file.stat().st_size for file in files},
        problems=reports.problems,
        commands=_commands(targets, traces),
        left_out=targets.left_out,
    )


def _nothing(reports: FileReports, rank: int | None) -> str:
    if reports.traces:
        ranks = ", ".join(sorted({str(trace.rank) for trace in reports.traces}))
        return f"--rank {rank}: no trace is of this rank; there are {ranks}"
    first = reports.problems[0]
    more = len(reports.problems) - 1
    return f"{first.piece}: {first.message}" + (f" (and {more} more files that cannot be read)" if more else "")


def _commands(targets: Targets, traces: tuple[TraceReport, ...]) -> tuple[Command, ...]:
    named = targets.named or (*targets.traces, *targets.snapshots)
    names = " ".join(quoted(shown_path(path)) for path in named[:MAX_NAMED])
    if len(named) > MAX_NAMED:
        names += " ..."
    commands = [Command("lightning-memprof show", f"{names} --all"), Command("lightning-memprof report", names)]
    if traces:
        commands.append(Command("lightning-memprof view", names))
    return (*commands, Command("lightning-memprof show", f"{names} --format json"))
