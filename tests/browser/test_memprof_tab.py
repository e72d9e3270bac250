from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.report.opened import opened
from lightning_memprof.units import format_bytes
from tensorboard_server import tensorboard
from waiting import wait_until

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=window.hacked=1>"
LONG_MS = 90_000
SUPPORT = Path(__file__).parents[1] / "support"
WAITING = {"data_wait": 9_000_000, "forward": 6_000_000, "backward": 10_000_000, "optimizer": 1_200_000,
           "callbacks": 100_000, "other": 500_000}  # fmt: skip
# Requests to any other address go to another host.
OURS = ("http://127.0.0.1:", "data:", "blob:")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("tab")
    make_run(top / HOSTILE, FakeRun(world_size=2, windows=((2, 3), (6, 7)), training={"model": HOSTILE}))
    make_run(top / "sweep" / "waiting", FakeRun(trace=False, memory=None, phases=lambda rank, step: WAITING))
    for index in range(47):
        make_run(top / "sweep" / f"version_{index}", FakeRun(trace=False, memory=None))
    return top


@pytest.fixture(scope="module")
def server(logs: Path, chromium_path: str) -> Iterator[str]:
    with tensorboard(logs) as url:
        yield url


@pytest.fixture(autouse=True)
def pages_made() -> Iterator[None]:
    """Wait for the pages that TensorBoard is still rendering for the tab."""
    yield
    wait_until(lambda: not any(map(_makes_a_page, psutil.Process().children(recursive=True))))


def _makes_a_page(process: psutil.Process) -> bool:
    try:
        return any("tensorboard.pages" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def heard() -> list[str]:
    """Console errors and requests to other hosts."""
    return []


@pytest.fixture(scope="module")
def open_tab(browser: Any, server: str, heard: list[str]) -> Iterator[Callable[..., Any]]:
    contexts = []

    def open_(route: str = "#memprof", **options: Any) -> Any:
        context = browser.new_context(viewport={"width": 1400, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(LONG_MS)
        page.on("request", lambda request: heard.append(request.url) if not request.url.startswith(OURS) else None)
        page.on("console", lambda said: heard.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.goto(f"{server}/{route}", timeout=LONG_MS)
        return page

    yield open_
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def tab(open_tab: Callable[..., Any]) -> Any:
    return frame_of(open_tab())


def frame_of(page: Any) -> Any:
    """Return the tab inside TensorBoard once it lists the runs."""
    page.wait_for_selector("iframe[src*='name=memprof']")
    tab = page.query_selector("iframe[src*='name=memprof']").content_frame()
    tab.wait_for_selector("#runs")
    return tab


def choose(tab: Any, **chosen: str) -> None:
    for name, label in chosen.items():
        tab.select_option(f"#{name}", label=label)


def inside(tab: Any, title: str) -> Any:
    """Return the page shown in the tab once it has loaded."""
    tab.wait_for_selector(f"#page[title={title}]")
    frame = tab.query_selector("#page").content_frame()
    frame.wait_for_selector("main section")
    return frame


def figures(frame: Any) -> dict[str, str]:
    rows = frame.eval_on_selector_all(
        ".figures li", "all => all.map(one => [one.querySelector('span').innerText, one.querySelector('b').innerText])"
    )
    return dict(rows)


def test_fifty_runs_are_listed_by_one_question_and_hostile_names_are_text(tab, logs, heard):
    asked: list[str] = []
    tab.page.on("request", lambda request: asked.append(request.url))
    tab.goto(tab.url)
    tab.wait_for_selector("#runs tbody tr")
    names = tab.eval_on_selector_all("#runs tbody th", "all => all.map(one => one.textContent)")
    assert len(names) == 49
    assert HOSTILE in names
    assert tab.evaluate("window.hacked") is None
    # Nothing is asked for each run.
    questions = {url.rpartition("/")[2].partition("?")[0] for url in asked}
    assert {name for name in questions if not name.endswith((".js", ".css", ".html"))} == {"runs"}
    assert heard == []


def test_a_run_shows_the_figures_of_its_report_and_of_one_window_and_rank(tab, logs, heard):
    run = logs / HOSTILE / "memprofiler"
    choose(tab, run=HOSTILE)
    frame = inside(tab, "report")
    with opened([str(run)]) as view:
        sentence = view.verdict.title
        rss = format_bytes(view.lead.host.peak_rss_bytes or 0)
    assert frame.inner_text("h1") == sentence
    assert figures(frame)["peak RSS"] == rss
    frame.click("nav a[href='#steps']")
    frame.wait_for_selector("#steps .chart canvas")
    assert frame.evaluate("document.querySelectorAll('.chart-failed').length") == 0
    assert frame.evaluate("window.hacked") is None
    old = tab.get_attribute("#page", "src")
    choose(tab, window="1: steps 6\u20137", rank="1")
    tab.wait_for_function("old => { const page = document.querySelector('#page'); "
                          "return page && page.getAttribute('src') !== old; }", arg=old)  # fmt: skip
    inside(tab, "report")
    assert heard == []


def test_two_runs_are_compared(tab, heard):
    choose(tab, run="sweep/waiting", other="sweep/version_0")
    frame = inside(tab, "comparison")
    row = frame.eval_on_selector(
        "#quantity-data_wait_ns", "cell => [...cell.parentElement.cells].map(one => one.innerText)"
    )
    assert row[0] == "data_wait_ns"
    assert row[1] == "408 µs"
    assert row[3] == "9.00 ms"
    assert row[5] == "x22"
    assert "data wait (408 µs" in frame.inner_text("h1")
    assert heard == []


def test_the_tab_follows_tensorboards_theme(open_tab, heard):
    tab = frame_of(open_tab("?darkMode=true#memprof"))
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    assert heard == []


def test_a_live_run_is_followed_to_its_end_with_new_windows(tab, logs, tmp_path, heard):
    tab.click("#all")
    place = logs / "training"
    place.mkdir()
    training = subprocess.Popen([sys.executable, str(SUPPORT / "slow_training.py"), str(place)], cwd=place)
    try:
        wait_until(lambda: (place / "going").exists() or training.poll() is not None)
        tab.wait_for_function(
            "[...document.querySelectorAll('#run option')].some(one => one.text.startsWith('training/log'))"
        )
        value = tab.eval_on_selector_all(
            "#run option", "all => all.find(one => one.text.startsWith('training/log')).value"
        )
        tab.select_option("#run", value=value)
        tab.wait_for_selector("#live:not([hidden])")
        first = inside(tab, "report")
        before = tab.inner_text("#live .now")
        tab.wait_for_function("old => document.querySelector('#live .now').innerText !== old", arg=before)
        assert first.query_selector("#configuration") is not None
        old = tab.get_attribute("#page", "src")
        (place / "more").touch()
        tab.wait_for_function("document.querySelectorAll('#window option').length === 3")
        (place / "stop").touch()
        assert training.wait(60) == 0
        tab.wait_for_selector("#live", state="hidden")
        tab.wait_for_function("old => document.querySelector('#page')?.getAttribute('src') !== old", arg=old)
        tab.wait_for_function("document.querySelector('#said').innerText === ''")
    finally:
        training.kill()
        training.wait()
    assert heard == []


def test_an_empty_log_directory_shows_instructions_and_then_the_first_run(browser, chromium_path, tmp_path):
    with tensorboard(tmp_path) as url:
        page = browser.new_page()
        try:
            page.goto(f"{url}/data/plugin_entry.html?name=memprof")
            page.wait_for_selector(".empty", timeout=LONG_MS)
            assert 'profiler="memprof"' in page.inner_text(".empty")
            assert str(tmp_path) in page.inner_text(".empty")
            make_run(tmp_path / "version_0", FakeRun(trace=False, memory=None))
            page.wait_for_selector("#page[title=report]", timeout=LONG_MS)
        finally:
            page.close()


def test_a_run_deleted_while_shown_returns_to_the_list_with_a_message(browser, chromium_path, tmp_path):
    for name in ("kept", "deleted"):
        make_run(tmp_path / name, FakeRun(trace=False, memory=None))
    with tensorboard(tmp_path) as url:
        page = browser.new_page()
        try:
            page.goto(f"{url}/data/plugin_entry.html?name=memprof")
            page.get_by_role("button", name="deleted").click(timeout=LONG_MS)
            page.wait_for_selector("#page[title=report]", timeout=LONG_MS)
            shutil.rmtree(tmp_path / "deleted")
            page.get_by_role("heading", name="1 run").wait_for(timeout=LONG_MS)
            assert page.inner_text("#said") == "the selected run no longer exists"
        finally:
            page.close()
