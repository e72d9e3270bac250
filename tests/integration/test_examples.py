"""The worked examples of docs/contributing run as they stand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_memprof import MemProfilerCallback, Schedule
from training import Perceptron, loader, only_run, trainer

if TYPE_CHECKING:
    from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_collector_records_a_row_per_mark(tmp_path: Path) -> None:
    collector = example("open_files").OpenFiles()
    callback = MemProfilerCallback(schedule=Schedule(wait=1, warmup=1, active=2), collectors=[collector])
    trainer(tmp_path, callback).fit(Perceptron(), loader(6))
    series = only_run(tmp_path) / "window000/rank00000.open_files.jsonl"
    rows = [json.loads(line) for line in series.read_text().splitlines()]
    assert {row["step"] for row in rows if row["recorded"]} == {2, 3}
    assert all(row["open_files"] > 0 for row in rows)
