"""More stack for this package's code if the program is near Python's recursion limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from sys import getrecursionlimit, setrecursionlimit
from threading import get_ident
from typing import Any, Final

_MAIN: Final = threading.main_thread().ident
# Reporting a failure takes about 60 frames, and some more with a logging handler of the program's.
_ROOM: Final = 300


def with_room(call: Callable[..., Any], *values: Any) -> Any:
    """Call a function of this package with extra stack: the program may be near Python's recursion limit.

    The limit is the interpreter's: it is raised only during the call, and only in the main thread, because two threads
    could not restore it. Costs 0.3 µs.

    Raises:
        RecursionError: the program has no frame left, and nothing was called; see :func:`is_at_limit`.
    """
    if get_ident() != _MAIN:
        return call(*values)
    limit = getrecursionlimit()
    # Raises at the limit itself, where the limit could not be restored afterwards.
    setrecursionlimit(limit)
    try:
        setrecursionlimit(limit + _ROOM)
        return call(*values)
    finally:
        # Unless the program has set it meanwhile.
        if getrecursionlimit() == limit + _ROOM:
            setrecursionlimit(limit)


def is_at_limit(error: BaseException) -> bool:
    """Return whether :func:`with_room` raised an error, caught in its caller, because the program has no frame left."""
    # No call here: it would take another frame.
    if error.__class__ is not RecursionError:
        return False
    inner = error.__traceback__ and error.__traceback__.tb_next
    return inner is None or (inner.tb_frame.f_code is with_room.__code__ and inner.tb_next is None)


class Room:
    """A context with more stack for the program, to make up for frames of this package on its stack.

    Only in the main thread, as :func:`with_room`.

    Args:
        frames: added to the recursion limit.
    """

    __slots__ = ("_before", "_frames")

    def __init__(self, frames: int) -> None:
        self._frames = frames
        self._before: int | None = None

    def __enter__(self) -> None:
        if get_ident() == _MAIN:
            self._before = getrecursionlimit()
            # As in `with_room`.
            setrecursionlimit(self._before)
            setrecursionlimit(self._before + self._frames)

    def __exit__(self, *_: object) -> None:
        limit, self._before = self._before, None
        # Unless the program has set it meanwhile.
        if limit is not None and getrecursionlimit() == limit + self._frames:
            setrecursionlimit(limit)
