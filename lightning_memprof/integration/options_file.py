"""A file of options, before it is parsed: whether it is YAML of a size that a person writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import yaml

from lightning_memprof.artifacts.plain_file import read_plain
from lightning_memprof.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["options_fault"]

# With what its aliases stand for: a few lines of aliases of aliases can mean more than a machine holds.
_MOST_VALUES: Final = 10_000
_LONGEST: Final = 300


def options_fault(path: Path) -> str | None:
    """Return in one line why a file can be no options; None where it is plain YAML.

    Raises:
        OSError: it cannot be read, or is no plain file.

    """
    try:
        data = yaml.safe_load(read_plain(path, MIB).decode())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # A date of a 13th month is a ValueError of Python's.
        return " ".join(str(error).split())[:_LONGEST]
    return None if _is_small(data) else f"it has more than {_MOST_VALUES:,} values, or one that contains itself"


def _is_small(data: Any) -> bool:
    pending, count = [data], 0
    while pending:
        item = pending.pop()
        inside = (
            [*item.keys(), *item.values()] if isinstance(item, dict) else item if isinstance(item, list | set) else ()
        )
        count += len(inside)
        if count > _MOST_VALUES:
            return False
        pending += inside
    return True
