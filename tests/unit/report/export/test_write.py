from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof.errors import ReportError
from lightning_memprof.report.export.write import whole_file, write_csv


def test_csv_keeps_every_value_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"a": 1, "text": 'quote " comma , line\nend'}, {"a": None, "text": "\udc80"}]
    assert write_csv([("x", rows), ("without", ())], tmp_path / "out") == [(tmp_path / "out" / "x.csv", 2)]
    with (tmp_path / "out" / "x.csv").open(newline="") as read:
        assert list(csv.reader(read)) == [["a", "text"], ["1", 'quote " comma , line\nend'], ["", "\\udc80"]]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x.csv"]


def test_a_table_has_every_column_of_every_row_and_nested_values_as_json(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"a": 1, "path": Path("/b")}, {"a": None, "c": [1, {"d": 2}]}]
    write_csv([("x", rows)], tmp_path)
    with (tmp_path / "x.csv").open(newline="") as read:
        assert list(csv.reader(read)) == [["a", "path", "c"], ["1", "/b", ""], ["", "", '[1, {"d": 2}]']]


def test_a_file_that_fails_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")

    def fail() -> None:
        with whole_file(path) as out:
            out.write("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="name another place"), whole_file(tmp_path / "file" / "x.csv"):
        pass
