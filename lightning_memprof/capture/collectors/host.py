"""Memory of this process as the operating system sees it."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import psutil

from lightning_memprof.capture.base import Collector, OnMark
from lightning_memprof.schedule import Point
from lightning_memprof.units import KIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.schedule import Mark, Window

__all__ = ["HostMemory", "ResidentSize", "peak_rss_bytes"]


class ResidentSize:
    """Reads this process's resident size; about 4 us on Linux, from one open file."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._page_bytes = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
        try:
            self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, AttributeError):
            self._fd = -1

    def read(self) -> int:
        """Return the resident size in bytes."""
        if self._fd < 0:
            return int(self._process.memory_info().rss)
        return int(os.pread(self._fd, 96, 0).split(b" ", 2)[1]) * self._page_bytes

    def close(self) -> None:
        """Release the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def peak_rss_bytes(at_least: int) -> int:
    """Return the highest resident size of this process so far in bytes.

    On Linux it is ``VmHWM`` of ``/proc/self/status``: ``ru_maxrss`` of ``getrusage`` begins with the peak of the
    process that started this one.

    Args:
        at_least: the size that was just read; the kernel updates its peak later than its size.

    """
    if sys.platform == "win32":
        return max(at_least, int(psutil.Process().memory_info().peak_wset))
    if sys.platform == "linux" and (told := _status().partition(b"VmHWM:")[2]):
        return max(at_least, int(told.split(b"kB", 1)[0]) * KIB)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(at_least, peak if sys.platform == "darwin" else peak * KIB)


def _status() -> bytes:
    """Return what Linux says of this process, some 30 us; nothing where /proc is not there."""
    try:
        with open("/proc/self/status", "rb", buffering=0) as file:  # noqa: PTH123 a Path doubles the cost
            return file.read()
    except OSError:
        return b""


class HostMemory(Collector):
    """Resident, unique and virtual size of this process at every mark, and its peak so far.

    The unique size (``uss_bytes``) walks the process's page tables, some 40 to 70 ms a GiB: it is read once a window,
    behind its last step, by a thread, while the other collectors save what they have.
    """

    name: ClassVar[str] = "host"
    every_rank: ClassVar[bool] = True

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Sample at every mark."""
        process = psutil.Process()
        with (
            run.sink.series(window, self.name) as write,
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="memprof-uss") as thread,
            ExitStack() as last,
        ):

            def is_last(mark: Mark) -> bool:
                return mark.point is Point.STEP_END and window.active[-1:] == (mark.step,)

            def sample(mark: Mark) -> None:
                size = process.memory_info()
                row = partial(
                    write, mark, rss_bytes=size.rss, vms_bytes=size.vms, peak_rss_bytes=peak_rss_bytes(size.rss)
                )
                if is_last(mark):
                    unique = thread.submit(lambda: process.memory_full_info().uss)
                    last.callback(_finish, row, unique)
                else:
                    row(uss_bytes=None)

            yield sample


def _finish(row: Callable[..., None], unique: Future[int]) -> None:
    """Write the last row, without the unique size where it cannot be read."""
    uss_bytes = None
    try:
        uss_bytes = unique.result()
    finally:
        row(uss_bytes=uss_bytes)
