"""What the commands say of recorded files is what they said before; see tests/programs/golden.py."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# It is a script: its directory is on the path while it runs.
sys.path.append(str(Path(__file__).parents[1] / "programs"))

if TYPE_CHECKING:
    from tests.programs import golden
else:
    import golden

EXPECTED: dict[str, Any] = {
    "show run": {"steps": 30, "is_closed": True, "limit": None, "share": 0.5, "host": "trainer-0",
                 "rows": [{"rule": "garbage", "why": "Takes 49% of 2 steps."}, {"rule": "pulse", "why": "5 us."}]},
}  # fmt: skip
TO_DO = (
    "List a new field (missing -> ...) in ADDED of tests/programs/golden.py, a renamed one in RENAMES; "
    "any other difference is a figure that has changed."
)


@pytest.mark.parametrize("name", [case.name for case in golden.CASES])
def test_the_commands_say_of_recorded_files_what_they_said_before(name: str) -> None:
    (case,) = (case for case in golden.CASES if case.name == name)
    if not case.archives and golden.corpus() is None:
        pytest.skip("no corpus; set MEMPROF_CORPUS to where it is")
    found = golden.differences(golden.expected_documents(case), golden.found_documents(case))
    assert [str(difference) for difference in found if not difference.reworded] == [], TO_DO


def changed(*path: Any, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(EXPECTED)
    parent = found["show run"]
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return found


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (changed("steps", value=31), "show run: steps: 30 -> 31"),
        (changed("steps", value=30.0), "show run: steps: 30 -> 30.0"),
        (changed("is_closed", value=1), "show run: is_closed: true -> 1"),
        (changed("limit", value=0), "show run: limit: null -> 0"),
        (changed("host", value="trainer-1"), 'show run: host: "trainer-0" -> "trainer-1"'),
        (changed("rows", 1, "rule", value="pulses"), 'show run: rows[1].rule: "pulse" -> "pulses"'),
        (changed("rows", 1, "why", value=None), 'show run: rows[1].why: "5 us." -> null'),
        (changed("rows", 1, value={"rule": "pulse"}), 'show run: rows[1].why: "5 us." -> missing'),
        (changed("added", value=[1]), "show run: added: missing -> [1]"),
        (changed("rows", value=EXPECTED["show run"]["rows"][:1]), "show run: rows: 2 items -> 1 items"),
    ],
)  # fmt: skip
def test_a_changed_figure_a_missing_key_and_an_added_key_are_differences(found: dict[str, Any], told: str) -> None:
    (difference,) = golden.differences(EXPECTED, found)
    assert (str(difference), difference.reworded) == (told, False)


def test_prose_may_be_reworded_and_other_numbers_in_it_are_told_apart() -> None:
    assert golden.differences(EXPECTED, changed("rows", 0, "why", value="Of 2 steps, 49% go there.")) == []
    (difference,) = golden.differences(EXPECTED, changed("rows", 0, "why", value="Takes 48% of 2 steps."))
    assert difference.reworded


def test_a_listed_rename_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    found = changed("rows", 0, value={"name": "gc", "why": "Takes 49% of 2 steps."})
    found["show run"]["rows"][1] = {"name": "pulse", "why": "5 us."}
    monkeypatch.setitem(golden.RENAMES, "rows.rule", "name")
    monkeypatch.setitem(golden.RENAMED_VALUES, "garbage", "gc")
    assert golden.differences(EXPECTED, found) == []


def test_conclusions_and_added_fields_are_not_compared() -> None:
    found = {"show run": {**EXPECTED["show run"], "verdict": {"rule": "new"}, "findings": [], "ledger": {"lines": []}}}
    assert golden.differences(EXPECTED, found) == []
    (difference,) = golden.differences(found, {"show run": {**found["show run"], "ledger": {"lines": [1]}}})
    assert str(difference) == "show run: ledger.lines: 0 items -> 1 items"


def test_the_check_fails_with_the_fields_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "expected").mkdir()
    (tmp_path / "recorded").symlink_to(golden.GOLDEN / "recorded")
    monkeypatch.setattr(golden, "GOLDEN", tmp_path)
    assert golden.main(["record", "--only", "snapshots"]) == 0
    assert golden.main(["check", "--only", "snapshots"]) == 0
    (case,) = (case for case in golden.CASES if case.name == "snapshots")
    expected = golden.expected_documents(case)
    expected["show snapshots"]["snapshots"][0]["devices"][0]["reserved_bytes"] += 1
    monkeypatch.setattr(golden, "expected_documents", lambda _: expected)
    assert golden.main(["check", "--only", "snapshots"]) == 1
