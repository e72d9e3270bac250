"""A fit of 600 steps with 30 windows. The long one, of 20,000 steps, is ``python tests/torture/soak.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from soak_judge import Soaked, soaked


@pytest.mark.slow
def test_handles_threads_and_the_files_of_windows_do_not_grow(tmp_path: Path) -> None:
    found = soaked(tmp_path / "soaked", steps=600, every=20, seconds=200)
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
