"""The words for a program's exception."""

from __future__ import annotations

import subprocess
import sys
import time

import msgspec
import pytest

from lightning_memprof.compare.trial import Measured
from lightning_memprof.trial.task import problem_of, result_path


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("too large\nhint", "ValueError: too large"),
        ("", "ValueError"),
        (
            "-- Process 1 terminated:\nTraceback (most recent call last):\n  x\nKeyError: 'a'\n",
            "ValueError: KeyError: 'a'",
        ),
    ],
)
def test_an_exception_is_one_line(message, problem):
    assert problem_of(ValueError(message)) == problem


@pytest.mark.slow
def test_the_measured_process_waits_to_be_ended_and_a_program_that_continues_keeps_its_result(tmp_path):
    def started(result: str) -> subprocess.Popen[bytes]:
        program = (
            "from lightning_memprof.compare.trial import Measured;"
            "from lightning_memprof.trial.task import Task, end;"
            f"end(Task(directory={str(tmp_path)!r}, steps=1), {result})"
        )
        return subprocess.Popen([sys.executable, "-c", program])

    with started("Measured(steps=3)") as measured:
        while not result_path(tmp_path, 0).exists():
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            measured.wait(1)
        assert started("Measured(problem='without fit')").wait() == 1
        measured.kill()
    found = msgspec.json.decode(result_path(tmp_path, 0).read_bytes(), type=Measured)
    assert (found.steps, found.problem) == (3, "")
