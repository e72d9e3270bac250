"""Fields of open-ended JSON objects, where they have the expected type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Row = dict[str, Any]

# No count of bytes, nanoseconds or steps is larger; what is larger is damage, and too much for a float or a column.
_MOST: Final = 1 << 63


def text(row: Mapping[str, Any] | None, key: str) -> str | None:
    """Return a field where it is text."""
    value = row.get(key) if row else None
    return value if isinstance(value, str) else None


def whole(row: Mapping[str, Any] | None, key: str) -> int | None:
    """Return a field where it is a whole number of 64 bits."""
    return integer(row.get(key)) if row else None


def integer(value: object) -> int | None:
    """Return a value where it is a whole number of 64 bits."""
    return value if isinstance(value, int) and not isinstance(value, bool) and -_MOST <= value < _MOST else None


def mapping(row: Mapping[str, Any] | None, key: str) -> Mapping[str, Any] | None:
    """Return a field where it is a JSON object."""
    value = row.get(key) if row else None
    return value if isinstance(value, dict) else None
