"""Signals that end a command."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["ended_by_sigterm"]


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Leave on SIGTERM as on Ctrl-C, so that neither unfinished files nor processes stay behind."""

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
