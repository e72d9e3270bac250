from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

pytestmark = pytest.mark.browser

SCRIPTS = ("charts_base.js", "charts_parts.js", "charts_axes.js", "charts_timeline.js", "charts.js")
FOLDER = files("lightning_memprof.tensorboard") / "static" / "offline"
DRAW = """([kind, columns, rows, options]) => {
    const table = new google.visualization.DataTable();
    for (const column of columns) table.addColumn(column);
    table.addRows(rows);
    document.getElementById('place').replaceChildren();
    window.chart = new google.visualization[kind](document.getElementById('place'));
    window.chart.draw(table, options);
}"""
NUMBERS = [{"type": "string", "label": "Name"}, {"type": "number", "label": "Time (us)"}]


@pytest.fixture(scope="module")
def page(context: Any) -> Iterator[Any]:
    made = context.new_page()
    made.set_content('<body style="width: 800px"><div><div id="place"></div></div></body>')
    made.add_style_tag(content=(FOLDER / "charts.css").read_text())
    for name in SCRIPTS:
        made.add_script_tag(content=(FOLDER / name).read_text())
    yield made
    made.close()


def texts(page: Any, selector: str) -> list[str]:
    found: list[str] = page.locator(selector).evaluate_all("all => all.map(one => one.textContent)")
    return found


def test_a_table_is_sorted_by_a_click_and_turned_page_by_page(page):
    rows = [[f"op{index}", index * 1000.5] for index in range(35)]
    page.evaluate(DRAW, ["Table", NUMBERS, rows, {"page": "enable", "pageSize": 30, "sortAscending": False}])
    assert texts(page, "tbody td:first-child")[0] == "op0"
    page.get_by_role("button", name="Time (us)").click()
    page.get_by_role("button", name="Time (us)").click()
    assert texts(page, "tbody tr:first-child td") == ["op34", "34,017"]
    page.get_by_role("button", name="▶").click()
    assert texts(page, "tbody td:first-child") == [f"op{index}" for index in (4, 3, 2, 1, 0)]
    assert page.get_by_role("button", name="▶").is_disabled()


def test_a_name_that_is_markup_does_nothing(page):
    hostile = "<img src=x onerror='window.bitten = 1'><script>window.bitten = 1</script><b>kept</b>"
    page.evaluate(DRAW, ["Table", NUMBERS, [[hostile, 1]], {"allowHtml": True}])
    assert texts(page, "tbody td:first-child") == ["kept"]
    page.evaluate(DRAW, ["PieChart", NUMBERS, [[hostile, 1], ["other", 3]], {}])
    assert hostile in texts(page, ".memprof-entry")[0]
    columns = [*NUMBERS, {"type": "string", "role": "tooltip", "p": {"html": "true"}}]
    page.evaluate(DRAW, ["SteppedAreaChart", columns, [["1", 5, hostile]], {"isStacked": True}])
    page.locator("rect.memprof-mark").hover()
    assert texts(page, ".memprof-hover") == ["kept"]
    assert page.evaluate("() => window.bitten ?? null") is None


def test_a_pie_tells_value_and_share_and_one_of_nothing_says_so(page):
    page.evaluate(DRAW, ["PieChart", NUMBERS, [["a", 30], ["b", {"v": 10, "f": "ten"}]], {"pieHole": 0.4}])
    page.evaluate("() => window.chart.setSelection([{row: 1}])")
    assert texts(page, ".memprof-hover") == ["bten (25.0%)"]
    page.evaluate("() => window.chart.setSelection([])")
    assert texts(page, ".memprof-hover") == []
    page.evaluate(DRAW, ["PieChart", NUMBERS, [["a", 0]], {}])
    assert "no time recorded" in texts(page, "svg text")


def test_a_line_of_many_points_keeps_its_peak(page):
    columns = [{"type": "number", "label": "Time"}, {"type": "number", "label": "Allocated"}]
    rows = [[index, 900 if index == 77_777 else 10] for index in range(100_000)]
    page.evaluate(DRAW, ["LineChart", columns, rows, {}])
    path = page.locator(".memprof-line").get_attribute("d")
    assert len(path) < 60_000
    heights = [float(point.split()[1]) for point in path[1:].split("L")]
    peak = page.evaluate("() => window.chart.y(900, false)")
    assert min(heights) == pytest.approx(peak, abs=0.1)


def test_a_chart_that_is_drawn_into_the_place_of_another_replaces_it(page):
    page.evaluate(DRAW, ["ColumnChart", NUMBERS, [["a", 1]], {}])
    page.evaluate(
        """() => {
            const table = google.visualization.arrayToDataTable([['Name', 'Time'], ['b', 2]]);
            new google.visualization.ComboChart(document.getElementById('place')).draw(table, {seriesType: 'bars'});
        }"""
    )
    assert page.locator(".memprof-chart").count() == 1
    assert page.locator("rect.memprof-mark").get_attribute("data-name") == "b"


def test_elements_are_made_attached_and_detached_as_version_0_says(context):
    page = context.new_page()
    page.set_content("<body><x-early></x-early></body>")
    page.add_script_tag(content=(FOLDER / "custom_elements.js").read_text())
    seen = page.evaluate(
        """async () => {
            const seen = [];
            const define = (name, basic) => document.registerElement(name, {
                extends: basic,
                prototype: Object.assign(
                    Object.create(basic ? HTMLTemplateElement.prototype : HTMLElement.prototype),
                    Object.fromEntries(['created', 'attached', 'detached', 'attributeChanged'].map(event => {
                        const told = (...what) => seen.push([event, name, ...what.filter(Boolean)].join(' '));
                        return [`${event}Callback`, told];
                    }))),
            });
            define('x-early');
            const Later = define('x-later');
            define('x-template', 'template');
            const made = new Later();
            made.setAttribute('size', '3');
            document.body.append(made);
            await null;
            made.remove();
            await null;
            document.createElement('template', 'x-template');
            const holder = document.createElement('template');
            holder.innerHTML = '<p><x-later></x-later></p>';
            document.importNode(holder.content, true);
            return [seen, made instanceof Later];
        }"""
    )
    assert seen == [
        [
            "created x-early", "attached x-early", "created x-later", "attributeChanged x-later size 3",
            "attached x-later", "detached x-later", "created x-template", "created x-later",
        ],
        True,
    ]  # fmt: skip
    page.close()
