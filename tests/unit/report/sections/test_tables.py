from __future__ import annotations

from lightning_memprof.report.document import Cell, Column, Table
from lightning_memprof.report.sections.tables import MAX_ROWS, Field, filled, ratio

PARTS = [("forward", 30), ("backward", 60)]


def test_a_field_gives_the_column_and_the_values_with_its_unit():
    (table,) = filled(
        Table("parts", "Parts"),
        PARTS,
        Field("part", "text", lambda part: part[0]),
        Field("total", "ns", lambda part: part[1], "per step", priority=2, has_share=True),
    )
    assert table.columns == [Column("part"), Column("total", "ns", "per step", priority=2, has_share=True)]
    assert table.rows == [(Cell("forward"), Cell(30, "ns")), (Cell("backward"), Cell(60, "ns"))]


def test_a_field_may_return_a_cell():
    (table,) = filled(
        Table("parts", "Parts"), PARTS[:1], Field("part", "text", lambda part: Cell(part[0], style="dim"))
    )
    assert table.rows == [(Cell("forward", style="dim"),)]


def test_a_bar_compares_each_value_with_the_largest_one():
    unknown = ("optimizer", None)
    field: Field[tuple[str, int | None]] = Field("total", "ns", lambda part: part[1], bar=True)
    (table,) = filled(Table("parts", "Parts"), [*PARTS, unknown], field)
    assert [row[0].share for row in table.rows] == [0.5, 1.0, None]


def test_a_table_counts_the_rows_that_it_leaves_out():
    empty = Table("steps", "Steps", notes=["of rank 0"], top=4)
    (table,) = filled(empty, range(MAX_ROWS + 3), Field("step", "index", lambda step: step))
    assert (table.id, table.title, table.top) == ("steps", "Steps", 4)
    assert len(table.rows) == MAX_ROWS
    assert table.left_out == 3
    assert table.notes == ["of rank 0"]


def test_a_table_without_a_limit_has_every_row():
    (table,) = filled(
        Table("steps", "Steps"), range(MAX_ROWS + 3), Field("step", "index", lambda step: step), most=None
    )
    assert len(table.rows) == MAX_ROWS + 3
    assert table.left_out == 0


def test_without_rows_there_is_no_table():
    assert list(filled(Table("steps", "Steps"), [], Field("step", "index", lambda step: step))) == []


def test_a_row_of_sums_is_filled_with_empty_cells():
    fields: list[Field[tuple[str, int]]] = [Field("part", "text", lambda part: part[0]) for _ in range(3)]
    (table,) = filled(Table("parts", "Parts", footer=[(Cell("sum"), Cell(2, "count"))]), PARTS, *fields)
    assert table.footer == [(Cell("sum"), Cell(2, "count"), Cell(""))]


def test_a_share_of_nothing_is_not_available():
    assert ratio(1, 4) == 0.25
    assert ratio(1, 0) is None
    assert ratio(None, 4) is None
