from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_memprof.artifacts.series import PULSE_COLUMNS, PulseRow
from lightning_memprof.artifacts.sink import Sink, claim_run_place
from lightning_memprof.integration import curves as module
from lightning_memprof.integration.curves import Curves, EventFile, curves_of
from lightning_memprof.integration.settings import OutputOptions, Settings
from lightning_memprof.schedule import Schedule

MS = 1_000_000
CHUNK = 64


def stand_in(**facts: Any) -> Any:
    return SimpleNamespace(**facts)


class Recorder(CSVLogger):
    """Notes what it is given."""

    experiment = None

    def __init__(self):
        self.got = []

    def log_metrics(self, metrics, step=None):
        self.got.append((step, metrics))


class Run:
    """A Trainer as far as curves ask it, and the pulse's side."""

    def __init__(self, directory, loggers=(), every=50):
        self.place = claim_run_place(directory)
        self.sink = Sink(self.place, 0)
        loop = SimpleNamespace(_batches_that_stepped=0)
        self.trainer = stand_in(global_step=0, log_every_n_steps=every, fit_loop=SimpleNamespace(epoch_loop=loop))
        self.curves = Curves(self.trainer, [*loggers, EventFile(self.sink)])
        self.step = 0

    def steps(self, durations_ms, *, peaks=None, device=None, in_window=False):
        rows = []
        for duration, peak in zip(durations_ms, peaks or [None] * len(durations_ms), strict=True):
            row = dict.fromkeys(PULSE_COLUMNS) | {
                "step": self.step, "global_step": self.step, "duration_ns": duration * MS, "data_wait_ns": 0,
                "device_peak_bytes": peak,
            }  # fmt: skip
            rows.append(PulseRow(**row))
            self.step += 1
        self.trainer.global_step = self.trainer.fit_loop.epoch_loop._batches_that_stepped = self.step
        self.curves.add_rows(rows, device, in_window=in_window)

    def end(self):
        self.curves.end()
        self.sink.close()
        read = EventAccumulator(str(self.place.directory / "tb/rank0"), size_guidance={"scalars": 0})
        read.Reload()
        return {tag: [(scalar.step, scalar.value) for scalar in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_a_long_run_has_fewer_points_than_tensorboard_keeps_and_a_spike_is_one_of_them(tmp_path):
    run = Run(tmp_path / "log", every=CHUNK)
    for chunk in range(1500):
        run.steps([900 if (chunk, step) in {(700, 3), (1499, 63)} else 5 for step in range(CHUNK)])
    points = run.end()["memprof/step_time_ms"]
    # A thousand would be 3 million steps.
    assert 256 < len(points) < 500
    assert [step for step, _ in points][:256] == list(range(CHUNK - 1, 256 * CHUNK, CHUNK))
    assert [value for _, value in points].count(900.0) == 2
    assert points[-1] == (1500 * CHUNK - 1, 900.0)


def test_a_logger_gets_no_more_points_than_the_trainer_logs(tmp_path):
    logger = Recorder()
    run = Run(tmp_path / "log", [logger], every=200)
    for chunk in range(10):
        run.steps([chunk + 1] * CHUNK)
    run.end()
    assert [(step, metrics["memprof/step_time_ms"]) for step, metrics in logger.got] == [(255, 4), (511, 8), (639, 10)]


def test_a_logger_is_left_alone_while_a_window_is_open(tmp_path):
    logger = Recorder()
    run = Run(tmp_path / "log", [logger], every=1)
    run.steps([1] * CHUNK)
    run.steps([9] * CHUNK, in_window=True)
    run.steps([1] * CHUNK)
    run.end()
    assert [(step, metrics["memprof/step_time_ms"]) for step, metrics in logger.got] == [(63, 1), (191, 9)]


def test_a_device_has_its_peaks(tmp_path, monkeypatch):
    reserved = iter([3 << 20, 8 << 20])
    monkeypatch.setattr(module, "peak_reserved_bytes", lambda device: next(reserved))
    logger = Recorder()
    run = Run(tmp_path / "log", [logger], every=1)
    for first in (1 << 20, 6 << 20):
        run.steps([1, 1], peaks=[first, first + (1 << 20)], device=torch.device("cuda"))
    drawn = run.end()
    assert drawn["memprof/peak_allocated_mib"] == [(1, 2.0), (3, 7.0)]
    assert drawn["memprof/peak_reserved_mib"] == [(1, 3.0), (3, 8.0)]
    assert [metrics["memprof/peak_reserved_mib"] for _, metrics in logger.got] == [3.0, 8.0]


def test_a_directory_that_cannot_be_written_ends_the_file_and_nothing_else(tmp_path, caplog):
    logger = Recorder()
    run = Run(tmp_path / "log", [logger], every=1)
    (run.place.directory / "tb").write_text("in the way")
    for _ in range(3):
        run.steps([1] * CHUNK)
    run.curves.end()
    run.sink.close()
    assert [record.message for record in caplog.records] == ["EventFile failed to log curves and gets no more of them"]
    assert len(logger.got) == 3


@pytest.mark.parametrize(
    ("zero", "chosen", "drawn"), [(True, True, True), (True, False, True), (False, True, True), (False, False, False)]
)
def test_ranks_that_record_everything_have_curves_and_rank_zero_the_loggers(tmp_path, zero, chosen, drawn):
    trainer = stand_in(loggers=[Recorder()], is_global_zero=zero, log_every_n_steps=50)
    settings = Settings(schedule=Schedule(), collectors=(), every_collector=chosen, output=OutputOptions(curves=True))
    sink = Sink(claim_run_place(tmp_path / "log"), 0 if zero else 9)
    found = curves_of(trainer, "fit", settings, sink)
    sink.close()
    assert (found is not None) is drawn
    assert found is None or [type(logger) for logger in found._loggers] == [*[Recorder] * zero, EventFile]


def test_a_chunk_takes_microseconds_per_step(tmp_path):
    run = Run(tmp_path / "log", [Recorder()], every=50 * CHUNK)
    run.steps([5] * CHUNK)
    began = time.thread_time_ns()
    for _ in range(20):
        run.steps([5] * CHUNK)
    spent_us = (time.thread_time_ns() - began) / 20 / CHUNK / 1000
    run.sink.close()
    # Some 3 us on a quiet machine, the made rows of this test included.
    assert spent_us < 20
