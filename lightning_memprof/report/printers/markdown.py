"""A document as GitHub's Markdown: for an issue, a merge request or a wiki."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from lightning_memprof.report.document import (
    Cell,
    Column,
    Document,
    Facts,
    Figures,
    Findings,
    Item,
    Lines,
    Paragraph,
    Stack,
    Table,
    Words,
)
from lightning_memprof.report.printers.values import cell_text, clean, more_rows, words_text
from lightning_memprof.units import percent

# Markdown or HTML would read these: text from the program is inert.
_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>#!|~&@$])")
_BREAKS: Final = re.compile(r"\s+")


def to_markdown(document: Document, *, is_full: bool = False) -> str:
    """Return the short page, or the whole document."""
    return "\n\n".join(part for part in _page(document, is_full=is_full) if part) + "\n"


def sections_to_markdown(document: Document) -> str:
    """Return the sections of a document without its verdict."""
    return "\n\n".join(part for part in _sections(document, is_full=True) if part) + "\n"


def _page(document: Document, *, is_full: bool) -> Iterator[str]:
    yield f"**{_safe(document.verdict)}**"
    yield _safe(document.why)
    yield f"Next: {_safe(document.next)}" if document.next else ""
    yield f"Saves: {_safe(document.saves)}" if document.saves else ""
    status = f" · {_safe(document.status)}" if document.status else ""
    yield _safe(document.about) + status + (f": {_safe(document.exception)}" if document.exception else "")
    yield f"{_safe(document.incomplete)}. {_safe(document.update)}" if document.incomplete else ""
    yield from _sections(document if is_full else document.summary(), is_full=is_full)
    # No fence can be closed from within: a command is one line, and four blanks precede its backticks.
    commands = document.commands if is_full else document.commands[:2]
    yield (
        "Next commands:\n\n" + "\n".join(f"    {clean(str(command), 10_000)}" for command in commands)
        if commands
        else ""
    )


def _sections(document: Document, *, is_full: bool) -> Iterator[str]:
    for section in document.sections:
        yield f"## {_safe(section.title)}"
        yield _safe(section.lead)
        for part in section.parts:
            # The verdict has a finding that is alone.
            if isinstance(part, Findings) and not document.further_findings():
                continue
            yield from _part(part, is_full=is_full)


def _part(part: Item, *, is_full: bool) -> Iterator[str]:
    title = _safe(getattr(part, "title", ""))
    if isinstance(part, Table):
        if not is_full or (not part.rows and not part.footer):
            return
        yield f"### {title}" if title else ""
        yield _table(part)
    elif isinstance(part, Stack):
        yield f"**{title}: {cell_text(part.total)}**"
        rows = [[_safe(bar.name), cell_text(bar.value), percent(bar.value.share or 0.0)] for bar in part.bars]
        rows += [[_safe(name), "-", _safe(reason)] for name, reason in part.unknown]
        yield _grid(["part", "value", "share"], ["---", "---:", "---:"], rows)
    elif isinstance(part, Facts):
        if is_full:
            yield f"### {title}" if title else ""
            yield "\n".join(f"- {_safe(name)}: {_safe(words_text(value))}" for name, value in part.rows)
    elif isinstance(part, Figures):
        rows = [
            [_safe(figure.name), _safe(cell_text(figure.value)), _safe(figure.detail)]
            for figure in part.items
            if is_full or figure.is_short
        ]
        yield _grid(["figure", "value", "detail"], ["---", "---:", "---"], rows)
    elif isinstance(part, Findings):
        yield _findings(part)
    elif isinstance(part, Lines):
        yield "\n".join(f"- {_safe(row.label)}: {_safe(row.words)}" for row in part.rows)
    elif isinstance(part, Paragraph):
        yield _safe(part.words)
    if is_full:
        yield "\n".join(f"- {_safe(note)}" for note in getattr(part, "notes", ()))


def _findings(part: Findings) -> str:
    return "\n".join(
        f"- {card.badge}: {_safe(card.heading)} {_safe(card.why)}"
        + "".join(f"\n  - {_safe(step)}" for step in card.next_steps)
        + (f"\n  - Saves: {_safe(card.saves)}" if card.saves else "")
        for card in part.cards
    )


def _table(table: Table) -> str:
    columns = [table.columns[place] for place in table.known]
    rows = [
        [_written(row[place], column) for place, column in zip(table.known, columns, strict=True)]
        for row in (*table.shown, *table.footer)
    ]
    if more := more_rows(table, len(table.shown)):
        rows.insert(len(table.shown), [more, *[""] * (len(columns) - 1)])
    rules = ["---:" if column.alignment == "right" else "---" for column in columns]
    return _grid([_safe(column.heading) for column in columns], rules, rows)


def _grid(heads: Sequence[str], rules: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rules, *rows)) if rows else ""


def _written(cell: Cell, column: Column) -> str:
    words = cell_text(cell)
    if isinstance(cell.value, str):
        return _code(words) if cell.unit in {"code", "path", "command"} else _safe(words)
    return f"{words} ({percent(cell.share)})" if column.has_share and cell.share is not None else words


def _safe(words: Words | Cell) -> str:
    """Return recorded text, escaped so that Markdown shows it literally."""
    return _SPECIAL.sub(r"\\\1", _BREAKS.sub(" ", clean(words_text(words))))


def _code(text: str) -> str:
    """Return a name as code; a name with a backtick or a bar as plain text."""
    return _safe(text) if "`" in text or "|" in text or not text.strip() else f"`{clean(text)}`"
