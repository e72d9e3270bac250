"""Tables of rows: each field names a column and returns its value of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from lightning_memprof.report.document import Cell, Column, Row, Table, Value, Words, text
from lightning_memprof.report.sections.labels import more

__all__ = ["MAX_ROWS", "Field", "filled", "grid", "ranked", "ratio", "rest"]

# A trace has thousands of kernels, a snapshot thousands of stacks: --format json has all.
MAX_ROWS: Final = 100

T = TypeVar("T")


@dataclass(frozen=True)
class Field(Generic[T]):
    """A column and its values.

    Args:
        heading: a noun with its unit or statistic.
        unit: the unit of its values, as in :class:`Cell`.
        value: returns the value of a row; a cell where the row decides on more than that.
        hint: as in :class:`Column`.
        priority: as in :class:`Column`.
        bar: whether a bar compares each value with the largest one.

    """

    heading: str
    unit: str
    value: Callable[[T], Value | Cell]
    hint: Words = ""
    priority: int = 0
    bar: bool = False


def grid(rows: Sequence[T], *fields: Field[T]) -> tuple[list[Column], list[Row]]:
    """Return the columns and the rows of a table."""
    columns = [Column(field.heading, field.unit, field.hint, field.priority) for field in fields]
    values = [_cells(rows, field) for field in fields]
    return columns, list(zip(*values, strict=True))


def _cells(rows: Sequence[T], field: Field[T]) -> list[Cell]:
    values = [field.value(row) for row in rows]
    cells = [value if isinstance(value, Cell) else Cell(value, field.unit) for value in values]
    if not field.bar:
        return cells
    most = max((cell.value for cell in cells if isinstance(cell.value, int | float)), default=None)
    return [replace(cell, whole=most) for cell in cells]


def ranked(
    table_id: str,
    title: str,
    rows: Sequence[T],
    *fields: Field[T],
    top: int | None = 10,
    notes: Sequence[Words] = (),
) -> Iterator[Table]:
    """Yield a table of the first rows and a note that counts the others; nothing without rows."""
    if rows:
        columns, cells = grid(rows[:MAX_ROWS], *fields)
        yield Table(table_id, title, columns, cells, notes=[*rest(rows, MAX_ROWS), *notes], top=top)


def rest(rows: Sequence[object], shown: int, noun: str = "more") -> list[str]:
    """Return the note on the rows that a table leaves out, none where it has all."""
    return [more(len(rows) - shown, noun)] if len(rows) > shown else []


def filled(columns: Sequence[Column], *cells: Cell) -> Row:
    """Return a row that begins with some cells; the others are empty."""
    return (*cells, *[text("")] * (len(columns) - len(cells)))


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return a share of 1; None where the part or its whole is not known or the whole is 0."""
    return part / whole if part is not None and whole else None
