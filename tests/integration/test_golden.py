"""What the commands say of recorded files is what they said before; see tests/programs/golden.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# It is a script: its directory is on the path while it runs.
sys.path.append(str(Path(__file__).parents[1] / "programs"))

if TYPE_CHECKING:
    from tests.programs import golden
else:
    import golden

TO_DO = "Fields that a change adds or renames are recorded with it; any other difference is a figure that has changed."


@pytest.mark.parametrize("name", [case.name for case in golden.CASES])
def test_the_commands_say_of_recorded_files_what_they_said_before(name: str) -> None:
    (case,) = (case for case in golden.CASES if case.name == name)
    if not case.archives and golden.corpus() is None:
        pytest.skip("no corpus; set MEMPROF_CORPUS to where it is")
    found = golden.differences(golden.expected_documents(case), golden.found_documents(case))
    assert [str(difference) for difference in found] == [], TO_DO


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
