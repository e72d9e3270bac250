"""TensorBoard's profiler tab in Chromium without internet: what each view shows is what we say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from corpus_files import needs_corpus
from lightning_memprof.account.trace.key_averages import collect_rows
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.read.trace.communication import collectives
from profiler_tab import GPU_TRACES, fetches_us, made_runs, profiler_tab
from recorded_rows import read_events

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.browser

PATIENCE_MS = 120_000
SELECT = "//li[contains(@class, 'MuiListSubheader')][normalize-space()='{}']/following::*[@aria-haspopup='listbox'][1]"
ROWS = """() => [...document.querySelectorAll('main tr')].map(row =>
    [...row.querySelectorAll('td')].map(cell => cell.innerText.trim())).filter(cells => cells.length > 1)"""
# The trace's viewer draws on a canvas: its model is what it draws.
SLICES = """name => {
    const viewer = document.querySelector('tr-ui-timeline-view');
    const found = [];
    if (viewer?.model)
        for (const event of viewer.model.getDescendantEvents())
            if (event.title === name) found.push(event.duration);
    return found;
}"""


class Page:
    """The tab's page."""

    def __init__(self, page: Any, logdir: Path) -> None:
        self.page, self.logdir = page, logdir
        self._shown: tuple[str, str] = ("", "")

    def show(self, run: str, view: str, ready: str = "main table, main svg") -> None:
        """Choose a run and a view, and wait until it is drawn."""
        for at, (label, wanted) in enumerate((("Runs", run), ("Views", view))):
            if at or self._shown[0] != run:
                self.page.locator("xpath=" + SELECT.format(label)).click(timeout=PATIENCE_MS)
                self.page.get_by_role("option", name=wanted, exact=True).click(timeout=PATIENCE_MS)
        self._shown = (run, view)
        self.page.wait_for_selector(ready, timeout=PATIENCE_MS)

    def rows(self, first: str) -> dict[str, list[str]]:
        """Return the cells of the tables' rows by their first one, once there is one of ``first``."""
        self.page.wait_for_function(f"first => ({ROWS})().some(cells => cells[0] === first)", arg=first,
                                    timeout=PATIENCE_MS)  # fmt: skip
        return {name: cells for name, *cells in self.page.evaluate(ROWS)}

    def trace(self, run: str, rank: int = 0) -> Path:
        found = [path for path in (self.logdir / run).glob("*.pt.trace.json.gz") if f"-{rank}[" in path.name]
        return min(found or (self.logdir / run).glob("*.gz"))


@pytest.fixture(scope="module")
def tab(context: Any, asked_outside: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    logdir, said = made_runs(tmp_path_factory), list[str]()
    with profiler_tab(logdir) as served:
        page = context.new_page()
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.goto(f"{served.url}/data/plugin/pytorch_profiler/index.html")
        yield Page(page, logdir)
        page.close()
    assert asked_outside == []
    assert said == []


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_the_overview_has_our_mean_step_and_our_share_of_data_loading(tab: Page) -> None:
    tab.show("plain/log", "Overview")
    rows, steps = tab.rows("Average Step Time"), trace_report(tab.trace("plain/log")).steps
    mean_us = sum(step.duration_ns for step in steps) / len(steps) / 1000
    loading_us = sum(fetches_us(tab.trace("plain/log"), step) for step in steps) / len(steps)
    assert number(rows["Average Step Time"][0]) == pytest.approx(mean_us, abs=1)
    assert number(rows["DataLoader"][0]) == pytest.approx(loading_us, abs=1)
    assert number(rows["DataLoader"][1]) == pytest.approx(100 * loading_us / mean_us, abs=0.02)
    assert number(rows["DataLoader"][0]) > 0


def test_the_operator_view_has_our_times(tab: Page) -> None:
    tab.show("plain/log", "Operator")
    ours = {row.name: row for row in collect_rows([tab.trace("plain/log")], group_by_input_shapes=False).rows}
    rows = tab.rows("aten::addmm")
    assert len(rows) >= 10
    for name, (calls, self_us, total_us, *_) in rows.items():
        assert number(calls) == ours[name].count
        assert number(self_us) == pytest.approx(ours[name].self_cpu_ns / 1000, abs=2)
        assert number(total_us) == pytest.approx(ours[name].cpu_ns / 1000, abs=2)


def test_the_memory_view_has_our_bytes(tab: Page) -> None:
    tab.show("plain/log", "Memory")
    rows = collect_rows([tab.trace("plain/log")], group_by_input_shapes=False).rows
    (ours,) = (row for row in rows if row.name == "aten::mm")
    calls, increase_kb, *_ = tab.rows("aten::mm")["aten::mm"]
    assert number(calls) == ours.count
    assert number(increase_kb) == pytest.approx(ours.cpu_bytes / 1024, abs=0.01)
    tab.page.get_by_text("Peak Memory Usage").first.wait_for(timeout=PATIENCE_MS, state="attached")


def test_the_view_of_modules_has_our_modules(tab: Page) -> None:
    tab.show("plain/log", "Lightning")
    name = "[pl][module]torch.nn.modules.container.Sequential: net"
    times = [event.duration_ns for event in read_events(tab.trace("plain/log")) if event.name == name]
    count, _, host_us, *_ = tab.rows("net")["net"]
    assert number(count) == len(times) == 2
    assert number(host_us) == pytest.approx(sum(times) / 1000, abs=2)
    # The chart beside the table is drawn after it.
    for path in ("net.0", "net.3", "run_training_batch"):
        tab.page.get_by_text(path).first.wait_for(timeout=PATIENCE_MS, state="attached")


def test_the_trace_is_drawn_with_our_steps(tab: Page) -> None:
    tab.show("plain/log", "Trace", ready="main iframe")
    step = trace_report(tab.trace("plain/log")).steps[0]
    frame = tab.page.wait_for_selector("main iframe", timeout=PATIENCE_MS).content_frame()
    frame.wait_for_function(f"name => ({SLICES})(name).length > 0", arg=f"ProfilerStep#{step.number}",
                            timeout=PATIENCE_MS)  # fmt: skip
    (shown_ms,) = frame.evaluate(SLICES, f"ProfilerStep#{step.number}")
    assert shown_ms == pytest.approx(step.duration_ns / 1e6, abs=0.002)


def test_with_stacks_the_view_of_modules_has_torchs(tab: Page) -> None:
    tab.show("stacks/log", "Module")
    assert number(tab.rows("Sequential_0")["Sequential_0"][0]) == 2


def test_the_distributed_view_has_both_ranks(tab: Page) -> None:
    tab.show("ranks/log", "Distributed")
    found = [collective.name for collective in collectives(tab.trace("ranks/log"))]
    rows = tab.rows("gloo:all_reduce")
    for name in ("all_reduce", "broadcast"):
        assert number(rows[f"gloo:{name}"][0]) == found.count(name)
    assert tab.page.locator("main svg").count() >= 2


@needs_corpus
@pytest.mark.corpus
def test_the_kernel_view_has_our_kernels(tab: Page) -> None:
    run = f"gpu/{GPU_TRACES[0]}"
    tab.show(run, "GPU Kernel")
    report = trace_report(tab.trace(run))
    longest = next(kernel for kernel in report.kernels if kernel.kind != "memory_copy")
    (cells,) = (cells for name, cells in tab.rows(longest.name).items() if name == longest.name)
    assert number(cells[1]) == longest.count
    assert number(cells[2]) == pytest.approx(longest.total_ns / 1000, abs=1)


@needs_corpus
@pytest.mark.corpus
def test_the_operator_view_has_our_device_times(tab: Page) -> None:
    run = f"gpu/{GPU_TRACES[0]}"
    tab.show(run, "Operator")
    rows = collect_rows([tab.trace(run)], group_by_input_shapes=False).rows
    ours = max((row for row in rows if not row.on_device), key=lambda row: row.self_device_ns)
    cells = tab.rows(ours.name)[ours.name]
    assert number(cells[1]) == pytest.approx(ours.self_device_ns / 1000, abs=2)
    assert number(cells[1]) > 0
