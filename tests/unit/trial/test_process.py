"""A process that never reaches a training."""

from __future__ import annotations

import os
import subprocess

import pytest

from lightning_memprof.trial.process import run_task
from lightning_memprof.trial.task import Task

pytestmark = pytest.mark.slow


def test_an_exit_without_a_training_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import sys; sys.exit('unknown argument')")
    found = run_task(["train.py"], Task(directory=str(tmp_path / "run"), steps=3), 60.0)
    assert found.problem == "ended with exit code 1: unknown argument"


def test_a_process_that_ends_between_two_looks_is_a_result(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import sys; sys.exit('unknown argument')")
    poll, seen = subprocess.Popen.poll, set()

    def late(process: subprocess.Popen[bytes]) -> int | None:
        if process.pid not in seen:
            seen.add(process.pid)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            return None
        return poll(process)

    monkeypatch.setattr(subprocess.Popen, "poll", late)
    found = run_task(["train.py"], Task(directory=str(tmp_path / "run"), steps=3), 60.0)
    assert found.problem == "ended with exit code 1: unknown argument"
