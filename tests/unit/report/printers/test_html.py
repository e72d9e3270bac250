from __future__ import annotations

import re
from html import unescape

import pytest
from msgspec.structs import replace

from fake_runs import FakeRun, make_run
from lightning_memprof.errors import ReportError
from lightning_memprof.judge import Evidence, Finding, Severity
from lightning_memprof.report.charts import charts
from lightning_memprof.report.document import Findings
from lightning_memprof.report.opened import opened
from lightning_memprof.report.printers import html as html_module
from lightning_memprof.report.printers.html import to_html
from lightning_memprof.report.printers.values import words_text
from lightning_memprof.report.sections import run_document
from lightning_memprof.report.view import View
from lightning_memprof.report.written import main, write_page
from next_steps import step
from pages import tables_of

SCRIPT = "</script><script>alert(1)</script>"


@pytest.fixture(autouse=True)
def no_charts(monkeypatch):
    """Leave out the charts, which take a second each time and are tested where they are made."""
    monkeypatch.setattr(html_module, "charts", lambda _view: {})


def view_of(path, fake: FakeRun | None = None) -> View:
    with opened([str(make_run(path / "log", fake))]) as view:
        assert isinstance(view, View)
        return view


def test_every_text_of_the_run_is_escaped(tmp_path):
    view = view_of(tmp_path, FakeRun(training={"model": SCRIPT}, endings={0: SCRIPT}))
    finding = Finding(rule=SCRIPT, severity=Severity.WARNING, title=SCRIPT, why=SCRIPT, remedies=(step(SCRIPT),),
                      evidence=(Evidence(artifact=SCRIPT),))  # fmt: skip
    page = to_html(replace(view, findings=(finding,)))
    assert SCRIPT not in page
    assert page.count("&lt;/script&gt;&lt;script&gt;alert(1)") >= 6


def test_text_that_no_encoding_has_is_made_visible(tmp_path):
    page = to_html(view_of(tmp_path, FakeRun(training={"model": "a\udc80b\x1b[0m"})))
    assert r"a\udc80b\x1b[0m" in page
    page.encode("utf-8")


@pytest.mark.slow
def test_only_scripts_of_the_page_itself_may_run_and_none_has_another_number(tmp_path, monkeypatch):
    monkeypatch.setattr(html_module, "charts", charts)
    page = unescape(to_html(view_of(tmp_path)))
    (nonce,) = set(re.findall(r"script-src 'nonce-([\w-]+)'", page))
    opened_tags = re.findall(r"<script\b[^>]*>", re.sub(r"(<script\b[^>]*>).*?</script>", r"\1", page, flags=re.DOTALL))
    data = '<script type="application/json">'
    assert data in opened_tags
    assert all(f'nonce="{nonce}"' in tag for tag in opened_tags if tag != data)
    assert nonce not in to_html(view_of(tmp_path / "other"))
    assert "'unsafe-eval'" not in page
    assert "default-src 'none'" in page


def test_a_chart_that_fails_costs_the_charts_and_not_the_page(tmp_path, monkeypatch):
    def fail(_view):
        raise ValueError("no <b>")

    monkeypatch.setattr(html_module, "charts", fail)
    page = to_html(view_of(tmp_path))
    assert "The charts cannot be drawn (ValueError: no &lt;b&gt;)" in page
    assert 'id="files"' in page


def test_a_finding_links_to_its_section_and_to_the_row_of_its_file(tmp_path):
    view = view_of(tmp_path)
    pulse = next(artifact for artifact in view.run.artifacts if artifact.type == "pulse")
    finding = Finding(rule="input_bound", severity=Severity.WARNING, title="s", why="w", remedies=(step("n"),),
                      evidence=(Evidence(artifact=pulse.path, rank=0, steps=(3, 9)),))  # fmt: skip
    page = run_document(replace(view, findings=(finding,)))
    cards = next(part for part in page.sections[0].parts if isinstance(part, Findings)).cards
    section, row = cards[0].evidence
    assert section.href == "#steps"
    assert words_text(row.words) == "pulse.rank00000.csv, rank 0, steps 3–9"
    (table,) = [table for table in tables_of(page) if table.id == "file-table"]
    (named,) = (cells[0] for cells in table.rows if f"#{cells[0].id}" == row.href)
    assert named.value == pulse.path
    assert named.command.startswith("less ")


def test_the_finding_that_made_the_verdict_is_not_repeated(tmp_path):
    first, second = (
        Finding(rule=f"rule{n}", severity=Severity.WARNING, title=f"title {n}", why=f"why {n}",
                remedies=(step(f"first step {n}"), step(f"further step {n}")))
        for n in range(2)
    )  # fmt: skip
    page = to_html(replace(view_of(tmp_path), findings=(first, second)))
    once = ("title", "why", "first step", "further step")
    assert [[page.count(f"{words} {n}<") for words in once] for n in range(2)] == [[1] * 4] * 2
    assert page.index("first step 0<") < page.index('id="finding-0"') < page.index("further step 0<")


def test_sections_fold_but_the_overview(tmp_path):
    page = to_html(view_of(tmp_path))
    folds = re.findall(r'<section id="(\w+)"[^>]*>\s*<details class="fold">', page)
    assert "overview" not in folds
    assert {"steps", "memory", "files", "configuration"} <= set(folds)
    assert page.count("<details") == page.count("</details>")


def test_terms_have_a_tooltip_and_a_line_in_the_legend(tmp_path):
    page = to_html(view_of(tmp_path))
    legend = dict(re.findall(r"<dt>(\w+)</dt><dd>([^<]+)</dd>", page.partition('class="terms"')[2]))
    assert list(legend) == ["step", "pulse", "window", "stall", "untracked"]
    assert "batch" in legend["step"]
    for term in ("pulse", "window", "untracked"):
        assert f'<abbr title="{legend[term]}">{term}' in page


def test_ranks_that_are_missing_are_named(tmp_path):
    page = to_html(view_of(tmp_path, FakeRun(world_size=3, endings={1: None})))
    assert "rank 1 had not ended (running or killed) when this report was made" in page
    run = make_run(tmp_path / "short", FakeRun(world_size=3))
    (run / "manifest.rank00002.jsonl").unlink()
    with opened([str(run)]) as view:
        assert "rank 2 had written nothing when this report was made" in to_html(view)
    assert "when this report was made" not in to_html(view_of(tmp_path / "whole", FakeRun(world_size=3)))


def test_the_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    view = view_of(tmp_path)
    out = tmp_path / "page.html"
    write_page(view, out)
    first = out.read_text()
    assert first.rstrip().endswith("</html>")
    with pytest.raises(ReportError, match="name another place with -o"):
        write_page(view, tmp_path / "missing/page.html")

    def fail(_view):
        raise RuntimeError("odd")

    monkeypatch.setattr(html_module, "to_html", fail)
    with pytest.raises(ReportError, match="RuntimeError: odd"):
        write_page(view, out)
    assert out.read_text() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "page.html"]


def test_the_process_writes_the_page_or_a_line_that_says_why_not(tmp_path, monkeypatch):
    monkeypatch.setattr("os.nice", lambda _more: 0)
    run = make_run(tmp_path / "log")
    (run / "report.log").write_text("old")
    assert main([str(run)]) == 0
    assert (run / "report.html").stat().st_size > 10_000
    assert not (run / "report.log").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main([str(empty)]) == 1
    assert len((empty / "report.log").read_text().splitlines()) == 1
    assert main([str(tmp_path / "gone")]) == 1
