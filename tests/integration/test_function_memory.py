"""Memory at functions under a real Trainer: what is recorded, and that the program does not notice."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.capture.collectors.functions import FunctionMemory
from recorded_rows import read_series
from training import Perceptron, loader, only_run, program, rows_of, trainer

SCHEDULE = Schedule(wait=1, warmup=1, active=2, repeat=2)
EVERYTHING = ("training_step", "backward", "optimizer_step", "validation_step", "on_train_batch_end", "loss")


def recording(collector: FunctionMemory | None = None, schedule: Schedule = SCHEDULE) -> MemProfilerCallback:
    collector = collector or FunctionMemory(functions=EVERYTHING, saved_tensors_hooks=True)
    return MemProfilerCallback(schedule, [collector], output=OutputOptions(summary=False, on_error="raise"))


def functions(directory: Path, window: int = 0, rank: int = 0) -> list[dict[str, Any]]:
    return read_series(only_run(directory) / f"window{window:03d}/rank{rank:05d}.functions.jsonl")


def stats(directory: Path, rank: int = 0) -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = yaml.safe_load(
        (only_run(directory) / f"rank_{rank}_memory_stats.yaml").read_text()
    )
    return loaded


def named(rows: list[dict[str, Any]], step: int) -> list[tuple[str, str, int]]:
    return [(row["function"], row["point"], row["depth"]) for row in rows if row["step"] == step]


def classes(model: pl.LightningModule) -> list[dict[str, Any]]:
    return [dict(vars(base)) for base in type(model).__mro__]


def test_every_function_of_a_step_has_its_start_and_its_end(tmp_path: Path) -> None:
    model = Perceptron()
    before = classes(model)
    trainer(tmp_path, recording(), val_check_interval=3).fit(model, loader(9), loader(2))
    step = [
        ("optimizer_step", "start", 0),
        ("training_step", "start", 1),
        ("loss", "start", 2),
        ("loss", "end", 2),
        ("training_step", "end", 1),
        ("backward", "start", 1),
        ("backward", "end", 1),
        ("optimizer_step", "end", 0),
        ("on_train_batch_end", "start", 0),
        ("on_train_batch_end", "end", 0),
    ]
    rows = functions(tmp_path)
    assert named(rows, 3) == step
    validation = [
        ("validation_step", "start", 0),
        ("loss", "start", 1),
        ("loss", "end", 1),
        ("validation_step", "end", 0),
    ]
    assert named(rows, 2) == step + validation * 2
    assert {key.split(".")[2] for key in stats(tmp_path)} == {"3", "4", "7", "8"}
    assert classes(model) == before
    kinds = {(row["type"], row["path"]) for row in rows_of(only_run(tmp_path), "artifact")}
    assert ("blob", "memprofiler/rank_0_memory_stats.yaml") in kinds


def test_fits_one_after_another_with_one_callback_leave_nothing_and_record_each(tmp_path: Path) -> None:
    model, callback = Perceptron(), recording(schedule=Schedule())
    trainer(tmp_path / "bare").fit(model, loader(6))
    before = classes(model), set(vars(model))
    for _ in range(3):
        trainer(tmp_path, callback).fit(model, loader(6))
    runs = sorted(path.name for path in (tmp_path / "log").iterdir() if path.is_dir())
    assert runs == ["memprofiler", "memprofiler-2", "memprofiler-3"]
    texts = [(tmp_path / "log" / run / "rank_0_memory_stats.yaml").read_text() for run in runs]
    assert [list(yaml.safe_load(text)) for text in texts] == [list(yaml.safe_load(texts[0]))] * 3
    assert (classes(model), set(vars(model))) == before


@pytest.mark.parametrize("start", [0, 2])
def test_what_ddp_leaves_on_the_instance_is_left_as_ddp_leaves_it(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]], start: int
) -> None:
    (tmp_path / "ddp.py").write_text(
        program(f"""
        import torch
        from lightning.pytorch.strategies import DDPStrategy
        from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
        from lightning_memprof.capture.collectors.functions import FunctionMemory

        class Called(Perceptron):
            def forward(self, batch):
                return self.net(batch)

            def loss(self, batch):
                return self(batch).square().mean()

        def fit(directory, *callbacks):
            model = Called()
            strategy = DDPStrategy(process_group_backend="gloo")
            trainer(directory, *callbacks, strategy=strategy).fit(model, loader(8))
            left = vars(model).get("forward")
            return list(model.parameters()), left is not None and left.__func__ is Called.forward

        own = dict(vars(Called))
        collector = FunctionMemory(functions=["forward", "training_step", "backward"])
        schedule = Schedule(wait={start}, warmup=0, active=2, repeat=2)
        bare, left = fit(Path("bare"))
        recorder = MemProfilerCallback(schedule, [collector], output=OutputOptions(summary=False, on_error="raise"))
        ours, our_left = fit(Path("ours"), recorder)
        assert left and our_left
        assert all(torch.equal(a, b) for a, b in zip(bare, ours))
        assert dict(vars(Called)) == own
        """)
    )
    result = run_python("ddp.py", OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr[-3000:]
    rows = functions(tmp_path / "ours", window=1)
    step = rows[-1]["step"]
    assert named(rows, step) == [
        ("training_step", "start", 0), ("forward", "start", 1), ("forward", "end", 1), ("training_step", "end", 0),
        ("backward", "start", 0), ("backward", "end", 0),
    ]  # fmt: skip
