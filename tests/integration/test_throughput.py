from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import Pulse, Throughput
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.printers.json import to_json
from lightning_memprof.report.view import run_view
from recorded_rows import read_series
from training import Perceptron, loader, only_run, trainer

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
