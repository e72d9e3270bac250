from __future__ import annotations

from pathlib import Path

from fake_runs import make_run
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.export.tables import run_tables


def test_a_trace_that_cannot_be_read_is_a_row_and_hides_no_other_table(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "log")
    (trace,) = directory.parent.glob("*.json.gz")
    trace.write_bytes(b"damaged")
    tables = {name: list(rows) for name, rows in run_tables(load_run(directory))}
    assert [row["step"] for row in tables["pulse"]] == list(range(30))
    assert tables["operators"] == []
    assert any(trace.name in row["piece"] for row in tables["problems"])
