"""A recorded run in Python: ``load_run(path)`` with its findings and its report."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from lightning_memprof.read.run import load, model
from lightning_memprof.units import format_count

if TYPE_CHECKING:
    from pathlib import Path

    from lightning_memprof.judge import Finding
    from lightning_memprof.report.document import Document
    from lightning_memprof.report.view import View

__all__ = ["Run", "load_run"]


class Run(model.Run, frozen=True, dict=True):
    """A run directory: the rows of every rank, and the findings and the report of ``lightning-memprof show``.

    In a notebook it is displayed as the HTML report.
    """

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings, the most severe first.

        Raises:
            ArtifactError: the run directory is no longer readable.
        """
        return self._view.findings

    def document(self) -> Document:
        """Return the report as data: sections, tables and figures, whose values have units.

        Raises:
            ArtifactError: the run directory is no longer readable.
        """
        from lightning_memprof.report.sections import document_of

        return document_of(self._view)

    def _repr_html_(self) -> str:
        from lightning_memprof.report.printers.html import framed, to_html

        return framed(to_html(self._view))

    def __repr__(self) -> str:
        lead = self.lead
        return f"Run({str(self.directory)!r}: {lead.facts.stage}, {format_count(lead.steps, 'step')}, {self.status})"

    @cached_property
    def _view(self) -> View:
        from lightning_memprof.report.opened import opened

        with opened([str(self.directory)]) as view:
            return view  # type: ignore[return-value]  # a run directory has the view of a run


def load_run(path: str | Path, *, max_pulse_bytes: int | None = None, rank: int | None = None) -> Run:
    """Read a recorded run.

    Args:
        path: the run directory, its log directory, or a parent directory; of several runs, the newest.
        max_pulse_bytes: stop reading pulses after this many bytes, and note the ranks without one; None reads all. A
            pulse has about 100 bytes per step and is read at about 10 MB/s.
        rank: a rank to read in full, however many ranks there are.

    Raises:
        ArtifactError: there is no run, or no manifest is readable.
    """
    loaded = load.load_run(path, max_pulse_bytes=max_pulse_bytes, rank=rank)
    return Run(**msgspec.structs.asdict(loaded))
