"""The progress of a command: a line that is redrawn on a terminal, log lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, Final, TextIO, cast

from lightning_memprof.cli.command import say

# A bar for a shorter wait would only flicker.
PATIENCE_SECONDS: Final = 1.0
_REDRAW_SECONDS: Final = 0.1
_BAR_WIDTH: Final = 24
# Between lines in a log: a line for each run would hide the rest.
_LINE_SECONDS: Final = 10.0


class ProgressLine:
    """A line on a terminal with the current activity and its progress, until :meth:`clear`; nothing elsewhere.

    Args:
        stream: the terminal.
        patience: seconds before the line is drawn.
    """

    def __init__(self, stream: TextIO, patience: float = 0.0) -> None:
        from lightning_memprof.report.printers.terminal import Display

        self._stream = stream
        self._display = Display(stream)
        self._text = ""
        self._since = self._drawn = time.monotonic()
        self._first = self._since + patience

    def read(self, file: Path, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes of a file are read."""
        self.update(file.name if len(file.name) <= 30 else f"{file.name[:29]}…", done, total, in_bytes=True)

    def update(self, text: str, done: int = 0, total: int = 0, *, in_bytes: bool = False) -> None:
        """Redraw the line: with a bar if ``total`` is not 0, and with the remaining time if both are bytes."""
        now = time.monotonic()
        if now < self._first or not self._stream.isatty():
            return
        if text != self._text:
            self._text, self._since = text, now
        elif now - self._drawn < _REDRAW_SECONDS:
            return
        from lightning_memprof.report.printers.layout import DIM, bar, cut, pad
        from lightning_memprof.report.printers.terminal import page_width
        from lightning_memprof.report.printers.values import clean
        from lightning_memprof.units import format_bytes, format_ns

        self._drawn = now
        words = clean(text)
        if in_bytes and total:
            words += f"  {format_bytes(done)} of {format_bytes(total)}"
            left_s = (now - self._since) * (total - done) / done if done else 0
            words += f", {format_ns(left_s * 1e9)} left" if left_s > 1 else ""
        drawn = bar(done / total, _BAR_WIDTH) if total else ""
        rest = pad("", _BAR_WIDTH - len(drawn)).replace(" ", "─") + " " if total else ""
        room = page_width(self._stream) - len(drawn + rest) - 1
        self._display.show([((drawn, "cyan"), (rest, DIM), (cut(words, max(room, 1)), ""))])

    def clear(self) -> None:
        """Remove the line, before other output; the next update draws it again."""
        self._display.clear()
        self._text = ""


@contextmanager
def reading(stream: TextIO | None = None) -> Iterator[ProgressLine]:
    """Show the progress of the files that a command reads, until the end of the context at the latest."""
    line = ProgressLine(stream or sys.stderr, PATIENCE_SECONDS)
    try:
        yield line
    finally:
        line.clear()


class _Above:
    """A terminal whose text appears above a progress line."""

    def __init__(self, stream: TextIO, line: ProgressLine) -> None:
        self._stream = stream
        self._line = line

    def write(self, text: str) -> int:
        self._line.clear()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def counting(first: str) -> Iterator[Callable[[str, int, int], None]]:
    """Provide a function that shows the current activity, the amount done and the total; 0 if unknown.

    If standard error is not a terminal, it prints at most one line per 10 seconds. On a terminal, other output to
    ``sys.stderr`` appears above the line.
    """
    if not sys.stderr.isatty():
        printed = -math.inf

        def write(text: str, _done: int, _total: int) -> None:
            nonlocal printed
            if time.monotonic() - printed > _LINE_SECONDS:
                printed = time.monotonic()
                say(f"memprof: {text}", sys.stderr)

        yield write
        return
    line = ProgressLine(sys.stderr)
    line.update(first)
    try:
        with redirect_stderr(cast("TextIO", _Above(sys.stderr, line))):
            yield line.update
    finally:
        line.clear()
