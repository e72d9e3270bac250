"""The worked examples of docs/contributing run as they stand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lightning_memprof import MemProfilerCallback, Schedule
from training import Perceptron, loader, only_run, rows_of, trainer

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLES = "docs/examples"


def test_the_collector_records_a_row_per_mark(tmp_path: Path) -> None:
    callback = MemProfilerCallback(schedule=Schedule(wait=1, warmup=1, active=2), collectors=[OpenFiles()])
    trainer(tmp_path, callback).fit(Perceptron(), loader(6))
    rows = rows_of(only_run(tmp_path), "open_files")
    assert {row["step"] for row in rows if row["recorded"]} == {2, 3}
    assert all(row["open_files"] > 0 for row in rows)
