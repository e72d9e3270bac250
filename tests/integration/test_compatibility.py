"""A short form of ``make compatibility``: a few rows, and the runner itself."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended
Run = Callable[..., subprocess.CompletedProcess[str]]

PROGRAM = Path(__file__).resolve().parents[1] / "compatibility" / "every_row.py"


def test_the_command_runs_rows_by_name_and_says_what_became_of_each(run_program: Run) -> None:
    done = run_program(str(PROGRAM), "--only", "features/manual")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if "manual optimization" in line]
    assert lines[0].split()[0] == "ran"
    assert "bit-identical" in lines[0]
    assert "1 rows, 0 red" in done.stderr
