"""Cells, bars and places that the sections of the page are made of."""

from __future__ import annotations

import shlex
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.run.locate import shown_place
from lightning_memprof.report.labels import called
from lightning_memprof.report.page.model import Bar, Cell
from lightning_memprof.units import format_bytes, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "NONE",
    "bars",
    "count_cell",
    "file_command",
    "index_cell",
    "name_of",
    "place",
    "share_cell",
    "size_cell",
    "time_cell",
]

NONE: Final = "-"
# They keep their colours wherever they are drawn; what has none gets grey.
COLOURS: Final = frozenset(
    ("data_wait", "transfer", "forward", "backward", "optimizer", "callbacks", "validation", "checkpoint", "logging",
     "parameter", "gradient", "optimizer_state", "activation", "input", "temporary", "compute", "communication",
     "memory_copy", "idle", "data_loading", "synchronization", "allocator", "garbage", "python", "operators", "launch",
     "queue", "requested", "rounding", "pending", "inactive_split", "free_segments")
)  # fmt: skip
READABLE: Final = frozenset({".json", ".jsonl", ".txt", ".csv", ".yaml", ".log"})


def size_cell(size: float | None, of: float | None = None) -> Cell:
    """Write bytes, with a bar where ``of`` says what would fill it."""
    if size is None:
        return Cell(NONE, style="dim")
    share = max(0.0, size / of) if of else None
    return Cell(format_bytes(size), sort=size, share=share, style="" if size else "dim")


def time_cell(ns: float | None, of: float | None = None) -> Cell:
    """Write a time, with a bar where ``of`` says what would fill it."""
    if ns is None:
        return Cell(NONE, style="dim")
    share = max(0.0, ns / of) if of else None
    return Cell(format_ns(ns), sort=ns, share=share, style="" if ns else "dim")


def count_cell(count: float | None, words: str | None = None) -> Cell:
    """Write a number, or ``words`` that stand for it."""
    if count is None:
        return Cell(NONE, style="dim")
    return Cell(f"{count:,}".replace(",", " ") if words is None else words, sort=count)


def index_cell(index: int | None) -> Cell:
    """Write the number of a rank, a step or a window."""
    return Cell(NONE, style="dim") if index is None else Cell(str(index), sort=index)


def share_cell(share: float | None) -> Cell:
    """Write a share of 1."""
    return Cell(NONE, style="dim") if share is None else Cell(percent(share), sort=share)


def bars(parts: Mapping[str, int | None], total: int, *, are_bytes: bool) -> list[Bar]:
    """Return the known parts of a whole that are not nothing, in their order."""
    form = format_bytes if are_bytes else format_ns
    return [
        Bar(
            called(name), form(value), min(1.0, max(0.0, value / total)), percent(value / total),
            name if name in COLOURS else "other",
        )
        for name, value in parts.items()
        if value and total
    ]  # fmt: skip


def name_of(name: str) -> str:
    """Write a name of ours for people."""
    return name.replace("_", " ")


def place(path: Path, root: Path, url: str | None) -> str:
    """Return a path that means the same wherever the page is read: absolute, or its URL."""
    return shown_place(path, root, url) if url is not None else str(path.absolute())


def file_command(where: str, kind: str) -> str:
    """Return the command that opens a file."""
    suffix = PurePath(where).suffix
    if kind == "trace":
        return f"lightning-memprof view {shlex.quote(where)}"
    if kind == "snapshot":
        return f"lightning-memprof show {shlex.quote(where)}"
    return f"less {shlex.quote(where)}" if suffix in READABLE else ""
