"""TensorBoard's profiler tab, asked over HTTP as its page asks."""

from __future__ import annotations

import gzip
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, Output, Schedule
from lightning_memprof.artifacts.naming import TraceName
from lightning_memprof.artifacts.series import read_pulse
from training import Perceptron, loader, trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WORKER = "fit-fts_extended_pytorch_profiler-0[Strategy]SingleDeviceStrategy.training_step"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tensorboard")
    profiler = ExtendedPyTorchProfiler(record_shapes=True, profile_memory=True)
    callback = MemProfilerCallback(schedule=Schedule(repeat=2), output=Output(summary=False))
    training = trainer(directory, callback, profiler=profiler)
    training.fit(Perceptron(), loader(), loader(4))
    training.validate(Perceptron(), loader(6), verbose=False)
    return directory


@pytest.fixture(scope="module")
def board(recorded: Path) -> Iterator[Callable[..., Any]]:
    """Start TensorBoard on loopback; give a function that asks the profiler plug-in."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(recorded),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with (recorded / "tensorboard.out").open("w") as output:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=recorded
        )

    def ask(route: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{port}/data/plugin/pytorch_profiler/{route}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            body = answer.read()
            return json.loads(gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body)

    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                runs = ask("runs")
            except (urllib.error.URLError, ConnectionError):
                runs = {"runs": [], "loading": True}
            if runs["runs"] and not runs["loading"]:
                break
            assert server.poll() is None, (recorded / "tensorboard.out").read_text()
            assert time.monotonic() < deadline, "TensorBoard has not found the run"
            time.sleep(0.5)
        yield ask
    finally:
        server.terminate()
        server.wait(30)


def lead(board: Callable[..., Any]) -> dict[str, str]:
    spans = board("spans", run="log", worker=WORKER)
    return {"run": "log", "worker": WORKER, "span": spans[0]}


def test_the_run_is_listed_with_its_worker_and_one_span_a_window(recorded: Path, board: Callable[..., Any]) -> None:
    assert sorted(board("runs")["runs"]) == ["log", "log/validate"]
    assert board("workers", run="log", view="Overview") == [WORKER]
    names = [TraceName.parse(path.name) for path in (recorded / "log").glob("*.pt.trace.json.gz")]
    assert len(board("spans", run="log", worker=WORKER)) == len(names) == 2


def test_the_views_of_a_cpu_run_are_there(board: Callable[..., Any]) -> None:
    assert {"Overview", "Operator", "Trace", "Memory"} <= set(board("views", run="log"))


def test_the_overview_has_our_steps_with_our_durations(recorded: Path, board: Callable[..., Any]) -> None:
    steps = board("overview", **lead(board))["steps"]
    durations = {
        row["step"]: row["duration_ns"] for row in read_pulse(recorded / "log/memprofiler/pulse.rank00000.csv")
    }
    labels = [str(row[0]) for row in steps["rows"]]
    assert labels == ["2", "3"]
    for label, row in zip(labels, steps["rows"], strict=True):
        theirs = sum(value for value in row[1:] if isinstance(value, int | float))
        assert theirs * 1000 == pytest.approx(durations[int(label)], rel=0.1, abs=300_000)


def test_the_operator_view_counts_what_ran(board: Callable[..., Any]) -> None:
    table = board("operation/table", **lead(board), group_by="Operation")["data"]
    calls = {row["name"]: row["calls"] for row in table}
    assert calls["aten::linear"] == 4
    assert calls["aten::relu"] == 2


def test_the_memory_view_has_the_operators_allocations(board: Callable[..., Any]) -> None:
    stats = board("memory", **lead(board))
    columns = [column["name"] for column in stats["columns"]]
    rows = {row[0]: dict(zip(columns, row, strict=True)) for row in stats["rows"]["CPU"]}
    # Two steps of two linear layers: outputs of 4 x 16 and 4 x 1 floats.
    assert rows["aten::addmm"]["Calls"] == 4
    assert rows["aten::addmm"]["Self Allocation Size (KB)"] == pytest.approx(2 * (4 * 16 + 4 * 1) * 4 / 1024, abs=0.01)
