from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import Pulse, SystemStats, Throughput
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.printers.json import to_json
from lightning_memprof.report.view import run_view
from recorded_rows import read_series
from training import Noise, Perceptron, loader, only_run, rows_of, trainer

WINDOW = Schedule(wait=1, warmup=1, active=2, repeat=1)


def callback(*collectors: Any) -> MemProfilerCallback:
    return MemProfilerCallback(schedule=WINDOW, collectors=list(collectors), output=OutputOptions(summary=False))


def rows(run: Path) -> list[dict[str, Any]]:
    return read_series(run / "window000/rank00000.throughput.jsonl")


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_every_stage_has_its_batches_and_operations(stage: str, tmp_path: Path) -> None:
    profiler = callback(Pulse(), Throughput(tokens=torch.numel, flops=True))
    made = trainer(tmp_path, profiler)
    getattr(made, stage)(Perceptron(), loader(6))
    assert profiler.run_directory is not None
    forward = 2 * 4 * (8 * 16 + 16 * 1)
    # Backward: both weights' gradients, and that of the second layer's input.
    flops = forward + (forward + 2 * 4 * 16 if stage == "fit" else 0)
    found = rows(profiler.run_directory)
    assert [(row["step"], row["samples"], row["tokens"], row["flops"]) for row in found] == [
        (2, 4, 32, flops),
        (3, 4, 32, flops),
    ]


def test_the_operations_are_those_that_torchs_own_counter_finds(tmp_path: Path) -> None:
    trainer(tmp_path, callback(Throughput(flops=True))).fit(Perceptron(), loader(6))
    model = Perceptron()
    with FlopCounterMode(display=False) as counter:
        model.loss(Noise(1)[0]).backward()
    assert {row["flops"] for row in rows(only_run(tmp_path))} == {counter.get_total_flops()}


def test_a_validation_inside_fit_adds_neither_batches_nor_operations(tmp_path: Path) -> None:
    made = trainer(tmp_path, callback(Throughput(flops=True)), val_check_interval=1)
    made.fit(Perceptron(), loader(6), loader(3))
    forward = 2 * 4 * (8 * 16 + 16)
    assert [(row["step"], row["samples"], row["flops"]) for row in rows(only_run(tmp_path))] == [
        (2, 4, 2 * forward + 2 * 4 * 16),
        (3, 4, 2 * forward + 2 * 4 * 16),
    ]


def test_a_count_that_fails_stops_neither_training_nor_recording(tmp_path: Path) -> None:
    made = trainer(tmp_path, callback(Pulse(), SystemStats(interval=0.1), Throughput(samples=lambda _: 1 // 0)))
    made.fit(Perceptron(), loader(6))
    run = only_run(tmp_path)
    (error,) = rows_of(run, "error")
    assert error["collector"] == "throughput"
    assert made.global_step == 6
    assert (run / "window000/rank00000.system.jsonl").exists()


def test_the_default_set_shows_throughput_and_machine(tmp_path: Path) -> None:
    made = trainer(tmp_path, MemProfilerCallback(schedule=WINDOW, output=OutputOptions(summary=False)))
    made.fit(Perceptron(), loader(8))
    document = json.loads(json.dumps(to_json(run_view(load_run(only_run(tmp_path)))), allow_nan=False))
    (throughput,), (system,) = document["throughput"], document["system"]
    assert throughput["samples_per_s"]["mean"] == pytest.approx(4 * throughput["batches_per_s"]["mean"])
    assert throughput["flops"] is None
    assert system["figures"]["memory_available_bytes"]["min"] > 0
    assert not document["problems"]
    assert not document["errors"]
