"""Calls with few frames left below Python's recursion limit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def frames() -> int:
    """Give the number of frames of the caller's stack."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


def at_the_limit(call: Callable[[], Any], spare: int) -> Any:
    """Call a function with so many frames left; calls of C functions take one as well before Python 3.12."""

    def below(left: int) -> Any:
        return call() if left == 0 else below(left - 1)

    return below(sys.getrecursionlimit() - frames() - 1 - spare)
