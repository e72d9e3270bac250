"""What the page says of recorded training runs is what it said before; see tests/programs/golden_runs.py."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fake_runs import make_run

# It is a script: its directory is on the path while it runs.
sys.path.append(str(Path(__file__).parents[1] / "programs"))

if TYPE_CHECKING:
    from tests.programs import golden_runs
else:
    import golden_runs

TO_DO = "After a change of the rules: python tests/programs/golden_runs.py record, and read the difference."
MAX_BYTES = 12 << 20


@pytest.mark.parametrize("name", golden_runs.names())
def test_the_page_says_of_a_recorded_run_what_it_said_before(name: str) -> None:
    assert golden_runs.said(name) == golden_runs.expected(name), TO_DO


def test_the_archives_are_small_and_each_has_its_expectation() -> None:
    assert sum(path.stat().st_size for path in golden_runs.RUNS.iterdir()) < MAX_BYTES
    assert {path.name for path in golden_runs.RUNS.glob("*.json")} == {f"{name}.json" for name in golden_runs.names()}


def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(golden_runs, "RUNS", tmp_path / "runs")
    make_run(tmp_path / "padding-fault-0" / "logs")
    assert golden_runs.main(["pack", str(tmp_path / "padding-fault-0")]) == 0
    (name,) = golden_runs.names()
    return name


def test_a_packed_recording_has_no_name_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with golden_runs.extracted(packed(tmp_path, monkeypatch)) as directory:
        files = [path for path in directory.rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if str(tmp_path).encode() in path.read_bytes()]


def test_a_directory_of_this_machine_that_would_be_packed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="secret"):
        golden_runs.anonymous(b'{"file":"/root/secret/train.py"}', tmp_path)


def test_the_check_names_what_a_page_says_otherwise(tmp_path: Path, monkeypatch, capsys) -> None:
    name = packed(tmp_path, monkeypatch)
    assert golden_runs.main(["check"]) == 0
    file = golden_runs.RUNS / f"{name}.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "steps": document["steps"] + 1}))
    assert golden_runs.main(["check"]) == 1
    assert re.search(rf"{name}: steps: {document['steps'] + 1}\s+-> {document['steps']}", capsys.readouterr().out)
