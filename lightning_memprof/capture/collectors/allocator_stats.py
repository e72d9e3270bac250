"""Statistics of the device's allocator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from lightning_memprof.artifacts.series import AllocatorRow
from lightning_memprof.capture.base import Collector, OnMark, RunContext
from lightning_memprof.capture.sources.memory import memory_stats, without_statistics

if TYPE_CHECKING:
    from lightning_memprof.schedule import Mark, Window


class AllocatorStats(Collector):
    """Every statistic of the device's caching allocator at each mark. Peaks are read, never reset."""

    name: ClassVar[str] = "allocator"
    every_rank: ClassVar[bool] = True

    def unavailable(self, run: RunContext) -> str | None:
        """Return a reason on the CPU and with a CUDAPluggableAllocator, which have no counters."""
        return without_statistics(run.device)

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Sample at every mark."""
        with run.sink.series(window, self.name) as write:

            def sample(mark: Mark) -> None:
                write(mark, AllocatorRow(device=str(run.device)), **memory_stats(run.device))

            yield sample
