"""Signals that end a command."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["ended_by_sigterm"]


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Leave on SIGTERM as on Ctrl-C, so that neither unfinished files nor processes stay behind.

    A terminal that is closed sends SIGHUP, which means the same, unless it is ignored, as under ``nohup``.
    """

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    heard = [signum for signum in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(signum) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, leave) for signum in heard}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
