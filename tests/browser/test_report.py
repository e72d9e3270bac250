from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof import load_run
from lightning_memprof.report.opened import opened
from lightning_memprof.report.printers.html import to_html
from lightning_memprof.units import MIB

pytestmark = pytest.mark.browser

HOSTILE = '</script><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\'\u202e\x1b[31m'
MOST_BYTES = 2_500_000


def written(target: Path, out: Path) -> Path:
    with opened([str(target)]) as view:
        out.write_text(to_html(view), encoding="utf-8")
    return out


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("page")
    fake = FakeRun(world_size=3, device_bytes=lambda step: 100 * MIB + step, training={"model": HOSTILE})
    run = make_run(home / "a <b>&amp; run", fake)
    return written(run, home / "report.html")


@pytest.fixture(scope="module")
def heard() -> list[str]:
    """What pages said on the console, and what they asked for."""
    return []


@pytest.fixture(scope="module")
def open_page(browser, heard):
    opened_contexts = []

    def open_(file: Path, **options):
        context = browser.new_context(viewport={"width": 1300, "height": 900}, **options)
        opened_contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: heard.append(request.url) if request.url != file.as_uri() else None)
        page.on("console", lambda said: heard.append(said.text) if said.type in {"error", "warning"} else None)
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.goto(file.as_uri())
        return page

    yield open_
    for context in opened_contexts:
        context.close()


UNFOLD = "for (const fold of document.querySelectorAll('.fold')) fold.open = true"


@pytest.fixture(scope="module")
def page(page_file, open_page):
    page = open_page(page_file)
    page.evaluate(UNFOLD)
    return page


def outside(heard: list[str]) -> list[str]:
    return [url for url in heard if not url.startswith(("data:", "blob:"))]


def shown(page, table: str) -> list[str]:
    return page.eval_on_selector_all(
        f"#{table} tbody tr:not([hidden])", "rows => rows.map(row => row.cells[0].textContent)"
    )


def test_the_page_asks_for_nothing_and_complains_of_nothing(page, heard):
    for section in page.query_selector_all("main section"):
        section.scroll_into_view_if_needed()
    page.wait_for_timeout(1500)
    assert outside(heard) == []
    assert page.evaluate("document.querySelectorAll('.drawn .chart').length") >= 1
    assert page.evaluate("document.querySelectorAll('.chart-failed').length") == 0
    # As wide as the window: nothing is cut off, and only tables scroll by themselves.
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_hostile_names_are_text(page):
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.images.length") == 0
    assert "</script><img src=x onerror=" in page.inner_text(".title")
    # What could turn the reading direction, or steer a terminal that the text is pasted into, is made visible.
    assert r"\u202e\x1b[31m" in page.inner_text(".title")


def test_a_script_that_gets_into_the_page_would_not_run(page, heard):
    before = len(heard)
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked=2\">')")
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked=3'}))")
    page.evaluate("fetch('http://127.0.0.1:9/').catch(() => 0)")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None
    refused = heard[before:]
    del heard[before:]
    assert any("Content Security Policy" in text for text in refused)
    assert not any(text.startswith("http") for text in refused)


def test_the_sections_are_all_there_and_every_link_leads_somewhere(page):
    ids = page.eval_on_selector_all("main section", "all => all.map(one => one.id)")
    assert ids[0] == "overview"
    assert {"steps", "memory", "modules", "ranks", "files", "configuration", "overhead"} <= set(ids)
    lost = page.eval_on_selector_all(
        "a[href^='#']", "all => all.map(one => one.hash.slice(1)).filter(id => !document.getElementById(id))"
    )
    assert lost == []
    elsewhere = page.eval_on_selector_all(
        "a[href]", "all => all.filter(one => !one.getAttribute('href').startsWith('#')).length"
    )
    assert elsewhere == 0


def test_a_link_unfolds_its_section_and_a_chart_in_it_is_drawn(page_file, open_page):
    page = open_page(page_file)
    assert page.locator("#steps .parts").is_hidden()
    page.click("nav a[href='#steps']")
    assert page.locator("#steps .parts").is_visible()
    page.wait_for_selector("#chart-steps[data-state=drawn]", timeout=60_000)
    assert page.evaluate("document.querySelector('#chart-steps canvas, #chart-steps .chart-place > *') !== null")
    page.locator("#files summary").press("Enter")
    assert page.locator("#file-table").is_visible()


def test_a_table_is_sorted_and_searched_with_the_keyboard(page):
    table = "file-table"
    names = shown(page, table)
    page.focus(f"#{table} thead button")
    page.keyboard.press("Enter")
    assert shown(page, table) == sorted(names, key=str.lower)
    page.keyboard.press("Enter")
    assert shown(page, table) == sorted(names, key=str.lower, reverse=True)
    assert page.get_attribute(f"#{table} thead th", "aria-sort") == "descending"
    page.focus(f"#{table} thead th:nth-child(3) button")
    page.keyboard.press("Space")
    sizes = page.eval_on_selector_all(f"#{table} tbody td:nth-child(3)", "all => all.map(one => +one.dataset.sort)")
    assert sizes == sorted(sizes, reverse=True)
    page.focus(f"#{table} input[type=search]")
    page.keyboard.type("pulse")
    assert len(shown(page, table)) == 3
    assert all("pulse" in name for name in shown(page, table))
    assert page.inner_text(f"#{table} .count") == f"3 of {len(names)}"
    page.keyboard.press("Escape")
    assert len(shown(page, table)) == len(names)


def test_the_first_tab_leads_past_the_navigation(page_file, open_page):
    page = open_page(page_file)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"


def test_light_and_dark_follow_the_system_until_one_is_chosen(page_file, open_page):
    pages = {scheme: open_page(page_file, color_scheme=scheme) for scheme in ("light", "dark")}
    background = "getComputedStyle(document.body).backgroundColor"
    colours = {scheme: page.evaluate(background) for scheme, page in pages.items()}
    assert colours["light"] != colours["dark"]
    page = pages["dark"]
    page.focus("#theme")
    page.keyboard.press("Enter")
    assert page.evaluate(background) == colours["light"]
    # Chromium stores the choice in its own time: a reload at once may be faster.
    for _ in range(50):
        page.wait_for_timeout(100)
        page.reload()
        if page.evaluate("document.documentElement.dataset.theme") == "light":
            break
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.click("#theme")
    assert page.evaluate(background) == colours["dark"]


def test_on_paper_the_tables_are_whole_and_the_navigation_is_gone(page):
    page.emulate_media(media="print")
    try:
        assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
        cut = "all => all.filter(one => one.scrollHeight > one.clientHeight + 2).length"
        assert page.eval_on_selector_all(".scroll", cut) == 0
    finally:
        page.emulate_media(media="screen")


def test_it_works_on_a_narrow_screen_and_without_scripts(page_file, open_page):
    page = open_page(page_file, java_script_enabled=False)
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.is_visible("h1")
    assert page.is_hidden("#theme")
    assert page.locator("#file-table tbody tr").count() > 5


def test_the_page_is_no_larger_than_promised(page_file):
    assert page_file.stat().st_size <= MOST_BYTES


def test_a_file_by_itself_has_a_page(tmp_path, open_page, heard):
    run = make_run(tmp_path / "run")
    (trace,) = run.parent.glob("*.json.gz")
    named = shutil.copy(trace, tmp_path / "<img src=x onerror=hacked()>.json.gz")
    page = open_page(written(Path(named), tmp_path / "trace.html"))
    assert "<img src=x" in page.inner_text(".title")
    assert page.is_visible("#traces")
    page.wait_for_timeout(300)
    assert outside(heard) == []


def test_in_a_notebook_links_of_the_report_stay_in_its_frame(open_page, tmp_path):
    run = load_run(make_run(tmp_path / "run", FakeRun()))
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><h1>notebook</h1>{run._repr_html_()}", encoding="utf-8")
    page = open_page(notebook)
    frame = page.frames[1]
    frame.click("nav a[href='#steps']")
    frame.wait_for_function("window.scrollY > 0")
    assert frame.url == "about:srcdoc#steps"
    assert len(page.frames) == 2
