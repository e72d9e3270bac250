"""Keep what others announce about themselves out of our output; their warnings and errors stay."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["quiet_lightning"]

_BESIDE_THE_POINT: Final = (
    # Lightning asks torch's pytree in a way that torch has since renamed; nobody here can act on it.
    r".*isinstance\(treespec, LeafSpec\).*",
    # Slicing a text that is in memory costs less than sending the slices from another process.
    r".*does not have many workers.*",
)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Leave out Lightning's lines on what hardware it found and why it stopped; Lightning must be imported already."""
    lightnings = logging.getLogger("lightning.pytorch")
    before = lightnings.level
    lightnings.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in _BESIDE_THE_POINT:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        lightnings.setLevel(before)
