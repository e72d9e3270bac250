"""What a process did not write to the end, because it died or could not: temporary files, and lines that were cut."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from lightning_memprof.artifacts.naming import (
    TraceName,
    numbered,
    parse_numbered,
    pulse_name,
    regions_name,
    series_path,
    system_name,
    temporary_name,
)
from lightning_memprof.artifacts.plain_file import open_plain

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from lightning_memprof.analysis.run.layout import Layout

__all__ = ["cut_lines", "unfinished_files"]

# A window is closed before its trace is compressed, and with two that wait the next one has none.
_LAST_WINDOWS: Final = 4
_SUFFIX: Final = temporary_name("")
# Kineto writes a trace under another temporary name first.
_SUFFIXES: Final = (_SUFFIX, f"{_SUFFIX}.tmp")
_CUT: Final = "its last line is not whole: its process died while it wrote"
_NOT_WHOLE: Final = "is not whole: its process is still writing it, could not, or died before it was done"
_RAW: Final = (
    "is the trace as torch wrote it, plain JSON: its process is still compressing it, could not, or died meanwhile"
)


def cut_lines(layout: Layout, rank: int) -> Iterator[tuple[str, str]]:
    """Give, of the files that grow line by line all the run, those whose last line is cut, and what is wrong."""
    for name in (pulse_name(rank), system_name(rank), regions_name(rank)):
        with suppress(OSError), open_plain(layout.directory / name, buffering=0) as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
                yield name, _CUT


def unfinished_files(
    layout: Layout, rank: int, windows: Sequence[int], failed: Collection[int]
) -> Iterator[tuple[str, str]]:
    """Give the files that a rank has not finished, as paths from the root, and what they are.

    Args:
        layout: of the run.
        rank: the rank.
        windows: of this rank, in order; of a process that died the last can have such files.
        failed: windows in which a collector failed; it may not have been able to remove its file.

    """
    raw = f".operator_trace.jsonl{_SUFFIX}"
    for window in sorted({*windows[-_LAST_WINDOWS:], *failed}):
        series = layout.directory / series_path(window, rank, "")
        for file in _temporary(series.parent):
            if file.name.startswith(f"rank{rank:05d}."):
                yield _piece(layout, file), _RAW if file.name.endswith(raw) else _NOT_WHOLE
    for file in _temporary(layout.directory):
        if f"rank{rank:05d}." in file.name or f"rank_{rank}_" in file.name or f"rank_{rank}." in file.name:
            yield _piece(layout, file), _NOT_WHOLE
    run = parse_numbered(layout.directory.name)[1]
    for file in _temporary(layout.root):
        name = TraceName.parse(file.name.partition(_SUFFIX)[0])
        if name is not None and name.rank == rank and name.filename == numbered(parse_numbered(name.filename)[0], run):
            yield _piece(layout, file), _NOT_WHOLE


def _temporary(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            return sorted(directory / entry.name for entry in entries if entry.name.endswith(_SUFFIXES))
    except OSError:
        return []


def _piece(layout: Layout, file: Path) -> str:
    return file.relative_to(layout.root).as_posix()
