from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from corpus_files import CORPUS, needs_corpus
from tensorboard_server import tensorboard
from waiting import wait_until

pytestmark = pytest.mark.browser

RANKS = CORPUS / "traces" / "hta_sampled_128"
PROFILER = "/data/plugin/pytorch_profiler"
# A user's own script, without this project: what torch writes is what the tab reads.
TRAINING = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
for run in sys.argv[1:]:
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
        on_trace_ready=tensorboard_trace_handler(run, worker_name="worker"), record_shapes=True, profile_memory=True,
        with_stack=True, with_modules=True, experimental_config=torch._C._profiler._ExperimentalConfig(verbose=True),
    ) as profiler:
        for _ in range(3):
            model(torch.randn(32, 64)).sum().backward()
            profiler.step()
"""
CHOICES = "() => [...document.querySelectorAll('.MuiSelect-root')].slice(0, 4).map(one => one.innerText.trim())"
MODEL = "() => document.querySelector('tr-ui-timeline-view')?.model"


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("profiled")
    command = [sys.executable, "-c", TRAINING, str(made / "one"), str(made / "two")]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=120)
    if RANKS.is_dir():
        (made / "ranks").mkdir()
        for rank in range(2):
            shutil.copyfile(RANKS / f"sampled_rank-{rank}.json.gz", made / "ranks" / f"rank{rank}.1.pt.trace.json.gz")
    return made


@pytest.fixture(scope="module")
def server(logdir: Path) -> Iterator[str]:
    with tensorboard(logdir) as url:
        wanted = len(list(logdir.iterdir()))
        wait_until(lambda: len(ask(url, "runs")["runs"]) == wanted and not ask(url, "runs")["loading"])
        yield url


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What the pages said on the console, and what they did not find."""
    return []


@pytest.fixture(scope="module")
def profiler(server: str, context: Any, said: list[str]) -> Iterator[Any]:
    page = context.new_page()
    page.set_viewport_size({"width": 1500, "height": 1000})
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{server}{PROFILER}/index.html")
    page.wait_for_function(f"() => ({CHOICES})().slice(0, 3).every(text => text.length > 1)", timeout=60_000)
    yield page
    page.close()


@pytest.fixture
def show(profiler: Any, said: list[str], asked_outside: list[str]) -> Iterator[Callable[[str, str], Any]]:
    """Choose a run and a view; give the page."""

    def show_(run: str, view: str) -> Any:
        choose(profiler, 0, run)
        profiler.wait_for_function(f"() => ({CHOICES})().slice(0, 3).every(text => text.length > 1)")
        choose(profiler, 1, view)
        return profiler

    yield show_
    assert asked_outside == []
    assert said == []


def choose(page: Any, box: int, text: str) -> None:
    chosen = page.locator(".MuiSelect-root").nth(box)
    if chosen.inner_text().strip() != text:
        chosen.click()
        page.locator("li[role=option]").get_by_text(text, exact=True).click()
        page.locator("li[role=option]").first.wait_for(state="detached")


def ask(url: str, path: str, **query: str) -> Any:
    asked = "&".join(f"{name}={quote(value)}" for name, value in query.items())
    content = fetch(f"{url}{PROFILER}/{path}?{asked}")
    return json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - the server that the test started
        content: bytes = answer.read()
    return content


def marks(page: Any, selector: str, wanted: int) -> list[tuple[str, float]]:
    """The names and values of the drawn parts."""
    page.wait_for_function("([s, n]) => document.querySelectorAll(s).length >= n", arg=[selector, wanted])
    found = page.locator(selector).evaluate_all("all => all.map(one => [one.dataset.name, Number(one.dataset.value)])")
    return [(name, value) for name, value in found]


def place(url: str, run: str, view: str = "Overview") -> dict[str, str]:
    worker = ask(url, "workers", run=run, view=view)[0]
    return {"run": run, "worker": worker, "span": ask(url, "spans", run=run, worker=worker)[0]}


def test_the_overview_draws_the_steps_and_tells_each_part_at_the_pointer(server, show):
    overview = ask(server, "overview", **place(server, "one"))
    page = show("one", "Overview")

    columns = overview["steps"]["columns"]
    parts = [index for index, column in enumerate(columns) if index and column.get("role") != "tooltip"]
    rows = overview["steps"]["rows"]
    drawn = marks(page, ".memprof-chart rect.memprof-mark", len(parts) * len(rows))
    assert sorted(drawn) == sorted((str(row[0]), float(row[part])) for row in rows for part in parts)

    table = page.locator(".memprof-table tbody tr").evaluate_all("all => all.map(one => one.innerText.split('\\t'))")
    average = overview["performance"][0]
    assert table[0] == ["Average Step Time", f"{average['value']:,}", "100"]
    assert [line[0] for line in table[1:]] == [child["name"] for child in average["children"]]

    tallest = max(parts, key=lambda part: rows[0][part])
    bar = f'rect[data-row="0"][data-series="{columns[tallest]["name"]}"]'
    page.locator(bar).hover()
    told = page.locator(".memprof-hover").inner_text()
    assert columns[tallest]["name"] in told
    assert str(rows[0][tallest]) in told.replace(",", "")


def test_the_operators_pies_are_the_servers_ten_longest(server, show):
    pie = ask(server, "operation", **place(server, "one"), group_by="Operation")["host_self_time"]
    page = show("one", "Operator")

    drawn = marks(page, ".memprof-chart path.memprof-mark", 20)
    longest = sorted(pie["rows"], key=lambda row: -row[1])[:10]
    assert drawn[:10] == [(row[0], float(row[1])) for row in longest]

    # The middle of a slice of more than a half is the ring's hole; its name beside the ring is told of likewise.
    page.locator(".memprof-entry").first.hover()
    told = page.locator(".memprof-hover").inner_text()
    assert longest[0][0] in told
    assert re.search(r"\d+\.\d%", told)


def test_a_part_of_the_memory_curve_is_chosen_by_dragging_and_a_right_click_shows_the_whole(server, show):
    curve = ask(server, "memory_curve", **place(server, "one"))
    page = show("one", "Memory")
    lines = page.locator(".memprof-chart .memprof-line")
    lines.first.wait_for()
    rows = curve["rows"]["CPU"]
    assert lines.evaluate_all("all => all.map(one => one.dataset.series)") == [
        column["name"] for column in curve["columns"][1:]
    ]
    # The tables below come later and move nothing any more once they are there.
    page.locator(".ant-table-row").first.wait_for()
    canvas = page.locator(".memprof-chart svg").first
    box = canvas.bounding_box()
    y = box["y"] + box["height"] / 2

    page.mouse.move(box["x"] + box["width"] - 25, y)
    told = page.locator(".memprof-hover").inner_text()
    (told_ms,) = map(float, re.findall(r"Time \(ms\): ([\d.]+)", told.replace(",", "")))
    times_ms = [row[0] for row in rows]
    # Near the end several rows may share a pixel.
    assert any(told_ms == pytest.approx(time_ms, rel=1e-5) for time_ms in times_ms)
    assert told_ms > times_ms[0] + 0.95 * (times_ms[-1] - times_ms[0])

    whole = page.evaluate("() => document.querySelector('.memprof-line').getAttribute('d')")
    with page.expect_request(lambda request: "start_ts" in request.url):
        page.mouse.move(box["x"] + box["width"] * 0.4, y)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.7, y, steps=4)
        page.mouse.up()
    assert page.evaluate("() => document.querySelector('.memprof-line').getAttribute('d')") != whole
    page.mouse.click(box["x"] + box["width"] / 2, y, button="right")
    page.wait_for_function("d => document.querySelector('.memprof-line').getAttribute('d') === d", arg=whole)


def test_the_module_view_draws_what_ran_in_each_layer(server, show):
    tree = ask(server, "tree", **place(server, "one"))
    page = show("one", "Module")

    drawn = dict(marks(page, ".memprof-chart rect.memprof-mark", 5))
    assert drawn[tree["name"]] == pytest.approx((tree["end_time"] - tree["start_time"]) / 1000)
    assert {name for name in drawn if name.startswith("ProfilerStep")} == {"ProfilerStep#1", "ProfilerStep#2"}


def test_the_trace_viewer_holds_every_slice_of_the_file_and_tells_of_a_chosen_one(logdir, show):
    page = show("one", "Trace")
    page.wait_for_selector("iframe")
    frame = page.query_selector("iframe").content_frame()
    frame.wait_for_function(f"() => Boolean(({MODEL})())", timeout=60_000)

    counted = frame.evaluate(
        f"""() => {{
            const counts = {{}};
            for (const event of ({MODEL})().getDescendantEvents())
                if (event instanceof tr.model.Slice) counts[event.title] = (counts[event.title] || 0) + 1;
            return counts;
        }}"""
    )
    events = json.loads(next((logdir / "one").iterdir()).read_text())["traceEvents"]
    ours = [event["name"] for event in events if event.get("cat") == "cpu_op" and event["ph"] == "X"]
    assert {name: counted.get(name) for name in ours} == {name: ours.count(name) for name in ours}

    frame.evaluate(
        f"""() => {{
            const [found] = [...({MODEL})().getDescendantEvents()].filter(event => event.title === 'ProfilerStep#1');
            const {{brushingStateController}} = document.querySelector('tr-ui-timeline-view');
            brushingStateController.changeSelectionFromTimeline(new tr.model.EventSet(found));
        }}"""
    )
    frame.wait_for_function("() => /ProfilerStep#1/.test(document.querySelector('tr-ui-a-analysis-view').innerText)")


def test_two_runs_are_compared(server, show):
    page = show("one", "Overview")
    page.get_by_role("tab", name="DIFF").click()
    try:
        for side, run in enumerate(("one", "two")):
            chosen = place(server, run)
            for box, name in enumerate(("run", "worker", "span")):
                choose(page, 3 * side + box, chosen[name])
        page.wait_for_function("() => document.querySelectorAll('.memprof-chart .memprof-line').length >= 2")
        found = ask(server, "diff", **place(server, "one"), **{f"exp_{k}": v for k, v in place(server, "two").items()})
        drawn = marks(page, ".memprof-chart:has(.memprof-line) rect.memprof-mark", 2)
        assert {value for _, value in drawn if value} <= set(durations(found))
        assert page.get_by_text("Execution Comparsion").count() == 1
    finally:
        page.get_by_role("tab", name="NORMAL").click()


def durations(node: dict[str, Any]) -> Iterator[float]:
    """What a compared part of two runs took in each, and what its parts took."""
    yield from (node[side]["total_duration"] for side in ("left", "right"))
    for child in node.get("children", ()):
        yield from durations(child)


@needs_corpus
def test_kernels_and_ranks_of_a_gpu_run_are_drawn(server, show):
    kernels = ask(server, "kernel", **place(server, "ranks", "Kernel"), group_by="Kernel")["total"]["rows"]
    page = show("ranks", "GPU Kernel")
    longest = sorted(kernels, key=lambda row: -row[1])[:10]
    drawn = marks(page, ".memprof-chart path.memprof-mark", len(longest) + 1)
    assert drawn[: len(longest)] == [(row[0], float(row[1])) for row in longest]

    overlap = ask(server, "distributed/overlap", run="ranks", worker="All", span="1")["data"]["all"]
    page = show("ranks", "Distributed")
    page.wait_for_function("() => document.querySelectorAll('.memprof-table tbody tr').length > 0")
    drawn = marks(page, ".memprof-chart rect.memprof-mark", 8)
    assert {(rank, float(part)) for rank, parts in overlap.items() for part in parts} <= set(drawn)


def test_no_tab_is_listed_for_it(server):
    listed = json.loads(fetch(f"{server}/data/plugins_listing"))
    assert not {name for name in listed if "offline" in name}
    assert listed["pytorch_profiler"]["enabled"]


@pytest.fixture(scope="module")
def auto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tensorboard(tmp_path_factory.mktemp("empty"), offline="auto") as url:
        yield url


@pytest.mark.parametrize("failure", ["refused", "dropped"])
def test_where_the_other_host_fails_the_page_asks_it_once_and_is_ours(auto, browser, failure):
    context = browser.new_context()
    asked: list[str] = []

    def fail(route: Any) -> None:
        asked.append(route.request.url)
        # A network that drops what it does not pass gives no answer at all.
        if failure == "refused":
            route.abort()

    context.route(lambda url: "127.0.0.1" not in url, fail)
    page = context.new_page()
    page.goto(f"{auto}{PROFILER}/index.html")
    # It waits for the other host for some seconds, not for ever.
    page.wait_for_function("() => Boolean(window.memprofCharts)", timeout=120_000)
    assert "scripts=local" in page.url
    assert asked == ["https://www.gstatic.com/charts/loader.js"]
    context.close()


def test_where_the_other_host_answers_the_page_is_the_installed_one(auto, browser):
    context = browser.new_context()
    context.route(
        lambda url: "127.0.0.1" not in url,
        lambda route: route.fulfill(body="window.theirs = true;", content_type="text/javascript"),
    )
    page = context.new_page()
    page.goto(f"{auto}{PROFILER}/index.html")
    page.wait_for_function("() => window.theirs", timeout=20_000)
    assert "scripts=cdn" in page.url
    assert page.evaluate("() => window.memprofCharts") is None
    context.close()
