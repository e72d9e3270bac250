"""What traces may cost a run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Budget"]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What the traces of one rank may cost; None is no bound.

    Args:
        max_trace_bytes: size of one window's trace as torch writes it, before compression.
        max_export_seconds: time for which the training stands still at the end of one window.
        max_run_trace_bytes: size of all traces of the run, as they lie on the disk.
        max_run_export_seconds: time for which the training stands still in the whole run.
        keep_windows: number of windows to keep on the disk; the oldest go first.

    """

    max_trace_bytes: int | None = None
    max_export_seconds: float | None = None
    max_run_trace_bytes: int | None = None
    max_run_export_seconds: float | None = None
    keep_windows: int | None = None
