"""The collectors' guards of a run, and the out-of-memory report on standard error."""

from __future__ import annotations

import logging
import mmap
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from lightning_memprof.units import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprof.capture.base import Collector, OnException, RunContext

__all__ = ["MemoryWatch"]

log = logging.getLogger(__name__)

# If many small objects took the last byte, no report could be made. It is never touched: address space only.
_RESERVE_BYTES: Final = 32 * MIB


def _reserve() -> mmap.mmap | None:
    """Return reserved address space to release when memory has run out; None if the system refuses it."""
    if sys.platform == "win32":
        return None
    try:
        return mmap.mmap(-1, _RESERVE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError):
        return None


class MemoryWatch:
    """A run's guards (:meth:`Collector.guard`) while they are open.

    Args:
        run: the run.
        collectors: those that are available in this run.

    """

    def __init__(self, run: RunContext, collectors: Sequence[Collector]) -> None:
        self._run = run
        self._stack = ExitStack()
        self._guards: list[OnException] = []
        for collector in collectors:
            try:
                on_exception = self._stack.enter_context(collector.guard(run))
            except Exception as error:  # noqa: BLE001 a collector of anybody's must not stop the training
                run.faults.report(collector.name, "enter", None, error)
            else:
                self._guards += [] if on_exception is None else [on_exception]
        self._reserve = _reserve() if self._guards else None

    def end(self, exception: BaseException | None) -> None:
        """Pass an exception to the guards and print the autopsy if memory ran out; close them. Never raises."""
        began = time.perf_counter_ns()
        if self._reserve is not None:
            self._reserve.close()
        try:
            with self._stack:
                described = False
                for on_exception in self._guards:
                    described |= exception is not None and on_exception(exception)
            if described:
                from lightning_memprof.report.oom import print_autopsy

                print_autopsy(self._run.sink.place.directory, self._run.rank, sys.stderr)
        except Exception as error:
            log.warning("the out-of-memory report cannot be shown: %s", type(error).__name__, exc_info=True)
        if (clock := self._run.progress.clock) is not None:
            clock.leave_out(time.perf_counter_ns() - began)
