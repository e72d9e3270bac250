"""How often Python looks for cycles while a command runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["rare_collections"]

# New containers, of some hundred bytes each, until the next look.
_COLLECT_AFTER: Final = 200_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for cycles rarely: of thousands of ranks it would look at millions of numbers, for nothing."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
