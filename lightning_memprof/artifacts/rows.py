"""Typed rows of JSON lines: a damaged field hides only itself, a damaged line only itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin

import msgspec

# No count of bytes, nanoseconds or steps is larger; what is larger is damage, and too much for a float or a column.
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

DAMAGE: Final = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)
"""What decoding a damaged line or field raises; ``msgspec.ValidationError`` is a ``DecodeError``."""

_decode: Final = msgspec.json.Decoder().decode


class Row(msgspec.Struct, kw_only=True):
    """A JSON object with known fields; every field has a default for rows that lack it or have it damaged."""


class OpenRow(Row):
    """A row with more fields than are known here; ``fields`` has all of them, as written."""

    fields: dict[str, Any] = msgspec.field(default_factory=dict)


R = TypeVar("R", bound=Row)
T = TypeVar("T", bound="Row | dict[str, Any]")


def decode_line(line: bytes) -> object:
    """Return the value of a line of JSON.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
    """
    try:
        return _decode(line)
    except DAMAGE:
        # Python writes and reads NaN and halves of characters, which are not JSON.
        return json.loads(line)


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
                value = decode_line(line)
            except DAMAGE:
                problems.append(f"{number}: not a JSON object; the file is damaged, remove the line to read the rest")
                continue
            if isinstance(value, dict):
                rows.append(salvaged(value, kind) if issubclass(kind, Row) else value)  # type: ignore[arg-type]
            else:
                problems.append(f"{number}: holds {type(value).__name__}, a JSON object is expected; remove the line")
    return rows, next(iter(problems), None)


def salvaged(row: dict[str, Any], kind: type[R]) -> R:
    """Return a decoded JSON object as a row, without its damaged fields."""
    values = {}
    for field in _fields(kind):
        if field.encode_name in row:
            for value in _intact(row[field.encode_name], field.type):
                values[field.name] = value
    if issubclass(kind, OpenRow):
        values["fields"] = row
    return kind(**values)


@cache
def _fields(kind: type[Row]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


def _intact(value: object, kind: Any) -> Iterator[Any]:
    """Yield a value as ``kind`` without its damaged parts, or nothing where no part is intact.

    A damaged entry of a list or an object is None where its kind allows that, and otherwise left out.
    """
    if not _is_open(kind):
        with suppress(*DAMAGE):
            yield msgspec.convert(value, kind)
            return
    is_union = get_origin(kind) in {Union, UnionType}
    for option in get_args(kind) if is_union else (kind,):
        origin = get_origin(option) or option
        if isinstance(value, dict) and origin is dict:
            entry = get_args(option)[1]
            yield {key: each for key, part in value.items() for each in _entry(part, entry)}
        elif isinstance(value, list) and origin is list:
            yield [each for part in value for each in _entry(part, get_args(option)[0])]
        elif isinstance(value, dict) and isinstance(origin, type) and issubclass(origin, Row):
            yield salvaged(value, origin)


def _is_open(kind: Any) -> bool:
    return any(map(_is_open, get_args(kind))) or (isinstance(kind, type) and issubclass(kind, OpenRow))


def _entry(value: object, kind: Any) -> list[Any]:
    found = list(_intact(value, kind))
    return found or [None] * (type(None) in get_args(kind))
