from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

Query = Callable[[str], list[dict[str, Any]]]

_ONLY_HERE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
# The page's own name for its parts; `window.app` is what the UI gives to people who look inside it.
LOADED = "() => Boolean(window.app?.trace?.engine) && !window.app.isLoadingTrace"
_TITLE = "window.app.trace.traceInfo.traceTitle"
_QUERY = """async ([sql, columns]) => {
    const found = await window.app.trace.engine.query(sql);
    const rows = [];
    for (const row = found.iter({}); row.valid(); row.next()) {
        rows.push(Object.fromEntries(columns.map(name => {
            const value = row.get(name);
            return [name, typeof value === 'bigint' ? Number(value) : value];
        })));
    }
    return rows;
}"""


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """Chromium's program; the one test that starts without it is the one that is skipped."""
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no Chromium on this machine; install chromium, or name one in CHROMIUM")
    return found


@pytest.fixture(scope="module")
def browser(chromium_path: str) -> Iterator[Any]:
    """A Chromium for the tests of one module."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Sandboxes want namespaces, which a container often has not; the pages are our own.
        started = playwright.chromium.launch(
            executable_path=chromium_path, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", _ONLY_HERE]
        )
        try:
            yield started
        finally:
            started.close()


@pytest.fixture(scope="module")
def asked_outside() -> list[str]:
    """What pages of this module asked of other hosts than this machine."""
    return []


@pytest.fixture(scope="module")
def context(browser: Any, asked_outside: list[str]) -> Iterator[Any]:
    """Pages with the network blocked."""
    made = browser.new_context()

    def check(route: Any) -> None:
        parts = urlsplit(route.request.url)
        if parts.scheme in {"blob", "data"} or parts.hostname in {"127.0.0.1", "localhost"}:
            route.continue_()
        else:
            asked_outside.append(route.request.url)
            route.abort()

    made.route("**/*", check)
    yield made
    made.close()


@pytest.fixture(scope="module")
def perfetto(context: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The UI with a small trace in it: it takes seconds to start and opens a further trace in one."""
    from lightning_memprof.report.perfetto import serve_trace, ui_directory

    trace = tmp_path_factory.mktemp("ui") / "my run #1.json"
    trace.write_text('{"traceEvents":[{"ph":"X","name":"work","pid":1,"tid":1,"ts":5,"dur":7}]}')
    ui = ui_directory()
    assert ui is not None
    with serve_trace(trace, ui) as served:
        page = context.new_page()
        page.goto(served.url)
        page.wait_for_function(LOADED, timeout=60_000)
        page.evaluate(f"window.memprofOpened = {_TITLE}")
        yield page
        page.close()


@pytest.fixture
def open_trace(perfetto: Any, asked_outside: list[str]) -> Iterator[Callable[[Path], Query]]:
    """Open a trace in the UI and give what asks its trace processor: SQL to rows."""

    def open_(trace: Path) -> Query:
        perfetto.locator("input[type=file]").first.set_input_files(trace)
        perfetto.wait_for_function(f"() => ({LOADED})() && {_TITLE}.includes({trace.name!r})", timeout=60_000)
        return partial(query, perfetto)

    yield open_
    assert asked_outside == []


def query(page: Any, sql: str) -> list[dict[str, Any]]:
    """Ask the trace processor of a page."""
    asked = sql.partition(" from ")[0].removeprefix("select ")
    columns = [part.split()[-1].rpartition(".")[2] for part in asked.split(",")]
    rows: list[dict[str, Any]] = page.evaluate(_QUERY, [sql, columns])
    return rows
