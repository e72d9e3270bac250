from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_memprof.report.export.tables import Table


def test_a_table_has_every_column_of_every_row_and_nested_values_as_json() -> None:
    given: list[dict[str, Any]] = [{"a": 1, "path": Path("/b")}, {"a": None, "c": [1, {"d": 2}]}]
    table = Table.of("x", given)
    assert table.columns == ("a", "path", "c")
    assert list(table.rows) == [(1, "/b", None), (None, None, '[1, {"d": 2}]')]
