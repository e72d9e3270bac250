"""The pages that a training run prints: the short one at its end, and the report of an out-of-memory error."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from msgspec.structs import replace

from lightning_memprof.errors import MemprofError, ReportError
from lightning_memprof.units import MIB, format_list

if TYPE_CHECKING:
    from lightning_memprof.account.memory.model import WindowAllocations
    from lightning_memprof.account.trace.model import TraceReport
    from lightning_memprof.read.run.model import ArtifactFile, Run
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
        from lightning_memprof.report.printers.terminal import print_document
        from lightning_memprof.report.sections import run_document
        from lightning_memprof.report.view import run_view

        run = without_unfinished(replace(load_run(run_dir, max_pulse_bytes=MAX_PULSE_BYTES), url=url))
        view = run_view(run, _allocations(run), max_memory_bytes=MAX_MEMORY_BYTES, traces=_traces(run))
        if is_line or (view.verdict.severity is Severity.NONE and not any(rank.steps for rank in view.ranks)):
            _print_line(view, file or sys.stdout)
        else:
            print_document(run_document(view), file)
    except Exception as error:
        msg = f"{run_dir}: the summary cannot be shown ({type(error).__name__}: {error}); the data is on disk"
        raise ReportError(msg) from error


def _print_line(view: View, file: TextIO) -> None:
    from lightning_memprof.report.printers.text import encoded
    from lightning_memprof.report.printers.values import clean, words_text

    place = view.commands[0].arguments
    line = f"memprof: {clean(words_text(view.verdict.title))} (lightning-memprof show {place})\n"
    file.write(encoded(line, getattr(file, "encoding", None) or "utf-8"))
    file.flush()


def _traces(run: Run) -> tuple[TraceReport, ...]:
    """Return the report of the lead rank's first trace, none where it is large or cannot be read."""
    from lightning_memprof.account.trace.report import of_rank, trace_report

    with suppress(MemprofError):
        return tuple(
            of_rank(trace_report(trace.file), trace.rank) for trace in _first_small_trace(run, MAX_TRACE_BYTES)
        )
    return ()


def _allocations(run: Run) -> tuple[WindowAllocations, ...]:
    """Return the allocations in the lead rank's first trace, where it is small: they name what stays live."""
    from lightning_memprof.account.memory.allocations import run_allocations

    return run_allocations(replace(run, artifacts=tuple(_first_small_trace(run, MAX_ALLOCATIONS_BYTES))))


def _first_small_trace(run: Run, max_bytes: int) -> list[ArtifactFile]:
    traces = run.files("trace", rank=run.lead.rank)
    return [trace for trace in traces if (trace.size_bytes or 0) <= max_bytes][:1]


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
