"""A document in a terminal: at most 100 columns wide, with colours where the terminal has them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TextIO

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from lightning_memprof.report.document import Document
from lightning_memprof.report.printers.layout import Line
from lightning_memprof.report.printers.text import encoded, full_page, sections_page, short_page

WIDTH: Final = 100


def print_document(document: Document, file: TextIO | None = None, *, is_full: bool = False) -> None:
    """Print the short page of a document, or every section, to ``file`` (None: standard output).

    Text from the program (names of modules, paths, messages) is never read as markup, and its control characters are
    made visible.
    """
    render(document, new_console(file), is_full=is_full)


def render(document: Document, console: Console, *, is_full: bool = False) -> None:
    """Print a document on a console."""
    print_lines(full_page if is_full else short_page, document, console)


def print_sections(document: Document) -> None:
    """Print the sections of a document without its verdict."""
    print_lines(sections_page, document, new_console(None))


def new_console(file: TextIO | None) -> Console:
    """Return a console that writes to a file, standard output where it is None."""
    console = Console(file=file or sys.stdout)
    # Otherwise rich reads it from the environment hundreds of times, a fifth of the time of a page.
    console.size = console.size
    return console


def print_lines(
    page: Callable[..., Sequence[Line]], document: Document, console: Console, *, width: int = WIDTH
) -> None:
    """Print the lines that a page makes of a document, at most ``width`` columns wide."""
    ascii_only = console.options.ascii_only
    lines = page(document, max(1, min(console.width, width)), ascii_only=ascii_only)
    # Written by us: where the reader of a pipe has gone, rich would end the process. Printed at once: a print of each
    # line takes half as long again as making them.
    with console.capture() as captured:
        console.print(Segments(_segments(lines)), end="", soft_wrap=True)
    text = captured.get()
    # Rich would raise on the first character that the terminal's encoding does not have.
    console.file.write(encoded(text, console.encoding))
    console.file.flush()


def rich_text(lines: Iterable[Line]) -> Text:
    """Return lines as rich's text, for a display that is updated in place."""
    return Text("\n").join(Text.assemble(*line) for line in lines)


def _segments(lines: Iterable[Line]) -> Iterable[Segment]:
    for line in lines:
        pieces = list(line)
        while pieces and not pieces[-1][0].rstrip():
            pieces.pop()
        for place, (text, style) in enumerate(pieces):
            words = text.rstrip() if place == len(pieces) - 1 else text
            yield Segment(words, Style.parse(style) if style else None)
        yield Segment.line()
