"""`make bench` runs every part to its end and says what failed."""

from __future__ import annotations

import io
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def driver() -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARKS / "all_parts.py"))


def test_a_part_that_fails_keeps_no_other_from_running_and_the_exit_code_says_so(
    driver: dict[str, Any], tmp_path: Path
) -> None:
    program = "import sys, pathlib; pathlib.Path(__file__).with_name('ran').write_text(sys.argv[1])"
    (tmp_path / "good.py").write_text(program)
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    parts = {"bad": driver["Part"]("fails", "bad.py"), "good": driver["Part"]("works", "good.py")}
    told = io.StringIO()
    console = Console(file=told, width=100)
    outcomes = driver["run_parts"](parts, ["--quick"], tmp_path, console)
    assert [(each.name, each.code) for each in outcomes] == [("bad", 3), ("good", 0)]
    assert (tmp_path / "ran").read_text() == "--quick"
    assert driver["tell"](outcomes, console) == 1
    assert driver["tell"](outcomes[1:], console) == 0
    assert "1 of 2: bad, fails" in told.getvalue()
    assert "failed with 3" in told.getvalue()


def test_every_part_is_a_program(driver: dict[str, Any]) -> None:
    for part in driver["PARTS"].values():
        assert (BENCHMARKS / part.script).is_file(), part.script


def test_a_part_that_does_not_exist_is_a_question_of_usage() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "all_parts.py"), "--only", "fit"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "invalid choice: 'fit'" in done.stderr
