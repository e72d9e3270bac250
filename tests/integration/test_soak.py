"""A fit of 600 steps with 30 windows. The long one, of 20,000 steps, is ``python tests/torture/soak.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The soak is a script: its directory is on the path while it runs.
sys.path.append(str(Path(__file__).parents[1] / "torture"))

from soak import JUDGED, Soaked, watch


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_handles_threads_and_the_files_of_windows_do_not_grow(tmp_path: Path) -> None:
    found = watch(tmp_path / "soaked", 600, 20, JUDGED)
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
