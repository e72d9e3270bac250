"""SIGUSR2 during a run; the previous handler is still called."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

from lightning_memprof.capture.watchdog import caught_elsewhere

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Usr2"]


class Usr2:
    """Notes that SIGUSR2 arrived, and calls the previous handler.

    Attributes:
        received: whether it arrived; reset it to False after handling it.

    """

    def __init__(self) -> None:
        self.received = False
        self._before: Any = None
        self._installed = False
        # One object, so that it can be compared.
        self._own = self._handle

    def install(self) -> str | None:
        """Install the handler; return why that is not possible, or None."""
        if not hasattr(signal, "SIGUSR2"):
            return "this system has no SIGUSR2"
        if threading.current_thread() is not threading.main_thread():
            return "the training does not run in the main thread"
        before = signal.getsignal(signal.SIGUSR2)
        if before is None or (not callable(before) and caught_elsewhere(signal.SIGUSR2)):
            return "a handler outside Python is installed"
        self._before = before
        signal.signal(signal.SIGUSR2, self._own)
        self._installed = True
        return None

    def remove(self) -> None:
        """Restore the previous handler; if another was installed since, it stays and this one passes the signal on."""
        if not self._installed or signal.getsignal(signal.SIGUSR2) is not self._own:
            return
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, self._before)
            self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if callable(self._before):
            self._before(number, frame)
