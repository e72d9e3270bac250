"""A bar on standard error while large files are read; nothing where that is no terminal, or where it is quick."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.progress import Progress, TaskID

__all__ = ["Reading", "reading"]

# Whoever waits less wonders less, and a bar that flickers is in the way.
PATIENCE_SECONDS: Final = 1.0


class Reading:
    """The bar.

    Args:
        stream: where it is drawn.

    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._since = time.monotonic()
        self._bar: Progress | None = None
        self._tasks: dict[Path, TaskID] = {}

    def told(self, file: Path, done: int, whole: int) -> None:
        """Show that ``done`` of a file's ``whole`` bytes were read."""
        if not self._stream.isatty() or time.monotonic() - self._since < PATIENCE_SECONDS:
            return
        bar = self._bar or self._begin()
        if file not in self._tasks:
            for task in self._tasks.values():
                bar.update(task, visible=False)
            self._tasks[file] = bar.add_task(_label(file), total=whole)
        bar.update(self._tasks[file], completed=done, total=whole)

    def end(self) -> None:
        """Take the bar away, before anything else is printed."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _begin(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
        self._bar.start()
        return self._bar


@contextmanager
def reading(stream: TextIO | None = None) -> Iterator[Reading]:
    """Give a bar, and take it away at the end of the context at the latest."""
    bar = Reading(stream or sys.stderr)
    try:
        yield bar
    finally:
        bar.end()


def _label(file: Path) -> str:
    from lightning_memprof.report.words import clean

    name = clean(file.name)
    return name if len(name) <= 30 else f"{name[:29]}…"
