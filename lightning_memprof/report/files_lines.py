"""Traces and snapshots on the page for the terminal: of a run, and by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.run.locate import shown_path
from lightning_memprof.report.snapshot_lines import snapshot_sections
from lightning_memprof.report.trace_lines import trace_sections
from lightning_memprof.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.report.files_view import FilesView
    from lightning_memprof.report.memory_tables import Line
    from lightning_memprof.report.view import View

__all__ = ["device_sections", "file_sections", "files_rows"]

MAX_FILES: Final = 16


def file_sections(view: FilesView, width: int, *, ascii_only: bool) -> Iterator[list[Line]]:
    """Yield the sections of files by themselves, in lines of at most ``width`` characters (at least 40)."""
    yield from trace_sections(view.traces, width, ascii_only=ascii_only)
    yield from snapshot_sections(view.snapshots, width, ascii_only=ascii_only)


def device_sections(view: View, width: int, *, ascii_only: bool) -> Iterator[list[Line]]:
    """Yield what a run's traces and snapshots say of its device; a trace of the host alone says no more than its steps.

    As :func:`file_sections` does.
    """
    on_device = [trace for trace in view.traces if trace.gpu_window is not None]
    yield from trace_sections(on_device, width, ascii_only=ascii_only)
    yield from snapshot_sections(view.snapshots, width, ascii_only=ascii_only)


def files_rows(view: FilesView) -> Iterator[tuple[str, str, str]]:
    """Yield ``(type, size, name)`` of the files that were read."""
    kinds = [
        *(("trace", trace.file) for trace in view.traces),
        *(("snapshot", snapshot.file) for snapshot in view.snapshots),
    ]
    for kind, file in kinds[:MAX_FILES]:
        yield kind, format_bytes(view.sizes[file]), shown_path(file)
    if len(kinds) > MAX_FILES:
        rest = sum(view.sizes[file] for _, file in kinds[MAX_FILES:])
        yield "", format_bytes(rest), f"{len(kinds) - MAX_FILES} more"
    if view.left_out:
        yield "", "-", f"not looked at: {format_count(view.left_out, 'more file')} of the directory"
