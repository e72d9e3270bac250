from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from fake_runs import make_run

sys.path.append(str(Path(__file__).resolve().parent))

from page_figures import differences, figures_of, main, targets
from trainings import RAN


def written(folder: Path, **files: object) -> Path:
    folder.mkdir()
    for name, figures in files.items():
        (folder / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(figures).encode()))
    return folder


def test_a_field_that_differs_is_told_once_with_each_file_and_its_first_place(tmp_path: Path) -> None:
    before = written(tmp_path / "a", one={"lines": [{"ns": 1}, {"ns": 2}]}, two={"lines": [{"ns": 5}]})
    after = written(tmp_path / "b", one={"lines": [{"ns": 3}, {"ns": 4}]}, two={"lines": [{"ns": 6}]})
    assert differences(before, after, 0) == {"lines.ns": {"one": "lines.0.ns: 1 -> 3", "two": "lines.0.ns: 5 -> 6"}}


def test_what_only_one_side_has_is_a_difference(tmp_path: Path) -> None:
    before = written(tmp_path / "a", one={"steps": None, "gone": []}, two={"steps": 1})
    after = written(tmp_path / "b", one={"steps": None, "new": {"a": 1}})
    assert differences(before, after, 0) == {
        "gone": {"one": "gone: [] -> missing"},
        "new.a": {"one": "new.a: missing -> 1"},
        "file": {"two": f"missing in {after}"},
    }


@pytest.mark.parametrize(("tolerance", "code"), [("0", 1), ("1e-6", 0)])
def test_numbers_may_differ_by_the_tolerance_and_the_exit_code_says_whether_any_does(
    tmp_path: Path, tolerance: str, code: int
) -> None:
    before = written(tmp_path / "a", one={"ns": 1e9})
    after = written(tmp_path / "b", one={"ns": 1e9 + 1})
    assert main(["compare", str(before), str(after), "--tolerance", tolerance]) == code


def test_sentences_findings_and_places_on_this_machine_are_no_figures() -> None:
    shown = {"verdict": {"rule": "a"}, "findings": [1], "ledger": {"basis": "of all", "ns": 1, "file": "/here/a.json"}}
    assert figures_of(shown, Path("/here")) == {"ledger": {"ns": 1, "file": "/a.json"}}


def test_each_run_and_each_other_file_is_a_target_and_what_a_training_left_is_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "padding-fault-0" / "logs")
    (tmp_path / "padding-fault-0" / RAN).write_text("{}")
    (tmp_path / "padding-fault-0" / "predictions.json").write_text("[]")
    (tmp_path / "trace.json").write_text("{}")
    (tmp_path / "README.md").write_text("")
    found = dict(targets(tmp_path))
    assert found == {"padding-fault-0_logs": run, "trace.json": tmp_path / "trace.json"}


def test_figures_are_written_per_target_and_a_file_that_is_refused_has_its_error(tmp_path: Path) -> None:
    make_run(tmp_path / "in" / "logs")
    (tmp_path / "in" / "broken.json").write_text("no trace")
    assert main(["write", str(tmp_path / "out"), str(tmp_path / "in")]) == 0
    found = {path.name: json.loads(gzip.decompress(path.read_bytes())) for path in (tmp_path / "out").iterdir()}
    assert found["broken.json.json.gz"] == {"error": "ArtifactError"}
    assert found["logs.json.gz"]["pulse"]["steps"] > 0
