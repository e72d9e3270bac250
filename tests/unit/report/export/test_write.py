from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof.errors import ReportError
from lightning_memprof.report.export.tables import Table
from lightning_memprof.report.export.write import whole_file, write_csv, write_parquet


def test_csv_keeps_every_value_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    table = Table.of("x", [{"a": 1, "text": 'quote " comma , line\nend'}, {"a": None, "text": "\udc80"}])
    assert write_csv([table], tmp_path / "out") == [(tmp_path / "out" / "x.csv", 2)]
    with (tmp_path / "out" / "x.csv").open(newline="") as read:
        assert list(csv.reader(read)) == [["a", "text"], ["1", 'quote " comma , line\nend'], ["", "\\udc80"]]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x.csv"]


@pytest.mark.slow
def test_parquet_has_one_type_a_column_and_nulls(tmp_path: Path) -> None:
    from pyarrow import parquet

    rows: list[dict[str, Any]] = [
        {"whole": 1, "part": 1, "flag": True, "text": "x", "mixed": 1, "huge": 1 << 70, "none": None},
        {"whole": None, "part": 0.5, "flag": None, "text": "\udc80", "mixed": "y", "huge": 1, "none": None},
    ]
    ((path, count),) = write_parquet([Table.of("x", rows)], tmp_path)
    table = parquet.read_table(path)
    assert count == table.num_rows == 2
    assert [str(field.type) for field in table.schema][:6] == ["int64", "double", "bool", "string", "string", "string"]
    assert table["whole"].to_pylist() == [1, None]
    assert table["huge"].to_pylist() == [str(1 << 70), "1"]
    assert table["text"].to_pylist() == ["x", "\\udc80"]


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
