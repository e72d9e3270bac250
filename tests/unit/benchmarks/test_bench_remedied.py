"""The edits that the stopwatch of `try` compares with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The benchmarks are scripts: their directory is on the path while one of them runs.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from remedied import CASES, VERDICTS, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.training}-{case.remedy}")
def test_an_edit_finds_its_place_and_leaves_a_program(case: Case) -> None:
    script = (VERDICTS / "faults" / case.script).read_text(encoding="utf-8")
    assert script.count(case.before) == 1
    compile(script.replace(case.before, case.after), case.script, "exec")
