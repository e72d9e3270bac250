"""Keep a result from being written over what it is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["is_one_of"]


def is_one_of(out: Path, files: Iterable[Path]) -> bool:
    """Say whether a result would be one of these files, links followed.

    A path that cannot be a file, of a loop of links for instance or with a zero byte in it, is none.
    """
    place = _real(out)
    return place is not None and any(_real(file) == place for file in files)


def _real(path: Path) -> Path | None:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return None
