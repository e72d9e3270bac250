"""The terminal and the process of a command: progress bars, signals, closed output, messages of other packages."""

from __future__ import annotations

import gc
import io
import logging
import signal
import sys
import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn, TextIO

from lightning_memprof.errors import ReportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rich.progress import Progress, TaskID

__all__ = [
    "ClosedOutput",
    "Reading",
    "estimating",
    "infrequent_gc",
    "merge_progress",
    "quiet_lightning",
    "reading",
    "sigterm_as_ctrl_c",
]

# Shorter waits need no bar, and a bar that flickers is a distraction.
PATIENCE_SECONDS: Final = 1.0
# Thousands of ranks make millions of containers, and none of them is in a cycle.
_GC_THRESHOLD: Final = 200_000
_IRRELEVANT: Final = (
    # Lightning uses a function of torch's pytree that torch has since renamed; no reader can act on it.
    r".*isinstance\(treespec, LeafSpec\).*",
    # The demo slices a tensor in memory: that is cheaper than receiving the slices from a worker.
    r".*does not have many workers.*",
    # `doctor` makes a Trainer on the CPU, which every machine has.
    r"GPU available but not used.*",
)


class ClosedOutput(io.TextIOBase):
    """Standard output after the caller closed it (``>&-``), where Python sets ``sys.stdout`` to None."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding that a console asks for before it writes."""
        return "utf-8"

    def write(self, text: str, /) -> NoReturn:  # noqa: ARG002 the signature of the base class
        """Refuse to write.

        Raises:
            ReportError: always.

        """
        raise ReportError("standard output is closed; redirect it to a file or to /dev/null")


class Reading:
    """A progress bar for large files: drawn only on a terminal, and only after the first second.

    Args:
        stream: the stream to draw on.

    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._since = time.monotonic()
        self._bar: Progress | None = None
        self._tasks: dict[Path, TaskID] = {}

    def update(self, file: Path, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes of a file are read."""
        if not self._stream.isatty() or time.monotonic() - self._since < PATIENCE_SECONDS:
            return
        if self._bar is None:
            self._bar = _bar("{task.description}", self._stream)
            self._bar.start()
        if file not in self._tasks:
            for task in self._tasks.values():
                self._bar.update(task, visible=False)
            self._tasks[file] = self._bar.add_task(_label(file), total=total)
        self._bar.update(self._tasks[file], completed=done, total=total)

    def end(self) -> None:
        """Remove the bar, before other output."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@contextmanager
def reading(stream: TextIO | None = None) -> Iterator[Reading]:
    """Provide a progress bar for the files that a command reads, until the end of the context at the latest."""
    bar = Reading(stream or sys.stderr)
    try:
        yield bar
    finally:
        bar.end()


@contextmanager
def merge_progress() -> Iterator[Callable[[int, int], None] | None]:
    """Provide a function that shows how many bytes are merged, or None where standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with _bar("merging", sys.stderr) as bar:
        task = bar.add_task("merging")
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def estimating() -> Iterator[Callable[[str, int, int], None]]:
    """Provide a function that shows what is simulated, and how many simulations are done of how many.

    Where standard error is not a terminal it shows nothing.
    """
    if not sys.stderr.isatty():
        yield lambda _text, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("the program", total=None)
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)


def _bar(text: str, stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(text, markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=stream), transient=True)


def _label(file: Path) -> str:
    from lightning_memprof.report.printers.values import clean

    name = clean(file.name)
    return name if len(name) <= 30 else f"{name[:29]}…"


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP as Ctrl-C, so that a command removes its partial files and ends its processes.

    A signal that is ignored stays ignored, as SIGHUP under ``nohup``.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Run Python's cyclic garbage collector rarely while a command reads a run."""
    before = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Hide Lightning's INFO lines about hardware and limits; warnings and errors stay. Lightning must be imported."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in _IRRELEVANT:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        logger.setLevel(before)
