"""SIGUSR2 for the time of a run; whoever had it before keeps it."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Usr2", "caught_elsewhere"]

_STATUS: Final = Path("/proc/self/status")


class Usr2:
    """Notes that SIGUSR2 arrived, and hands it on to the handler that was there before.

    Attributes:
        received: whether it arrived; whoever has dealt with it sets it to False.

    """

    def __init__(self) -> None:
        self.received = False
        self._before: Any = None
        self._installed = False
        # One object, so that it can be known again.
        self._own = self._handle

    def install(self) -> str | None:
        """Begin to listen; return why it cannot be, or None."""
        if not hasattr(signal, "SIGUSR2"):
            return "this system has no such signal"
        if threading.current_thread() is not threading.main_thread():
            return "the training does not run in the main thread"
        before = signal.getsignal(signal.SIGUSR2)
        if before is None or (not callable(before) and caught_elsewhere(signal.SIGUSR2)):
            return "a handler that is not Python's has it"
        self._before = before
        signal.signal(signal.SIGUSR2, self._own)
        self._installed = True
        return None

    def remove(self) -> None:
        """Put back what was there; where another came in front of this since, it stays and this hands on only."""
        if not self._installed or signal.getsignal(signal.SIGUSR2) is not self._own:
            return
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, self._before)
            self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if callable(self._before):
            self._before(number, frame)


def caught_elsewhere(number: int) -> bool:
    """Whether a handler of C has the signal, `faulthandler.register` for instance, of which Python does not know."""
    try:
        status = _STATUS.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
