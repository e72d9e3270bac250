"""Pages and tables of documents, as tests read them."""

from __future__ import annotations

import io

import pytest

from lightning_memprof.report.document import Document, Table
from lightning_memprof.report.files_view import FilesView
from lightning_memprof.report.printers.terminal import print_document
from lightning_memprof.report.printers.text import full_page, plain, short_page
from lightning_memprof.report.printers.values import cell_text
from lightning_memprof.report.sections import document_of
from lightning_memprof.report.view import View
from lightning_memprof.units import percent


def full(view: View | FilesView, width: int = 80) -> str:
    """Return the full page."""
    return plain(full_page(document_of(view), width))


def short(view: View | FilesView, width: int = 100) -> str:
    """Return the short page."""
    return plain(short_page(document_of(view), width))


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def printed(
    view: View | FilesView, width: int = 80, *, colours: bool = False, encoding: str = "utf-8", is_full: bool = True
) -> str:
    """Return what is printed to a stream of a width and an encoding."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        patch.delenv("NO_COLOR", raising=False)
        patch.setenv("FORCE_COLOR", "1" if colours else "")
        print_document(document_of(view), file, is_full=is_full)
    file.seek(0)
    return file.read()


def words(text: str) -> str:
    """Return a text on one line, with single blanks."""
    return " ".join(text.split())


def tables_of(document: Document) -> list[Table]:
    """Return all tables in their order."""
    return [part for section in document.sections for part in section.parts if isinstance(part, Table)]


def table_of(found: View | FilesView | Document, table_id: str) -> list[dict[str, str]]:
    """Return the rows of a table, and its footer, as texts by heading; none where there is no such table."""
    document = found if isinstance(found, Document) else document_of(found)
    tables = [table for table in tables_of(document) if table.id == table_id]
    return [
        {
            column.heading: cell_text(cell)
            + (f" {percent(cell.share)}" if column.has_share and cell.share is not None else "")
            for column, cell in zip(table.columns, row, strict=True)
        }
        for table in tables
        for row in (*table.rows, *table.footer)
    ]
