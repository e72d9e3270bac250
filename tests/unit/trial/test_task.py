"""The words for a program's exception."""

from __future__ import annotations

import pytest

from lightning_memprof.trial.task import problem_of


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
