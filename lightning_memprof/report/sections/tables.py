"""Tables of rows: each field names a column and returns its value of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from lightning_memprof.report.document import Cell, Column, Table, Value, Words
from lightning_memprof.report.sections.labels import more

# A trace has thousands of kernels, a snapshot thousands of stacks: --format json has all.
MAX_ROWS: Final = 100

T = TypeVar("T")


class Field(msgspec.Struct, Generic[T], frozen=True):
    """A column and its values.

    Args:
        heading: a noun with its unit or statistic.
        unit: the unit of its values, as in :class:`Cell`.
        value: returns the value of a row; a cell where the row decides on more than that.
        hint: as in :class:`Column`.
        priority: as in :class:`Column`.
        bar: whether a bar compares each value with the largest one.
        has_share: as in :class:`Column`.
    """

    heading: str
    unit: str
    value: Callable[[T], Value | Cell]
    hint: Words = ""
    priority: int = 0
    bar: bool = False
    has_share: bool = False


def _cells(rows: Sequence[T], field: Field[T]) -> list[Cell]:
    values = [field.value(row) for row in rows]
    cells = [value if isinstance(value, Cell) else Cell(value, field.unit) for value in values]
    if not field.bar:
        return cells
    most = max((cell.value for cell in cells if isinstance(cell.value, int | float)), default=None)
    return [replace(cell, whole=most) for cell in cells]


def filled(empty: Table, rows: Sequence[T], *fields: Field[T], most: int | None = MAX_ROWS) -> Iterator[Table]:
    """Yield a table with its rows, nothing where there are none.

    Args:
        empty: the table without columns and rows; rows of its footer may have fewer cells than columns.
        rows: the values of the fields.
        fields: the columns.
        most: the largest number of rows, None for all.
    """
    if rows:
        columns = [Column(field.heading, field.unit, field.hint, field.priority, field.has_share) for field in fields]
        cells = list(zip(*(_cells(rows[:most], field) for field in fields), strict=True))
        footer = [(*row, *[Cell("")] * (len(columns) - len(row))) for row in empty.footer]
        left_out = empty.left_out + len(rows) - len(cells)
        yield replace(empty, columns=columns, rows=cells, footer=footer, left_out=left_out)


def rest(rows: Sequence[object], shown: int, noun: str) -> list[str]:
    """Return the note that counts what a list does not show, none where it shows all."""
    return [more(len(rows) - shown, noun)] if len(rows) > shown else []


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return a share of 1; None where the part or its whole is not known or the whole is 0."""
    return part / whole if part is not None and whole else None
