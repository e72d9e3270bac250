"""Watches one run of a Trainer for memory that runs out, and says on standard error what it was."""

from __future__ import annotations

import logging
import mmap
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from lightning_memprof.capture.collectors.oom import OomWatch, OutOfMemory
from lightning_memprof.units import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprof.capture.base import Collector, RunContext
    from lightning_memprof.capture.session import Session

__all__ = ["MemoryWatch", "watch_memory"]

log = logging.getLogger(__name__)

# Where many small objects took the last byte, nothing could be said of it. Never touched, it is only address space.
_RESERVE_BYTES: Final = 32 * MIB


def _reserve() -> mmap.mmap | None:
    """Take address space that can be given back when memory ran out; None where the system does not give it."""
    if sys.platform == "win32":
        return None
    try:
        return mmap.mmap(-1, _RESERVE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError):
        return None


class MemoryWatch:
    """A run's :class:`~lightning_memprof.capture.collectors.oom.OomWatch` while it is open.

    Args:
        run: the run.
        session: its session.
        watch: None where nobody watches.
        held: what ends the watch.

    """

    def __init__(self, run: RunContext, session: Session, watch: OomWatch | None, held: ExitStack) -> None:
        self._run = run
        self._session = session
        self._watch = watch
        self._held = held
        self._reserve = None if watch is None else _reserve()

    def end(self, exception: BaseException | None) -> None:
        """End the watch; where memory ran out, write it down and print the autopsy. Never raises."""
        began = time.perf_counter_ns()
        if self._reserve is not None:
            self._reserve.close()
        try:
            with self._held:
                event = None if self._watch is None or exception is None else self._watch.ended_by(exception)
            if event is not None:
                from lightning_memprof.report.oom import print_autopsy

                print_autopsy(self._run.sink.place.directory, self._run.rank, sys.stderr)
        except Exception as error:
            log.warning("the out-of-memory report cannot be shown: %s", type(error).__name__, exc_info=True)
        self._session.clock.leave_out(time.perf_counter_ns() - began)


def watch_memory(run: RunContext, session: Session, collectors: Sequence[Collector]) -> MemoryWatch:
    """Begin to watch, where one of the collectors is :class:`~lightning_memprof.capture.collectors.oom.OutOfMemory`."""
    held = ExitStack()
    collector = next((collector for collector in collectors if isinstance(collector, OutOfMemory)), None)
    watch = None if collector is None else held.enter_context(collector.watch(run, session))
    return MemoryWatch(run, session, watch, held)
