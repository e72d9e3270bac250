"""Interrupts a collector that blocks the training for too long."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeVar

from lightning_memprof.capture.sources.proc import handles_signal
from lightning_memprof.logs import logger_of

log = logger_of(__name__)

Result = TypeVar("Result")

# A check takes a few microseconds of a sleeping thread.
_CHECKS: Final = 4
_LONGEST_SLEEP: Final = 30.0
_DELIVERED_WITHIN: Final = 1.0


class CollectorHungError(RuntimeError):
    """A collector exceeded its time; raised inside it, so that the traceback shows where it was."""


class Watchdog:
    """Watches calls into collectors while a window is open, and raises in one that does not return.

    A thread checks the clock, and an unused real-time signal interrupts the training's thread, also in a blocking
    system call. Its handler raises only while a collector is called, never in the training's own code: it runs in the
    same thread, so this is certain. C code that holds the interpreter cannot be interrupted.

    Only the main thread can be interrupted. If the training runs in another thread, or no signal is free, nothing is
    watched.

    Args:
        seconds: maximum duration of a call; None watches nothing.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._raised: CollectorHungError | None = None
        self._sent = 0
        self._handled = 0
        self._number = 0
        self._before: Any = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        # One object, so that it can be compared.
        self._own = self._handle

    def call(self, work: Callable[[], Result]) -> Result:
        """Call into a collector.

        Raises:
            CollectorHungError: inside ``work``, if it took too long.
        """
        self._raised = None
        self._since = time.monotonic()
        try:
            return work()
        except BaseException:
            self._raised = None
            raise
        finally:
            self._since = None

    def raise_swallowed(self) -> None:
        """Raise the interruption of the last call if it caught that: a collector may catch every exception.

        Raises:
            CollectorHungError: the last call took too long and returned anyway.
        """
        swallowed, self._raised = self._raised, None
        if swallowed is not None:
            raise swallowed

    def start(self) -> None:
        """Start watching; never raises."""
        if self._seconds is None or threading.current_thread() is not threading.main_thread():
            return
        number = _free_signal()
        if number is None:
            return
        thread = threading.Thread(target=self._watch, args=(self._seconds,), name="memprof-watchdog", daemon=True)
        self._before = signal.signal(number, self._own)
        self._number, self._thread = number, thread
        try:
            thread.start()
        except RuntimeError as error:
            # The machine cannot start another thread.
            log.debug("collectors are not watched: %s", error)
            self._thread = None
            self.stop()

    def stop(self) -> None:
        """End the thread and release the signal."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._number:
            # A pending signal must not reach the previous handler: that would end the process.
            deadline = time.monotonic() + _DELIVERED_WITHIN
            while self._handled < self._sent and time.monotonic() < deadline:
                time.sleep(0.001)
            arrived = self._handled == self._sent
            if arrived and signal.getsignal(self._number) is self._own:
                signal.signal(self._number, self._before)
            self._number = 0

    def _watch(self, seconds: float) -> None:
        training = threading.main_thread().ident
        while not self._done.wait(min(seconds / _CHECKS, _LONGEST_SLEEP)):
            if self._overdue(seconds) and training is not None and self._handled == self._sent:
                self._sent += 1
                signal.pthread_kill(training, self._number)

    def _overdue(self, seconds: float) -> bool:
        since = self._since
        return since is not None and time.monotonic() - since > seconds

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        self._handled += 1
        seconds = self._seconds
        # In `call` itself the collector is about to be called or has returned.
        inside = frame is not None and frame.f_code is not Watchdog.call.__code__
        if inside and seconds is not None and self._overdue(seconds):
            # If it continues anyway, it has the same time again.
            self._since = time.monotonic()
            msg = f"did not return within {seconds:g} s, see Budget(max_collector_seconds=...)"
            self._raised = CollectorHungError(msg)
            raise self._raised


def _free_signal() -> int | None:
    """Return the highest real-time signal without a handler; None without one."""
    if not hasattr(signal, "SIGRTMIN"):
        return None
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN, -1):
        if signal.getsignal(number) is signal.SIG_DFL and not handles_signal(number):
            return number
    return None
