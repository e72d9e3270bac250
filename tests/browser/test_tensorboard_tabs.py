"""Each tab of TensorBoard shows the run, with no other host in reach."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions
from tensorboard_server import tensorboard
from training import Perceptron, loader, trainer
from waiting import wait_until

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
    with tensorboard(run) as url:
        wait_until(lambda: RANK in asked(url, "runs") and not asked(url, "plugin/pytorch_profiler/runs")["loading"])
        yield url


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
    for chart in ("longest step, ms", "longest data wait, ms", "memory, MiB"):
        page.get_by_text(chart, exact=True).wait_for()
    # Each chart draws what it found; one that found nothing says so.
    assert page.get_by_text("No data found").count() == 0
    page.get_by_text(RANK).first.wait_for()


def test_time_series_have_a_card_for_each_curve(page: Any, address: str) -> None:
    page.goto(f"{address}/#timeseries")
    page.get_by_text("step_time_ms", exact=False).first.wait_for()
    page.get_by_text(RANK).first.wait_for()
