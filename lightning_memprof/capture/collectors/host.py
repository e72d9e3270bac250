"""Memory of this process as the operating system sees it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import psutil

from lightning_memprof.capture.base import Collector, OnMark
from lightning_memprof.capture.sources.memory import peak_rss_bytes
from lightning_memprof.schedule import Point

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

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
    """Write the last row, without the unique size if it cannot be read."""
    uss_bytes = None
    try:
        uss_bytes = unique.result()
    finally:
        row(uss_bytes=uss_bytes)
