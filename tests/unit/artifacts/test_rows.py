from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprof.artifacts.rows import decode_rows
from lightning_memprof.artifacts.series import HookRow, SavedTensorsRow

HOOK = {"step": 2, "recorded": True, "action": "step", "start_ns": 5, "duration_ns": 9, "depth": -1}


def lines(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("value", ["x", 2**63, -(2**70), 1e300, float("nan"), True, [], {}, None])
def test_a_damaged_field_hides_only_itself(value: Any) -> None:
    rows, damage = decode_rows(lines(HOOK, {**HOOK, "duration_ns": value}), HookRow)
    assert damage is None
    assert [row.duration_ns for row in rows] == [9, None]
    assert [row.start_ns for row in rows] == [5, 5]


@pytest.mark.parametrize("damage", [b"{broken", b"[1]", b"null", b"\xff", b'"a"', b""])
def test_a_damaged_line_hides_only_itself_and_is_named(damage: bytes) -> None:
    rows, problem = decode_rows(lines(HOOK) + damage + b"\n" + lines({**HOOK, "step": "x"}), HookRow)
    assert [row.step for row in rows] == [2, None]
    assert str(problem).startswith("2: ")


def test_a_truncated_last_line_is_ignored() -> None:
    assert decode_rows(lines(HOOK) + b'{"step": 3', HookRow) == ([HookRow(**HOOK)], None)  # type: ignore[arg-type]


def test_a_damaged_cell_hides_its_field() -> None:
    row = {"modules": {"a": [1, "x", 3], "b": [5]}, "dtypes": {"a": 1}, "held": {"x_bytes": None, "y_bytes": 2}}
    (found,), _ = decode_rows(lines(row), SavedTensorsRow)
    assert (found.modules, found.dtypes, found.held) == ({}, row["dtypes"], row["held"])


@pytest.mark.slow
@given(
    st.dictionaries(st.sampled_from([*HOOK, "other"]), st.recursive(st.none() | st.integers() | st.text(), st.lists))
)
def test_any_json_object_is_a_row(row: dict[str, Any]) -> None:
    rows, damage = decode_rows(lines(HOOK, row), HookRow)
    assert damage is None
    assert len(rows) == 2
