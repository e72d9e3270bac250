from __future__ import annotations

from pathlib import Path

from lightning_memprof.account.snapshot.report import snapshot_report
from lightning_memprof.report.document import Document
from lightning_memprof.report.printers.text import full_page, plain
from lightning_memprof.report.sections.snapshots import snapshots_section
from pages import table_of
from snapshots import MODEL, TRAIN, block, event, failed, segment, snapshot, write_snapshot


def shown(directory: Path, data: dict[str, object]) -> Document:
    section = snapshots_section([snapshot_report(write_snapshot(directory / "a.pickle", data))])
    assert section is not None
    return Document(title="a", kind="files", about="", badge="none", verdict="", why="", next="", sections=[section])


def page(document: Document) -> str:
    return plain(full_page(document, 100))


def test_a_failed_allocation_has_the_line_that_asked(tmp_path: Path) -> None:
    words = page(shown(tmp_path, snapshot([segment(block(0, 1024))], [event("alloc", 0, 1024), failed(4096, 100)])))
    assert "requested by" in words
    assert "a/train.py(3) <module>" in words


def test_allocation_sites_are_listed_by_line_and_by_function(tmp_path: Path) -> None:
    ring = [
        event("alloc", 0, 2048, MODEL),
        event("alloc", 2048, 1024, {**MODEL, "line": 9}),
        event("alloc", 4096, 9, TRAIN),
    ]
    document = shown(tmp_path, snapshot([segment(block(0, 2048), block(2048, 1024), block(4096, 512))], ring))
    assert [row["line"] for row in table_of(document, "lines-0-0")] == [
        "a/model.py(7) forward",
        "a/model.py(9) forward",
        "a/train.py(3) <module>",
    ]
    assert [row["function"] for row in table_of(document, "functions-0-0")] == [
        "a/model.py forward",
        "a/train.py <module>",
    ]
