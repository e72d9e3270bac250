"""A fit of 600 steps with 30 windows. The long one, of 20,000 steps, is ``python tests/torture/soak.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from soak_judge import Soaked, soaked

# The soak is a script: its directory is on the path while it runs.
sys.path.append(str(Path(__file__).parents[1] / "torture"))

import soak


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_handles_threads_and_the_files_of_windows_do_not_grow(tmp_path: Path) -> None:
    found = soaked(tmp_path / "soaked", steps=600, every=20, seconds=800)
    assert len(found.lines) == 30
    assert found.faults(resident=False) == []


def test_what_grows_is_found() -> None:
    steady = {"bytes": 0, "handles": 10, "threads": 2, "window_files": 40, "window_bytes": 1000}
    assert Soaked([steady | {"bytes": 900 * window} for window in range(40)]).faults(resident=True) == []
    grown = [
        {"bytes": 1100 * window, "handles": 10 + (window > 35), "threads": window, "window_files": window,
         "window_bytes": 1000 + 100 * window}
        for window in range(40)
    ]  # fmt: skip
    assert len(Soaked(grown).faults(resident=True)) == 5


def test_each_fit_has_its_column_and_one_has_all_free_memory_touched() -> None:
    line = {"step": 10, "bytes": 7, "handles": 1, "threads": 1, "window_files": 1, "window_bytes": 1, "other_bytes": 1}
    shown = soak.page({fit: Soaked([line] * 15) for fit in soak.FITS}, 10, ["rss grows"])
    (head,) = [row for row in shown.splitlines() if row.startswith("| a window more")]
    assert [fit.name for fit in soak.FITS] == [cell.strip() for cell in head.strip("|").split("|")][1:]
    assert "- **red**: rss grows" in shown
    assert [fit.name for fit in soak.FITS if "MALLOC_PERTURB_" in fit.environment] == [
        "lightning-memprof, free memory touched"
    ]
