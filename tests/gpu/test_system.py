from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import Pulse, SystemStats, Throughput
from recorded_rows import read_series
from training import Noise, Perceptron, loader, only_run, rows_of, trainer

pytestmark = pytest.mark.gpu

WINDOW = Schedule(wait=1, warmup=1, active=2, repeat=1)


def test_the_gpus_figures_are_sampled_where_its_library_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("pynvml")
    made = trainer(
        tmp_path, MemProfilerCallback(schedule=WINDOW, collectors=[SystemStats()], output=OutputOptions(summary=False)),
        accelerator="gpu",
    )  # fmt: skip
    made.fit(Perceptron(), loader(6))
    (row, *_) = read_series(only_run(tmp_path) / "window000/rank00000.system.jsonl")
    assert 0 <= row["gpu0_utilization_percent"] <= 100
    assert row["gpu0_memory_used_bytes"] > torch.cuda.memory_allocated()
    assert row["gpu0_power_w"] > 1
    assert not rows_of(only_run(tmp_path), "error")


def test_operations_of_a_backward_on_the_gpu_are_counted(tmp_path: Path) -> None:
    throughput = MemProfilerCallback(
        schedule=WINDOW, collectors=[Pulse(), Throughput(flops=True)], output=OutputOptions(summary=False)
    )
    trainer(tmp_path, throughput, accelerator="gpu").fit(Perceptron(), loader(6))
    with FlopCounterMode(display=False) as counter:
        Perceptron().loss(Noise(1)[0]).backward()
    (row, *_) = read_series(only_run(tmp_path) / "window000/rank00000.throughput.jsonl")
    assert row["flops"] == counter.get_total_flops()
