from __future__ import annotations

from typing import Any

import pytest

from lightning_memprof.analysis.rows import kept_artifacts, noted


def artifact(path: str, window: int) -> dict[str, Any]:
    return {"kind": "artifact", "path": path, "window": window}


def removed(window: int, *paths: Any) -> dict[str, Any]:
    return {"kind": "removed", "window": window, "paths": list(paths), "reason": "keep_windows is 1"}


def test_a_file_that_the_run_removed_is_no_file_of_it_unless_it_was_written_again() -> None:
    rows = [artifact("a", 0), artifact("b", 0), removed(0, "a", "b", {}, None), artifact("b", 1), artifact("c", 1)]
    assert kept_artifacts(rows) == rows[3:]


@pytest.mark.parametrize("damage", [{"kind": "removed"}, {"kind": "removed", "paths": "a"}, removed(0, 3, [])])
def test_a_damaged_row_removes_nothing(damage: dict[str, Any]) -> None:
    assert kept_artifacts([artifact("a", 0), damage]) == [artifact("a", 0)]


def test_what_a_budget_left_out_is_a_note() -> None:
    rows: list[dict[str, Any]] = [
        {"kind": "note", "collector": "schedule", "message": "late"},
        {"kind": "budget", "window": 1, "level": "no_stack", "active_steps": None, "reason": "r1"},
        {"kind": "budget", "window": 2, "level": "active_steps", "active_steps": 1, "reason": "r2"},
        removed(0, "a"),
    ]
    assert noted(rows) == [
        ("schedule", "late"),
        ("budget", "from window 1 on traces have no Python stacks: r1"),
        ("budget", "from window 2 on traces have at most 1 active step: r2"),
        ("budget", "the files of window 0 were removed: keep_windows is 1"),
    ]
