from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof.analysis.run.rows import ManifestRows, kept_artifacts, manifest_rows, noted, rows_of
from lightning_memprof.artifacts.manifest import SCHEMA_VERSION


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
    rows = ManifestRows(
        [
            {"kind": "note", "collector": "schedule", "message": "late"},
            {"kind": "budget", "window": 1, "level": "no_stack", "active_steps": None, "reason": "r1"},
            {"kind": "budget", "window": 2, "level": "active_steps", "active_steps": 1, "reason": "r2"},
            removed(0, "a"),
        ]
    )
    assert noted(rows) == [
        ("schedule", "late"),
        ("budget", "from window 1 on traces have no Python stacks: r1"),
        ("budget", "from window 2 on traces have at most 1 active step: r2"),
        ("budget", "the files of window 0 were removed: keep_windows is 1"),
    ]


def test_rows_are_found_by_their_kind_without_a_look_at_the_others() -> None:
    class Counted(dict[str, Any]):
        looks = 0

        def __getitem__(self, key: str) -> Any:
            Counted.looks += 1
            return super().__getitem__(key)

        def get(self, key: str, default: Any = None) -> Any:
            Counted.looks += 1
            return super().get(key, default)

    rows = ManifestRows([Counted(kind="note"), *(Counted(kind="artifact") for _ in range(100))])
    assert [rows_of(rows, "note") for _ in range(12)] == [[{"kind": "note"}]] * 12
    assert Counted.looks == len(rows)


def test_a_manifest_of_a_million_empty_rows_is_read_soon_and_says_that_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "m"
    run = json.dumps({"kind": "run", "schema_version": SCHEMA_VERSION}).encode() + b"\n"
    path.write_bytes(run + b"{}\n" * 1_000_000 + b"not read\n")
    before = time.process_time()
    rows, damage = manifest_rows(path)
    assert time.process_time() - before < 10
    assert len(rows) == 1
    assert damage == "it has more than 1,000,000 lines; those behind them are not read"
