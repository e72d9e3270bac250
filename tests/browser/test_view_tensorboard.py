"""``lightning-memprof view RUN --tensorboard``: each of its tabs shows the run, with no other host in reach."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions
from recorded_rows import read_pulse
from training import Perceptron, loader, only_run, trainer

pytestmark = pytest.mark.browser

WAIT_MS = 60_000
RANK = "memprofiler/tb/rank0"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("logs")
    logger = CSVLogger(directory, name="", version="version_0")
    callback = MemProfilerCallback(output=OutputOptions(summary=False, curves=True, on_error="raise"))
    trainer(directory, callback, profiler=ExtendedPyTorchProfiler(), logger=logger).fit(Perceptron(), loader(8))
    return Path(logger.log_dir)


@pytest.fixture(scope="module")
def address(chromium_path: str, run: Path) -> Iterator[str]:
    """What the command says that it serves at."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_memprof", "view", "--tensorboard", "--no-browser", str(run)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"(http://127\.0\.0\.1:\d+)/#custom_scalars", line):
                break
        else:
            pytest.fail("".join(said))
        deadline = time.monotonic() + 60
        while RANK not in asked(found[1], "runs") or asked(found[1], "plugin/pytorch_profiler/runs")["loading"]:
            assert time.monotonic() < deadline, "TensorBoard has not found the run"
            time.sleep(0.3)
        yield found[1]
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def asked(address: str, route: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{address}/data/{route}?{urllib.parse.urlencode(query)}", timeout=30) as answer:  # noqa: S310 it is ours
        return json.load(answer)


@pytest.fixture
def page(context: Any, address: str, asked_outside: list[str]) -> Iterator[Any]:
    opened = context.new_page()
    opened.set_default_timeout(WAIT_MS)
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield opened
    opened.close()
    assert errors == []
    assert asked_outside == []


def test_the_dashboard_of_custom_scalars_draws_the_curves(page: Any, address: str) -> None:
    page.goto(f"{address}/#custom_scalars")
    for chart in ("longest step, ms", "longest data wait, ms", "memory, MiB", "windows: memory, MiB"):
        page.get_by_text(chart, exact=True).wait_for()
    # Each chart draws what it found; one that found nothing says so.
    assert page.get_by_text("No data found").count() == 0
    page.get_by_text(RANK).first.wait_for()


def test_time_series_have_a_card_for_each_curve(page: Any, address: str) -> None:
    page.goto(f"{address}/#timeseries")
    page.get_by_text("step_time_ms", exact=False).first.wait_for()
    page.get_by_text(RANK).first.wait_for()


def test_the_curves_are_served_as_the_pulse_has_them(address: str, run: Path) -> None:
    served = asked(address, "plugin/scalars/scalars", run=RANK, tag="memprof/step_time_ms")
    pulse = read_pulse(only_run(run.parent) / "pulse.rank00000.csv")
    assert [(step, value) for _, step, value in served] == [
        (row["global_step"], pytest.approx((row["duration_ns"] or 0) / 1e6, rel=1e-6)) for row in pulse
    ]


def test_the_tab_memprof_has_the_run(page: Any, address: str) -> None:
    page.goto(f"{address}/#memprof")
    deadline = time.monotonic() + WAIT_MS / 1000
    while not any(frame.locator("main section").count() > 3 for frame in page.frames):
        assert time.monotonic() < deadline, "the report is not shown"
        page.wait_for_timeout(300)
    page.frame_locator("iframe").get_by_text("version_0").first.wait_for(state="attached")


def test_the_profiler_tab_has_the_run(page: Any, address: str) -> None:
    page.goto(f"{address}/#pytorch_profiler")
    frame = page.frame_locator("iframe")
    frame.get_by_text("Execution Summary").wait_for()
    frame.get_by_text("Average Step Time").wait_for()
