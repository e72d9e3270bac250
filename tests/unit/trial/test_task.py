"""The words for a program's exception."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from lightning_memprof.analysis.trial import Measured
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


def test_a_program_that_ends_after_the_training_that_it_started_keeps_its_result(tmp_path):
    def run(result: str) -> int:
        program = (
            "from lightning_memprof.analysis.trial import Measured;"
            "from lightning_memprof.trial.task import Task, end;"
            f"end(Task(directory={str(tmp_path)!r}, steps=1), {result})"
        )
        return subprocess.run([sys.executable, "-c", program], check=False).returncode

    assert (run("Measured(steps=3)"), run("Measured(problem='without fit')")) == (0, 1)
    found = msgspec.json.decode(result_path(tmp_path, 0).read_bytes(), type=Measured)
    assert (found.steps, found.problem) == (3, "")
