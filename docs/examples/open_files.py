"""A collector: the number of open file descriptors, sampled at every mark of a window."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from lightning_memprof import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof import Mark, OnMark, RunContext
    from lightning_memprof.schedule import Window

DESCRIPTORS = Path("/proc/self/fd")


class OpenFiles(Collector):
    """Open file descriptors of the training process.

    Args:
        minimum: record only samples with at least this many descriptors.

    """

    name: ClassVar[str] = "open_files"

    def __init__(self, minimum: int = 0) -> None:
        self.minimum = minimum

    def unavailable(self, run: RunContext) -> str | None:
        """Return why this machine cannot record; None where it can."""
        return None if DESCRIPTORS.is_dir() else f"{DESCRIPTORS} does not exist on this system"

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Write one row per mark to the series ``open_files``."""
        with run.sink.series(window, self.name) as write:

            def sample(mark: Mark) -> None:
                count = len(list(DESCRIPTORS.iterdir()))
                if count >= self.minimum:
                    write(mark, open_files=count)

            yield sample
