from __future__ import annotations

import json
from pathlib import Path

import pytest

from fake_runs import FakeRun, make_run
from findings import recovery
from lightning_memprof.artifacts.naming import processes_name
from lightning_memprof.judge import Facts, examine
from lightning_memprof.read.run.load import load_run

MS = 1_000_000


@pytest.mark.parametrize(
    ("cpu_ms", "asleep_ms", "most"),
    [(400, 500, 0.4), (400, 200, 0.2), (400, 0, None), (45, 500, None)],
    ids=["sleeps longer", "sleeps for a part of it", "a library without the lock", "a little work"],
)
def test_a_busy_thread_costs_at_most_its_time_and_the_sleep_of_the_training(
    tmp_path: Path, cpu_ms: int, asleep_ms: int, most: float | None
) -> None:
    directory = make_run(tmp_path, FakeRun(training={"dataloaders": []}))
    row = {
        "kind": "thread", "step": 20, "thread": "Poll.run (train.py:7)", "cpu_ns": cpu_ms * MS,
        "elapsed_ns": 1000 * MS, "asleep_ns": asleep_ms * MS,
    }  # fmt: skip
    quiet = {**row, "thread": "quiet", "cpu_ns": 10 * MS}
    path = directory / processes_name(0)
    path.write_text("".join(json.dumps(each) + "\n" for each in ({**row, "elapsed_ns": 10 * MS}, quiet, row)))
    rules = {finding.rule: finding for finding in examine(Facts.of(load_run(directory)))}
    assert ("busy_thread" in rules) == (most is not None)
    if most is not None:
        worth = recovery(rules["busy_thread"])
        assert worth.max / worth.whole == pytest.approx(most)
        assert rules["busy_thread"].title.startswith("Busy thread: Poll.run uses 40% of a core;")
