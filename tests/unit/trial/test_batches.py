"""The search for the largest batch by runs of the program."""

from __future__ import annotations

import pytest

from lightning_memprof.compare.trial import Measured
from lightning_memprof.report.sections.trial import batches_document
from lightning_memprof.trial import batches
from lightning_memprof.trial.batches import find_largest
from lightning_memprof.trial.runner import TrialOptions
from lightning_memprof.trial.task import Task


@pytest.mark.parametrize(("limit", "best"), [(64, 16), (1, None)])
def test_ctrl_c_keeps_the_batches_that_ran(monkeypatch, limit, best):
    ran = []

    def run_task(_program: object, task: Task, _limit_s: float) -> Measured:
        samples = task.samples or 8
        ran.append(samples)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return Measured(step_ns=1.0, rss_bytes=samples, samples=samples)

    monkeypatch.setattr(batches, "run_task", run_task)
    found = find_largest(["train.py"], TrialOptions(), limit)
    assert (found.is_stopped, len(found.tried)) == (True, 2)
    assert (found.best.samples if found.best else None) == best
    assert batches_document(found).status == "stopped"
