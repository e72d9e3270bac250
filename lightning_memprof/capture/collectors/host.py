"""Memory of this process as the operating system sees it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, ClassVar

import psutil

from lightning_memprof.artifacts.series import HostRow
from lightning_memprof.capture.base import Collector, OnMark
from lightning_memprof.capture.sources.memory import peak_rss_bytes
from lightning_memprof.schedule import Point

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.schedule import Mark, Window

__all__ = ["HostMemory"]


class HostMemory(Collector):
    """Resident, unique and virtual size of this process at every mark, and its peak RSS.

    The unique size (``uss_bytes``) walks the process's page tables, some 40 to 70 ms per GiB: a thread reads it once
    a window, after the last step, while the other collectors save their data.
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

            def sample(mark: Mark) -> None:
                size = process.memory_info()
                row = HostRow(rss_bytes=size.rss, vms_bytes=size.vms, peak_rss_bytes=peak_rss_bytes(size.rss))
                write(mark, row)
                if mark.point is Point.STEP_END and window.active[-1:] == (mark.step,):
                    unique = thread.submit(lambda: int(process.memory_full_info().uss))
                    last.callback(lambda: setattr(row, "uss_bytes", unique.result()))

            yield sample
