"""The page at the end of training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, TextIO

from lightning_memprof.errors import ReportError
from lightning_memprof.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

    from lightning_memprof.analysis.run.load import Run

__all__ = ["print_summary", "without_unfinished"]

# Training waits for the page: about two and a half seconds of reading at most, whatever the number of ranks.
MAX_PULSE_BYTES: Final = 16 * MIB
MAX_MEMORY_BYTES: Final = 8 * MIB
MAX_NAMED: Final = 8


def print_summary(run_dir: Path, file: TextIO | None = None, *, url: str | None = None) -> None:
    """Print the view of a run directory to ``file``, standard output where it is None.

    Args:
        run_dir: the run directory.
        file: where to.
        url: what the directory above ``run_dir`` is a working copy of.

    Raises:
        ReportError: it cannot be produced; whatever the cause, nothing else is raised into the training.

    """
    try:
        from lightning_memprof.analysis.run.load import load_run
        from lightning_memprof.report.terminal import print_view
        from lightning_memprof.report.view import run_view

        run = without_unfinished(replace(load_run(run_dir, max_pulse_bytes=MAX_PULSE_BYTES), url=url))
        run = _with_what_was_not_read(run)
        print_view(run_view(run, max_memory_bytes=MAX_MEMORY_BYTES), file)
    except Exception as error:
        msg = f"{run_dir}: the summary cannot be shown ({type(error).__name__}: {error}); the data is on disk"
        raise ReportError(msg) from error


def _with_what_was_not_read(run: Run) -> Run:
    """Note that the files of a device are left to those who need not wait: reading them takes as long as they are."""
    from lightning_memprof.analysis.run.load import Note
    from lightning_memprof.analysis.run.rows import text

    lead = run.lead
    files = sum(artifact.rank == lead.rank and artifact.type in {"trace", "snapshot"} for artifact in run.artifacts)
    if not files or (text(lead.facts, "device") or "cpu").startswith("cpu"):
        return run
    message = "traces and snapshots are not read here; what they show is in the report and in lightning-memprof show"
    return replace(run, notes=(*run.notes, Note(lead.rank, "files", message)))


def without_unfinished(run: Run) -> Run:
    """Leave out the ranks that are still writing, and note them; nobody waits for another rank.

    What such a rank has written so far would be compared with the whole of the others. Where no rank has come to its
    end, all stay.
    """
    from lightning_memprof.analysis.run.load import Note

    finished = tuple(rank for rank in run.ranks if rank.status != "running or killed")
    late = [str(rank.rank) for rank in run.ranks if rank not in finished]
    if not finished or not late:
        return run
    shown = ", ".join(late[:MAX_NAMED]) + (", ..." if len(late) > MAX_NAMED else "")
    named = f"rank {shown} was" if len(late) == 1 else f"ranks {shown} were"
    message = f"{named} still writing when this page was made and left out: lightning-memprof show has the whole run"
    return replace(run, ranks=finished, notes=(*run.notes, Note(finished[0].rank, "run", message)))
