"""Storage that is full or gone, and a clock that is set back, while a training is recorded."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule, load_run
from lightning_memprof.capture.collectors import operator_trace
from lightning_memprof.collectors import (
    FunctionMemory,
    GarbageCollection,
    HookTimings,
    HostMemory,
    OperatorTrace,
    Pulse,
    SystemStats,
)
from recorded_rows import read_events, read_pulse, read_series
from training import Perceptron, loader, only_run, trainer

HOUR_NS = 3600 * 10**9


def recorded(*collectors: Any, **output: Any) -> MemProfilerCallback:
    schedule = Schedule(wait=1, warmup=1, active=2, repeat=2)
    return MemProfilerCallback(schedule, list(collectors), output=OutputOptions(summary=False, report=False, **output))


class Refusing(CSVLogger):
    """Lies on a disk that takes no more."""

    def save(self) -> None:
        if self.experiment.metrics:
            raise OSError(28, "No space left on device")


class Logging(Perceptron):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


def test_a_logger_that_cannot_save_our_curves_does_not_end_a_training_that_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = Refusing(tmp_path, name="", version="log")
    trainer(tmp_path, recorded(Pulse(), curves=True), logger=logger).fit(Perceptron(), loader())
    assert "Refusing failed to log curves and gets no more of them" in caplog.text
    assert logger.experiment.metrics == []


def test_what_the_program_itself_logged_and_cannot_be_saved_is_still_its_own_error(tmp_path: Path) -> None:
    logger = Refusing(tmp_path, name="", version="log")
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OSError, match="No space left"):
        trainer(tmp_path, recorded(Pulse(), curves=True), logger=logger).fit(Logging(), loader())
    # Lightning leaves its own behind where the logger fails in its teardown.
    signal.signal(signal.SIGTERM, handler)
    assert {name for row in logger.experiment.metrics for name in row} == {"step", "epoch", "loss"}


class SetsBack(pl.Callback):
    """Takes an hour off the machine's clock in the middle of the second window, as Python tells of it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            now, now_ns = time.time, time.time_ns
            self._patch.setattr(time, "time", lambda: now() - 3600)
            self._patch.setattr(time, "time_ns", lambda: now_ns() - HOUR_NS)


def test_a_clock_that_is_set_back_moves_no_time_of_a_run(tmp_path: Path) -> None:
    began = time.time_ns()
    collectors = (
        Pulse(),
        HostMemory(),
        HookTimings(),
        GarbageCollection(),
        FunctionMemory(),
        SystemStats(interval=0.1),
    )
    with pytest.MonkeyPatch.context() as patch:
        trainer(tmp_path, recorded(*collectors, on_error="raise"), SetsBack(patch)).fit(Perceptron(), loader())
    run = only_run(tmp_path)
    starts = [row["start_ns"] or 0 for row in read_pulse(run / "pulse.rank00000.csv")]
    assert starts == sorted(set(starts))
    found = sorted(run.glob("window001/*.jsonl"))
    assert {path.name.split(".")[1] for path in found} >= {"host", "hooks", "functions", "system"}
    for path in found:
        for row in read_series(path):
            # Changes of memory over an action have no time.
            assert began <= row.get("start_ns", row.get("time_ns", began)) <= began + HOUR_NS, (path, row)
            assert 0 <= row.get("duration_ns", 0) < HOUR_NS, (path, row)


def test_a_trace_that_cannot_be_compressed_is_kept_as_torch_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(operator_trace, "write_trace", full)
    trainer(tmp_path, recorded(Pulse(), OperatorTrace())).fit(Perceptron(), loader())
    assert "collector operator_trace failed on write" in caplog.text
    run = load_run(only_run(tmp_path))
    assert run.problems == ()
    traces = [artifact for artifact in run.artifacts if artifact.type == "trace"]
    # A second window had begun where the first one's failure was not known yet.
    assert traces
    for trace in traces:
        assert trace.path.endswith(".pt.trace.json")
        assert sum(1 for _ in read_events(trace.file)) == len(json.loads(trace.file.read_text())["traceEvents"])
