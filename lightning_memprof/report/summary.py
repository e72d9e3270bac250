"""The page at the end of training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, TextIO

from lightning_memprof.errors import ReportError
from lightning_memprof.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["print_summary"]

# Training waits for the page: about two and a half seconds of reading at most, whatever the number of ranks.
MAX_PULSE_BYTES: Final = 16 * MIB
MAX_MEMORY_BYTES: Final = 8 * MIB


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
        from lightning_memprof.analysis.run import load_run
        from lightning_memprof.report.terminal import print_view
        from lightning_memprof.report.view import run_view

        run = replace(load_run(run_dir, max_pulse_bytes=MAX_PULSE_BYTES), url=url)
        print_view(run_view(run, max_memory_bytes=MAX_MEMORY_BYTES), file)
    except Exception as error:
        msg = f"{run_dir}: the summary cannot be shown ({type(error).__name__}: {error}); the data is on disk"
        raise ReportError(msg) from error
