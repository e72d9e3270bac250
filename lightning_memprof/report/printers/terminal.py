"""A document on a terminal: at most 100 columns wide, in color if the terminal has colors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, TextIO

from lightning_memprof.report.document import Document
from lightning_memprof.report.printers.layout import Line
from lightning_memprof.report.printers.text import encoded, full_page, plain, short_page

WIDTH: Final = 100
_DEFAULT_SIZE: Final = os.terminal_size((80, 24))
# Select Graphic Rendition codes (ECMA-48) by style name.
_CODES: Final = {
    "bold": "1", "red": "31", "green": "32", "yellow": "33", "blue": "34", "magenta": "35", "cyan": "36",
    "bright_black": "90",
}  # fmt: skip
_CLEAR: Final = "\x1b[{}F\x1b[J"
"""Moves to the start of the line that many lines up, and clears everything below."""


def print_document(document: Document, file: TextIO | None = None, *, is_full: bool = False) -> None:
    """Print the short page of a document, or every section, to ``file`` (None: standard output).

    Text from the program (names of modules, paths, messages) cannot style the page: its control characters are escaped.
    """
    print_page(full_page if is_full else short_page, document, file)


def print_page(
    page: Callable[..., Sequence[Line]], document: Document, file: TextIO | None = None, *, width: int = WIDTH
) -> None:
    """Print the lines that a page makes of a document, at most ``width`` columns wide."""
    file = file or sys.stdout
    print_lines(page(document, page_width(file, width)), file)


def print_lines(lines: Iterable[Line], file: TextIO | None = None) -> None:
    """Print lines in their styles."""
    file = file or sys.stdout
    # One write: a write for each line takes half as long again as formatting the lines.
    file.write(_text(lines, file))
    file.flush()


class Display:
    """Lines on a terminal that are redrawn in place.

    Args:
        file: the terminal.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._height = 0

    def show(self, lines: Sequence[Line]) -> None:
        """Replace the lines; those below the last row of the terminal are not drawn."""
        # Lines that have scrolled off the terminal cannot be redrawn.
        shown = lines[: max(1, _size(self._file).lines - 1)]
        self._write(_text(shown, self._file), len(shown))

    def clear(self) -> None:
        """Remove the lines, before other output."""
        if self._height:
            self._write("", 0)

    def _write(self, text: str, height: int) -> None:
        self._file.write((_CLEAR.format(self._height) if self._height else "") + text)
        self._file.flush()
        self._height = height


def page_width(file: TextIO, width: int = WIDTH) -> int:
    """Return the width of a page in ``file``: that of the terminal, at most ``width`` columns."""
    return max(1, min(_size(file).columns, width))


def is_terminal(file: TextIO | None) -> bool:
    """Return whether ``file`` is a terminal; a stream may be closed, of a program's own type, or None."""
    with suppress(AttributeError, ValueError):
        return file.isatty()  # type: ignore[union-attr]
    return False


def _size(file: TextIO) -> os.terminal_size:
    """Return the size of the terminal of ``file`` or of a standard stream; ``COLUMNS`` overrides its width."""
    columns = os.environ.get("COLUMNS", "")
    found = _DEFAULT_SIZE
    for stream in (file, sys.__stdin__, sys.__stdout__, sys.__stderr__):
        # A stream may be closed, of a program's own type, or None.
        with suppress(AttributeError, OSError, ValueError):
            size = os.get_terminal_size(stream.fileno())  # type: ignore[union-attr]
            if size.columns and size.lines:
                found = size
                break
    return os.terminal_size((int(columns), found.lines)) if columns.isdecimal() and int(columns) else found


def _has_colors(file: TextIO) -> bool:
    """Return whether to style text: on a terminal unless ``NO_COLOR`` is set; elsewhere if ``FORCE_COLOR`` is set."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return is_terminal(file) and os.environ.get("TERM") not in {"dumb", "unknown"}


def _text(lines: Iterable[Line], file: TextIO) -> str:
    """Return lines as text in the encoding of ``file``."""
    return encoded(_styled(lines) if _has_colors(file) else plain(lines), file)


def _styled(lines: Iterable[Line]) -> str:
    """Return lines with their styles as escape sequences, without blanks at their ends."""
    written: list[str] = []
    for line in lines:
        pieces = list(line)
        while pieces and not pieces[-1][0].rstrip():
            pieces.pop()
        for place, (text, style) in enumerate(pieces):
            words = text.rstrip() if place == len(pieces) - 1 else text
            codes = ";".join(_CODES[name] for name in style.split())
            written.append(f"\x1b[{codes}m{words}\x1b[0m" if codes and words else words)
        written.append("\n")
    return "".join(written)
