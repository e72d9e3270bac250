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
from lightning_memprof.capture.faults import Faults
from lightning_memprof.integration import curves as module
from lightning_memprof.integration.curves import Curves, curves_of
from lightning_memprof.integration.settings import OutputOptions, Settings
from lightning_memprof.schedule import Schedule, Window

MS = 1_000_000
CHUNK = 64


def stand_in(**facts: Any) -> Any:
    return SimpleNamespace(**facts)


class Recorder(CSVLogger):
    """Notes what it is given."""

    def __init__(self):
        self.got = []

    def log_metrics(self, metrics, step=None):
        self.got.append((step, metrics))


class Run:
    """A Trainer as far as curves ask it, and the pulse's side."""

    def __init__(self, directory, loggers=(), every=50):
        self.place = claim_run_place(directory)
        self.sink = Sink(self.place, 0)
        self.sink.manifest.append("run", schema_version=1)
        loop = SimpleNamespace(_batches_that_stepped=0)
        self.trainer = stand_in(global_step=0, log_every_n_steps=every, fit_loop=SimpleNamespace(epoch_loop=loop))
        self.curves = Curves(self.trainer, loggers, self.sink, Faults(self.sink.manifest, "raise"))
        self.step = 0

    def steps(self, durations_ms, *, peaks=None, device=None, in_window=False, window=None):
        rows = []
        for duration, peak in zip(durations_ms, peaks or [None] * len(durations_ms), strict=True):
            row = dict.fromkeys(PULSE_COLUMNS) | {
                "step": self.step, "global_step": self.step, "duration_ns": duration * MS, "data_wait_ns": 0,
                "device_peak_bytes": peak, "window": window,
            }  # fmt: skip
            rows.append(PulseRow(**row))
            self.step += 1
        self.trainer.global_step = self.trainer.fit_loop.epoch_loop._batches_that_stepped = self.step
        self.curves.add_rows(rows, device, in_window=in_window)

    def end(self):
        self.sink.drain()
        self.curves.end()
        self.sink.close()
        read = EventAccumulator(str(self.place.directory / "tb/rank0"), size_guidance={"scalars": 0})
        read.Reload()
        return {tag: [(scalar.step, scalar.value) for scalar in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_a_long_run_has_fewer_points_than_tensorboard_keeps_and_a_spike_is_one_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.0)
    run = Run(tmp_path / "log")
    for chunk in range(400):
        run.steps([900 if (chunk, step) in {(170, 3), (399, 63)} else 5 for step in range(CHUNK)])
    points = run.end()["memprof/step_time_ms"]
    # A thousand would be 3 million steps.
    assert 256 < len(points) < 700
    assert [step for step, _ in points][:256] == list(range(256))
    assert [value for _, value in points].count(900.0) == 2
    assert points[-1] == (400 * CHUNK - 1, 900.0)


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


def test_a_window_s_point_is_the_largest_of_what_it_recorded_without_a_look_at_the_manifest(tmp_path):
    run = Run(tmp_path / "log")
    # The manifest grows with the windows: to read it after each would take the square of their number.
    (run.place.directory / "manifest.rank00000.jsonl").unlink()
    for window in range(2):
        _, *recorded = range(run.step, run.step + 3)
        run.steps([90, 5 + window, 7 + window], in_window=True, window=window)
        run.curves.window_closed(window, recorded)
        run.steps([50] * CHUNK)
    assert run.end()["memprof_windows/step_time_ms"] == [(2, 7.0), (5 + CHUNK, 8.0)]


def test_the_maxima_of_a_window_s_series_are_points_without_a_look_at_their_files(tmp_path):
    run = Run(tmp_path / "log")
    window = Window(0, (0,), (1, 2))
    rows = [
        {"recorded": step > 0, "rss_bytes": size << 20, "activation_bytes": None}
        for step, size in ((0, 900), (1, 30), (2, 20))
    ]
    run.sink.write_rows(window, "host", rows)
    run.sink.write_rows(window, "saved_tensors", rows)
    run.sink.write_rows(window, "hooks", rows)
    for path in run.place.directory.glob("window000/*"):
        path.unlink()
    run.steps([5, 5, 5], in_window=True, window=0)
    run.curves.window_closed(0, [1, 2])
    run.steps([5])
    drawn = run.end()
    assert drawn["memprof_windows/rss_mib"] == [(2, 30.0)]
    assert "memprof_windows/activation_mib" not in drawn


def test_a_device_has_its_peaks(tmp_path, monkeypatch):
    reserved = iter([3 << 20, 8 << 20])
    monkeypatch.setattr(module, "peak_reserved_bytes", lambda device: next(reserved))
    logger = Recorder()
    run = Run(tmp_path / "log", [logger], every=1)
    for first in (1 << 20, 6 << 20):
        run.steps([1, 1], peaks=[first, first + (1 << 20)], device=torch.device("cuda"))
    drawn = run.end()
    assert drawn["memprof/peak_allocated_mib"] == [(0, 1.0), (1, 2.0), (2, 6.0), (3, 7.0)]
    assert drawn["memprof/peak_reserved_mib"] == [(1, 3.0), (3, 8.0)]
    assert [metrics["memprof/peak_reserved_mib"] for _, metrics in logger.got] == [3.0, 8.0]


def test_a_full_disk_ends_the_curves_and_nothing_else(tmp_path):
    logger = Recorder()
    run = Run(tmp_path / "log", [logger], every=1)
    run.curves._faults._on_error = "warn"
    (run.place.directory / "tb").write_text("in the way")
    for _ in range(3):
        run.steps([1] * CHUNK)
        run.sink.drain()
    run.curves.end()
    run.sink.close()
    assert run.curves._faults.disabled == {"curves"}
    assert (run.place.directory / "manifest.rank00000.jsonl").read_text().count('"kind":"error"') == 1


@pytest.mark.parametrize(
    ("zero", "chosen", "drawn"), [(True, True, True), (True, False, True), (False, True, True), (False, False, False)]
)
def test_ranks_that_record_everything_have_curves_and_rank_zero_the_loggers(tmp_path, zero, chosen, drawn):
    trainer = stand_in(loggers=[Recorder()], is_global_zero=zero, log_every_n_steps=50)
    settings = Settings(schedule=Schedule(), collectors=(), every_collector=chosen, output=OutputOptions(curves=True))
    sink = Sink(claim_run_place(tmp_path / "log"), 0 if zero else 9)
    found = curves_of(trainer, "fit", settings, sink, Faults(sink.manifest, "raise"))
    sink.close()
    assert (found is not None) is drawn
    assert found is None or bool(found._loggers) is zero


def test_hearing_of_a_chunk_takes_microseconds_a_step(tmp_path, monkeypatch):
    run = Run(tmp_path / "log", [Recorder()], every=1)
    monkeypatch.setattr(run.sink, "in_background", lambda job: None)
    run.steps([5] * CHUNK)
    began = time.thread_time_ns()
    for _ in range(20):
        run.steps([5] * CHUNK)
    spent_us = (time.thread_time_ns() - began) / 20 / CHUNK / 1000
    run.sink.close()
    # Some 3 us on a quiet machine, the made rows of this test included.
    assert spent_us < 20
