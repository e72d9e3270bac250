"""Times of threads as the kernel's scheduler counts them."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns
from typing import Final

from lightning_memprof.artifacts.series import ProcessRow
from lightning_memprof.capture.sources.assignments import is_library
from lightning_memprof.capture.sources.user_hooks import hook_name

# Of a core.
_NOTABLE: Final = 0.05
# The names of this package's threads.
_OURS: Final = "memprof"


class CoreWait:
    """Reads how long the calling thread is ready to run but waits for a core; 1 µs on Linux, from one open file."""

    def __init__(self) -> None:
        try:
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1
        self._before_ns = self._total_ns() or 0

    def read(self) -> int | None:
        """Return the nanoseconds since the previous reading, None where the kernel does not count them."""
        total_ns = self._total_ns()
        if total_ns is None:
            return None
        waited_ns, self._before_ns = total_ns - self._before_ns, total_ns
        return waited_ns

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _total_ns(self) -> int | None:
        if self._fd < 0:
            return None
        ran, waited, _ = os.pread(self._fd, 96, 0).split()
        # A kernel that does not count writes zeros; this thread has run.
        return int(waited) if ran != b"0" else None


class ThreadTimes:
    """Processor time of the program's other threads since the first reading; some 20 µs each."""

    def __init__(self) -> None:
        self._began: tuple[int, int, int] | None = None
        self._first: dict[int, int] = {}

    def read(self) -> list[ProcessRow]:
        """Return the threads that take a notable part of a core."""
        now, (ran, waited) = perf_counter_ns(), _scheduled(threading.get_native_id())
        began = self._began = self._began or (now, ran, waited)
        elapsed, asleep = now - began[0], now - began[0] - (ran - began[1]) - (waited - began[2])
        rows = []
        for thread in threading.enumerate():
            number = thread.native_id
            if number is None or thread is threading.current_thread() or thread.name.startswith(_OURS):
                continue
            ran, _ = _scheduled(number)
            # One that starts later has run for 0 ns.
            spent = ran - self._first.setdefault(number, ran if not elapsed else 0)
            if spent > _NOTABLE * elapsed:
                row = ProcessRow(kind="thread", thread=_named(thread), cpu_ns=spent)
                row.elapsed_ns, row.asleep_ns = elapsed, max(asleep, 0)
                rows.append(row)
        return rows


def _named(thread: threading.Thread) -> str:
    """Return the function of a thread, with its place, or the thread's name if a library started it."""
    function = getattr(thread, "_target", None) or type(thread).run
    code = getattr(function, "__code__", None)
    return thread.name if code is None or is_library(code.co_filename) else hook_name(function)


def _scheduled(thread: int) -> tuple[int, int]:
    """Return how long a thread of this process has run and waited for a core, in ns; 0 where that is unknown."""
    with suppress(OSError, ValueError):
        ran, waited, _ = map(int, Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split())
        return ran, waited
    return 0, 0
