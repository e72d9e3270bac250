"""The program's objects are told apart by identity, and its tensors are read past their ``__torch_function__``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.overrides import TorchFunctionMode

from every_collector import every_collector
from hostile import Sample, run_stages
from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import ModuleMemory
from training import Perceptron, loader, trainer

WINDOWS = Schedule(wait=1, warmup=1, active=2, repeat=2)
Ran = tuple[list[torch.Tensor], dict[str, Counter[str]]]


@pytest.fixture(scope="module")
def bare() -> Ran:
    return run_stages()


def rows_of(directory: Path) -> list[dict[str, Any]]:
    manifests = list(directory.rglob("manifest.*.jsonl"))
    assert len(manifests) == 4
    return [json.loads(line) for file in manifests for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("collectors", [lambda: ["default"], every_collector], ids=["default", "every"])
def test_every_stage_is_the_same_and_recorded(collectors: Callable[[], list[Any]], bare: Ran, tmp_path: Path) -> None:
    class Ask(pl.Callback):
        def on_train_epoch_end(self, *_: object) -> None:
            ours.holders(Sample)

    output = OutputOptions(summary=False, report=False, dirpath=tmp_path)
    ours = MemProfilerCallback(schedule=WINDOWS, collectors=collectors(), output=output)
    values, asked = run_stages(ours, Ask())
    assert [torch.equal(value, other) for value, other in zip(bare[0], values, strict=True)] == [True] * len(values)
    assert asked == bare[1]
    rows = rows_of(tmp_path)
    assert [row for row in rows if row["kind"] == "error"] == []
    unavailable = {row["collector"] for row in rows if row["kind"] == "unavailable"}
    assert unavailable <= {"saved_tensors", "allocator", "allocator_history"}
    assert [row["status"] for row in rows if row["kind"] == "end"] == ["finished"] * 4


def test_the_memory_of_modules_is_recorded_whatever_their_hash(tmp_path: Path) -> None:
    output = OutputOptions(summary=False, report=False, dirpath=tmp_path)
    run_stages(MemProfilerCallback(schedule=WINDOWS, collectors=[ModuleMemory()], output=output))
    (file,) = (tmp_path / "memprofiler" / "window000").glob("*module_memory*.jsonl")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert {row["categories"]["optimizer_state"] for row in rows if row["kind"] == "end"} == {512 + 8}


def test_a_function_mode_of_the_program_sees_its_own_calls_only(tmp_path: Path) -> None:
    class Counting(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: Counter[str] = Counter()

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls[getattr(func, "__name__", str(func))] += 1
            return func(*args, **(kwargs or {}))

    def calls(directory: Path, *callbacks: pl.Callback, **options: Any) -> Counter[str]:
        with Counting() as mode:
            trainer(directory, *callbacks, **options).fit(Perceptron(), loader())
        return mode.calls

    bare = calls(tmp_path / "bare")
    ours = MemProfilerCallback(schedule=WINDOWS, output=OutputOptions(summary=False))
    recorded = calls(tmp_path / "ours", ours, profiler="fts_extended")
    assert recorded - bare == Counter()
    assert bare - recorded == Counter()
