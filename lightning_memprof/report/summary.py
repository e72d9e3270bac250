"""The pages that a training run prints: the short one at its end, and the report of an out-of-memory error."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from msgspec.structs import replace

from lightning_memprof.errors import MemprofError, ReportError
from lightning_memprof.units import MIB, format_list

if TYPE_CHECKING:
    from lightning_memprof.account.trace.model import TraceReport
    from lightning_memprof.read.run.model import Run
    from lightning_memprof.report.view import View

# Training waits for the page: about three seconds of reading at most, whatever the number of ranks.
MAX_PULSE_BYTES: Final = 16 * MIB
MAX_MEMORY_BYTES: Final = 8 * MIB
# Compressed; read in a second, with 80 MiB of memory. The verdict names modules where a trace is this small.
MAX_TRACE_BYTES: Final = 8 * MIB
# They take another second.
MAX_ALLOCATIONS_BYTES: Final = 4 * MIB
MAX_NAMED: Final = 8
WIDTH: Final = 80


def print_summary(run_dir: Path, file: TextIO | None = None, *, url: str | None = None, is_line: bool = False) -> None:
    """Print the page of a run directory, or one line with its verdict and the command for the page.

    A run without a step prints the line, unless it has a finding.

    Args:
        run_dir: the run directory.
        file: standard output by default.
        url: the URL of the run, if it has one.
        is_line: print the line.

    Raises:
        ReportError: it cannot be produced; no other exception reaches the training.
    """
    try:
        from lightning_memprof.judge import Severity
        from lightning_memprof.read.run.load import load_run
        from lightning_memprof.report.printers.terminal import print_document, print_lines
        from lightning_memprof.report.printers.values import clean
        from lightning_memprof.report.sections import run_document

        run = without_unfinished(replace(load_run(run_dir, max_pulse_bytes=MAX_PULSE_BYTES), url=url))
        view = brief_view(run)
        if is_line or (view.verdict.severity is Severity.NONE and not any(rank.steps for rank in view.ranks)):
            place = view.commands[0].arguments
            line = f"memprof: {clean(view.verdict.title)} (lightning-memprof show {place})"
            print_lines([((line, ""),)], file)
        else:
            print_document(run_document(view), file)
    except Exception as error:
        msg = f"{run_dir}: the summary cannot be shown ({type(error).__name__}: {error}); the data is on disk"
        raise ReportError(msg) from error


def brief_view(run: Run) -> View:
    """Return the view of a run for which little is read, in about three seconds at most.

    Of the lead rank's traces the first one that is small is read: it names modules, and the allocations that stay live.
    """
    from lightning_memprof.account.memory.allocations import run_allocations
    from lightning_memprof.account.trace.report import of_rank, trace_report
    from lightning_memprof.report.view import run_view

    found = [(trace, trace.size_bytes or 0) for trace in run.files("trace", rank=run.lead.rank)]
    reports: list[TraceReport] = []
    with suppress(MemprofError):
        first = [trace for trace, size in found if size <= MAX_TRACE_BYTES][:1]
        reports = [of_rank(trace_report(trace.file), trace.rank) for trace in first]
    first = [trace for trace, size in found if size <= MAX_ALLOCATIONS_BYTES][:1]
    allocations = run_allocations(replace(run, artifacts=tuple(first)))
    return run_view(run, allocations, max_memory_bytes=MAX_MEMORY_BYTES, traces=tuple(reports))


def print_autopsy(directory: Path, rank: int, file: TextIO) -> None:
    """Print the last out-of-memory event of a rank; nothing where there is none.

    Raises:
        ArtifactError: its files cannot be read.
    """
    from lightning_memprof.report.document import Document
    from lightning_memprof.report.printers.terminal import print_page
    from lightning_memprof.report.printers.text import sections_page
    from lightning_memprof.report.sections.oom import autopsy_section

    section = autopsy_section(directory, rank)
    if section is None:
        return
    file.write("\n")
    print_page(sections_page, Document(title="", kind="run", sections=[section]), file, width=WIDTH)
    file.write("\n")
    file.flush()


def without_unfinished(run: Run) -> Run:
    """Leave out the ranks that are still writing, and note them: a rank never waits for another one.

    Partial data of such a rank is not comparable with the whole of the others. Where no rank has ended, all stay.
    """
    from lightning_memprof.read.run.problems import Note

    finished = tuple(rank for rank in run.ranks if rank.status != "running or killed")
    late = [rank.rank for rank in run.ranks if rank not in finished]
    if not finished or not late:
        return run
    shown = format_list(late, MAX_NAMED)
    named = f"rank {shown} was" if len(late) == 1 else f"ranks {shown} were"
    message = f"{named} still writing when this page was made and left out: lightning-memprof show has the whole run"
    return replace(run, ranks=finished, notes=(*run.notes, Note(finished[0].rank, "run", message)))
