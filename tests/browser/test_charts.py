from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof.account.memory.blocks import Blocks
from lightning_memprof.account.memory.columns import Origin
from lightning_memprof.report.charts.embed import Chart, chart_resources
from lightning_memprof.report.charts.holders import holders_chart
from lightning_memprof.report.charts.memory import memory_chart

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
HOSTILE = "</script><img src=x onerror=document.documentElement.dataset.hit=1>"
DRAWN = "html[data-charts=drawn]"
# Where in its figure a chart draws, as parts of it: the axis is to the left of it, the legend above.
MIDDLE = 0.55
# How wide the canvases are, and how many pixels of their first column are painted: the axes' names lie beside it.
CANVASES = """() => {
    const widths = [];
    let painted = 0;
    const look = (node) => {
        for (const child of [...(node.shadowRoot?.children ?? []), ...node.children]) {
            if (child.tagName === "CANVAS" && child.clientHeight > 100) {
                widths.push(child.width);
                const pixels = child.getContext("2d").getImageData(0, 0, 1, child.height).data;
                for (let i = 3; i < pixels.length; i += 4) painted += pixels[i] > 0;
            }
            look(child);
        }
    };
    look(document.querySelector("#chart-memory"));
    return [widths, painted];
}"""

Open = Callable[..., Any]


@pytest.fixture
def open_charts(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Open charts in a page from disk and wait for them; it fails where one asks another host, or says an error."""
    troubles: list[str] = []
    context = browser.new_context(viewport={"width": 1100, "height": 900})

    def open_(*charts: Chart, theme: str = "light") -> Any:
        file = tmp_path / "page.html"
        file.write_text(
            f'<!doctype html><html data-theme="{theme}"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">{chart_resources()}</head>'
            f"<body>{''.join(chart.html for chart in charts)}</body></html>",
            encoding="utf-8",
        )
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda said: troubles.append(said.text) if said.type in {"error", "warning"} else None)
        page.on("request", lambda asked: None if asked.url.startswith("file:") else troubles.append(asked.url))
        measured = context.new_cdp_session(page)
        measured.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.goto(file.as_uri())
        page.wait_for_selector(DRAWN, state="attached", timeout=60_000)
        page.busy_s = {
            metric["name"]: metric["value"] for metric in measured.send("Performance.getMetrics")["metrics"]
        }["TaskDuration"]
        assert {chart.get_attribute("data-state") for chart in page.query_selector_all(".chart")} == {"drawn"}
        return page

    yield open_
    context.close()
    assert troubles == []


def empty(end: int, text: str = "a") -> Blocks:
    origins = [Origin(text, None, None, ())]
    return Blocks(device="cuda:0", times=range(end + 1), before_bytes=0, origins=origins)


def blocks(count: int, text: str) -> Blocks:
    draw = random.Random(1)
    found = empty(1_000_000_000, text)
    kinds = ("activation", "temporary", "gradient", "optimizer_state")
    for i in range(count):
        born = int(i / count * 990_000_000)
        size = int(min(4e8, draw.lognormvariate(10, 3)))
        life = (born, min(10**9, born + int(draw.expovariate(1 / 2e7))), 0x7F0000000000 + 512 * i, size)
        found.add(life, 0, kinds[i % 4])
    return found


def one_block(text: str) -> Blocks:
    found = empty(1_000_000, text)
    found.add((0, 1_000_001, 0x7FC0DE000000, 3 * 1024**2), 0, "activation")
    found.add((500_000, 600_000, 0x1000, 2048), 0, "temporary")
    return found


def shown_memory(found: Blocks, where: str = "window 0 of rank 0") -> Chart:
    chart = memory_chart(found, "memory", where)
    assert chart is not None
    return chart


def tip(page: Any, chart: str, part: float = MIDDLE) -> str:
    """What is written beside the mouse over a part of a chart, from its top."""
    box = page.locator(f"#chart-{chart} .chart-place").bounding_box()
    page.mouse.move(box["x"] + box["width"] * MIDDLE, box["y"] + box["height"] * part)
    page.mouse.move(box["x"] + box["width"] * MIDDLE + 2, box["y"] + box["height"] * part)
    page.locator(".bk-tooltip-content").first.wait_for(state="visible", timeout=10_000)
    said: str = " ".join(page.locator(".bk-tooltip-content").all_inner_texts())
    return said


def test_hovering_a_block_gives_its_address_its_size_and_its_stack(open_charts: Open):
    page = open_charts(shown_memory(one_block("model.py(7): forward\ntrain.py(3): main")))
    said = tip(page, "memory", 0.75)
    for word in ("0x7fc0de000000", "3 MiB", "3,145,728", "model.py(7): forward\ntrain.py(3): main", "activation"):
        assert word in said


LEGEND = """() => [...Bokeh.documents].flatMap((document) => [...document._all_models.values()])
    .filter((model) => model.type === "Legend").map((model) => model.ncols)"""


def test_a_legend_that_fits_is_one_line_however_long_its_longest_name(open_charts: Open):
    found = empty(1_000_000)
    kinds = ("parameter", "optimizer_state", "gradient", "activation", "input", "temporary")
    for place, kind in enumerate(kinds):
        found.add((0, 1_000_001, 0x1000 * (place + 1), 2048), 0, kind)
    page = open_charts(shown_memory(found))
    page.set_viewport_size({"width": 500, "height": 900})
    page.wait_for_function(f"() => ({LEGEND})()[0] < 4")
    page.set_viewport_size({"width": 920, "height": 900})
    page.wait_for_function(f"() => ({LEGEND})()[0] === 'auto'")


def test_a_hundred_thousand_blocks_are_drawn_within_two_seconds(open_charts: Open):
    page = open_charts(shown_memory(blocks(100_000, "train.py(3): main")))
    # Its processor's time, for other programs may keep a page waiting; the library itself is read in it too.
    assert page.busy_s < 2.5
    drawn = page.screenshot(clip=page.locator("#chart-memory .chart-place").bounding_box())
    assert len(drawn) > 20_000


def test_names_of_the_program_are_text_and_nothing_else(open_charts: Open):
    held = holders_chart([((HOSTILE, HOSTILE), 1024, 1)], "holders", HOSTILE)
    assert held is not None
    page = open_charts(shown_memory(one_block(HOSTILE), HOSTILE), held)
    assert HOSTILE in tip(page, "memory", 0.75)
    page.locator("#chart-holders").scroll_into_view_if_needed()
    assert HOSTILE in tip(page, "holders", 0.2)
    assert page.locator("img").count() == 0
    assert page.locator("html").get_attribute("data-hit") is None


# The room of each rectangle and the length of its label, in pixels, as the page measures them.
LABELS = """() => {
    const models = Bokeh.documents.flatMap((doc) => [...doc._all_models.values()]);
    const plot = models.find((one) => one.type === "Figure");
    const { left, right, label, words } = plot.renderers[0].data_source.data;
    const pen = document.createElement("canvas").getContext("2d");
    pen.font = "11px helvetica";
    const { start, end } = plot.x_range;
    return Array.from(label, (text, i) => [words[i], text, pen.measureText(text).width,
        (Math.min(right[i], end) - Math.max(left[i], start)) * plot.inner_width / (end - start)]);
}"""


@pytest.mark.parametrize("width", [1100, 420])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_label_of_the_flame_graph_stays_in_its_rectangle(open_charts: Open, width: int, theme: str):
    names = ("addmm", "gelu", "WWWWWWWWWWWWWWWWWWWW", "iiiiiiiiiiiiiiiiiiii", "scaled_dot_product_attention")
    held = holders_chart(
        ((("model", f"{place} {name}"), 700 * (1 + place % 7), 1) for place, name in enumerate(names * 2)),
        "holders",
        "window 0",
    )
    assert held is not None
    page = open_charts(held, theme=theme)
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_timeout(700)
    found = page.evaluate(LABELS)
    assert found[0][:2] == ["model", "model"]
    assert any(label.endswith("…") for _, label, _, _ in found)
    for _, label, length, room in found:
        assert not label or length <= room - 8
    # Nothing is left out that has room.
    assert all(label for _, label, _, room in found if room > 60)


def test_a_chart_that_had_no_room_for_a_moment_is_drawn_as_before(open_charts: Open):
    page = open_charts(shown_memory(blocks(200, "train.py(3): main")))
    for size in ((1, 1), (1100, 900)):
        page.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
        page.wait_for_timeout(700)
    widths, left = page.evaluate(CANVASES)
    assert widths
    assert min(widths) > 1000
    assert left == 0


def test_charts_follow_the_theme_of_the_page(open_charts: Open):
    page = open_charts(shown_memory(one_block("a")), theme="dark")
    colours = "Bokeh.documents[0]._all_models.values().find(one => one.type === 'LinearAxis').major_label_text_color"
    assert page.evaluate(colours) == "#b6c2cf"
    page.locator("html").evaluate("root => { root.dataset.theme = 'light' }")
    assert page.evaluate(colours) == "#424a53"
