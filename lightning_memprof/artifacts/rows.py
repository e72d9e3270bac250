"""Typed rows of JSON lines: a damaged field hides only itself, a damaged line only itself."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Final, TypeVar, get_args

import msgspec

# No count of bytes, nanoseconds or steps is larger; what is larger is damage, and too much for a float or a column.
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

DAMAGE: Final = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)
"""What decoding a damaged line or field raises; ``msgspec.ValidationError`` is a ``DecodeError``."""

_fields: Final = cache(msgspec.structs.fields)


class Row(msgspec.Struct, kw_only=True):
    """A JSON object with known fields; every field has a default for rows that lack it or have it damaged."""


class OpenRow(Row):
    """A row with more fields than are known here; ``fields`` has all of them, as written."""

    fields: dict[str, Any] = msgspec.field(default_factory=dict)


R = TypeVar("R", bound=Row)
T = TypeVar("T", bound="Row | dict[str, Any]")


def decode_object(line: bytes) -> dict[str, Any]:
    """Return the object of a line of JSON, as Python writes it: with NaN and halves of characters.

    Raises:
        ValueError: it is not an object.
    """
    try:
        row = json.loads(line)
    except DAMAGE as error:
        raise ValueError("not a JSON object; the file is damaged, remove the line to read the rest") from error
    if not isinstance(row, dict):
        raise ValueError(f"holds {type(row).__name__}, a JSON object is expected; remove the line")  # noqa: TRY004
    return row


def decode_rows(content: bytes, kind: type[T]) -> tuple[list[T], str | None]:
    """Return the rows of JSON lines, and the number and problem of the first damaged line.

    A last line without its end, which a dying process leaves, is ignored.
    """
    whole = content[: content.rfind(b"\n") + 1]
    decoder = msgspec.json.Decoder(kind)
    try:
        return decoder.decode_lines(whole), None
    except DAMAGE:
        pass
    rows: list[T] = []
    problems: list[str] = []
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        try:
            rows.append(decoder.decode(line))
        except DAMAGE:
            try:
                row = decode_object(line)
            except ValueError as error:
                problems.append(f"{number}: {error}")
            else:
                rows.append(salvaged(row, kind) if issubclass(kind, Row) else row)  # type: ignore[arg-type]
    return rows, next(iter(problems), None)


def salvaged(row: dict[str, Any], kind: type[R]) -> R:
    """Return a decoded JSON object as a row, without its damaged fields."""
    values: dict[str, Any] = {"fields": row} if issubclass(kind, OpenRow) else {}
    for field in _fields(kind):
        if field.encode_name in row:
            with suppress(*DAMAGE):
                values[field.name] = _value(row[field.encode_name], field.type)
    return kind(**values)


def _value(value: Any, kind: Any) -> Any:
    """Return the value of a field; open rows in a list keep the fields that are not known here."""
    entry = next(iter(get_args(kind)), None)
    if isinstance(entry, type) and issubclass(entry, OpenRow):
        return [salvaged(each, entry) for each in msgspec.convert(value, list[dict[str, Any]])]
    return msgspec.convert(value, kind)
