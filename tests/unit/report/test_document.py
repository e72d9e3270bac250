from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from fake_runs import HEALTHY, FakeRun, make_run
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.document import (
    Badge,
    Card,
    Cell,
    Column,
    Document,
    Findings,
    Phrase,
    Section,
    Table,
    phrase,
)
from lightning_memprof.report.printers.html import render_document
from lightning_memprof.report.printers.json import encode
from lightning_memprof.report.printers.markdown import to_markdown
from lightning_memprof.report.printers.text import full_page, plain, short_page
from lightning_memprof.report.sections import run_document
from lightning_memprof.report.view import run_view
from lightning_memprof.units import MIB
from pages import tables_of

LONG = "100% of the peak of cuda:0 is allocated by /home/me/project/tests_oom/test_oom.py(48): forward."
HOSTILE = "<b>evil</b>|`x`\x1b[31m"


@pytest.fixture
def document(tmp_path: Path) -> Document:
    return run_document(run_view(load_run(make_run(tmp_path))))


def with_table(document: Document, table: Table) -> Document:
    """Add a table to the section of the steps, as whoever writes a section does."""
    sections = [
        replace(section, parts=[*section.parts, table]) if section.id == "steps" else section
        for section in document.sections
    ]
    return replace(document, sections=sections)


def test_a_table_that_is_written_once_is_in_all_four_formats(document: Document) -> None:
    table = Table(
        id="caches",
        title="Caches of the tokenizer",
        columns=(Column("cache", "code"), Column("hit share", "share"), Column("bytes", "bytes")),
        rows=[
            (Cell("merges", "code"), Cell(0.53, "share"), Cell(12 * MIB, "bytes")),
            (Cell(HOSTILE, "code"), Cell(None, "share"), Cell(0, "bytes")),
        ],
        notes=["counted in recorded steps"],
    )
    changed = with_table(document, table)
    terminal = plain(full_page(changed, 80))
    markdown, html = to_markdown(changed, is_full=True), render_document(changed)
    for page in (terminal, markdown, html):
        assert page.count("Caches of the tokenizer") >= 1
        assert all(part in page for part in ("merges", "hit share", "53%", "12.0 MiB", "counted in recorded steps"))
        assert "\x1b" not in page
    assert "<b>evil" not in html
    assert "<b>evil" not in markdown
    assert "| `merges` | 53% | 12.0 MiB |" in markdown
    (section,) = [section for section in encode(changed)["sections"] if section["id"] == "steps"]
    found = section["parts"][-1]
    assert (found["part"], found["id"]) == ("table", "caches")
    assert [(column["heading"], column["unit"]) for column in found["columns"]][1] == ("hit share", "share")
    assert found["rows"][0][2] == {"value": 12 * MIB, "unit": "bytes"}
    assert found["rows"][1][1] == {"value": None, "unit": "share"}


def test_each_table_has_an_id_of_its_own(document: Document) -> None:
    ids = [table.id for table in tables_of(document)]
    assert len(ids) == len(set(ids))


def test_each_row_has_a_cell_for_each_column(document: Document) -> None:
    for table in tables_of(document):
        assert {len(row) for row in (*table.rows, *table.footer)} <= {len(table.columns)}, table.id


def test_a_share_is_that_of_the_whole_and_never_negative() -> None:
    assert Cell(5, "ns", 10).share == 0.5
    assert Cell(-5, "bytes", 10).share == 0.0
    without = (Cell(5, "bytes"), Cell(None, "bytes", 10), Cell(5, "bytes", 0), Cell("5"))
    assert [cell.share for cell in without] == [None] * 4


def test_a_phrase_has_its_values_and_a_bare_number_is_a_count() -> None:
    assert phrase("{bytes} of {} files", 5, 7) == Phrase((Cell(5, "bytes"), " of ", Cell(7, "count"), " files"))
    with pytest.raises(ValueError, match="takes 1 values, not 2"):
        phrase("{}", 1, 2)


def test_a_column_without_a_value_is_not_shown_but_the_first_one() -> None:
    columns = (Column("name"), Column("bytes", "bytes"), Column("count", "count"))
    table = Table(id="t", title="", columns=columns, rows=[(Cell(None), Cell(None, "bytes"), Cell(0, "count"))])
    assert table.known == [0, 2]


def test_sections_can_be_chosen(document: Document) -> None:
    assert [section.id for section in document.only(["memory", "steps"]).sections] == ["steps", "memory"]
    assert {section.id for section in document.summary().sections} == {"overview"}
    assert document.section("nowhere") is None
    assert Cell(None).value is None


def with_findings(badge: Badge, *sentences: str) -> Document:
    """A document whose verdict has a finding of its own where it has a badge."""
    cards = [Card(f"finding-{n}", "rule", "info", sentence, "", ()) for n, sentence in enumerate(sentences)]
    overview = Section("overview", "Overview", parts=[Findings(cards)], summary=True)
    return Document(title="run", kind="run", verdict="The verdict.", badge=badge, sections=[overview])


def test_a_verdict_without_a_finding_hides_none() -> None:
    healthy = with_findings("none", "A rank is slow.")
    assert "also      A rank is slow." in plain(short_page(healthy, 80))
    assert "- info: A rank is slow." in to_markdown(healthy)
    slow = with_findings("info", "A rank is slow.")
    assert "A rank is slow." not in plain(short_page(slow, 80))
    assert "A rank is slow." not in to_markdown(slow)


def test_further_findings_are_whole_in_80_columns_and_none_is_repeated() -> None:
    shown = plain(short_page(with_findings("none", LONG, LONG, "Other."), 80))
    assert " ".join(shown.split()) == f"verdict The verdict. also {LONG} Other."


def test_each_page_counts_the_rows_that_a_table_does_not_have() -> None:
    table = Table(
        "t", "Table", (Column("name", "code"),), [(Cell(f"row{n}", "code"),) for n in range(3)], top=1, left_out=5
    )
    made = Document(title="run", kind="run", sections=[Section("s", "Section", parts=[table])])
    assert "7 more: --format json" in plain(full_page(made, 80))
    assert "7 more: --format json" in to_markdown(made, is_full=True)
    assert "<li>5 more: --format json</li>" in render_document(made)


def test_what_the_next_steps_save_stands_beside_them_in_every_format(tmp_path: Path) -> None:
    waits = FakeRun(phases=lambda *_: {**HEALTHY, "data_wait": sum(HEALTHY.values())})
    view = run_view(load_run(make_run(tmp_path, waits)))
    saves = view.verdict.saves
    assert view.verdict.rule == "input_bound"
    assert saves.endswith("of each step")
    also = replace(view.verdict, rule="other", owner="other", title="Another one.")
    page = run_document(replace(view, findings=(view.verdict, also)))
    assert plain(short_page(page, 80)).count(saves) == 1
    assert plain(full_page(page, 80)).count(saves) == 2
    assert to_markdown(page, is_full=True).count(f"Saves: {saves}") == 3
    assert render_document(page).count(f"<b>Saves</b> {saves}") == 2
