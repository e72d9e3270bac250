"""Writes a summary of each window, from which thousands of ranks can be compared."""

from __future__ import annotations

import socket
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Final

from lightning_memprof.analysis.ranks.summary import RankSummary, StepTime, WindowFiles, encode_summary, summarise
from lightning_memprof.artifacts.naming import summary_path
from lightning_memprof.artifacts.sink import Artifact
from lightning_memprof.capture.base import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_memprof.capture.base import OnMark, OnStep, RunContext, StepRecord
    from lightning_memprof.schedule import Window

__all__ = ["RankSummaries"]

# Enough for a mean of what is usual; each costs a third of a microsecond.
_LAST_STEPS: Final = 512


class RankSummaries(Collector):
    """Step times, breakdown, callbacks, memory peaks and collectives of each window, in some kilobytes.

    Every run has it, and it stands first among the collectors: it is left last, so that its background work comes
    after that of the others, whose files it reads.
    """

    name: ClassVar[str] = "rank_summary"
    every_rank: ClassVar[bool] = True

    def __init__(self) -> None:
        self._times: deque[StepTime] = deque(maxlen=_LAST_STEPS)

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:
        """Keep the last steps' times."""
        times = self._times

        def on_step(record: StepRecord) -> None:
            times.append(StepTime(record.step, record.window, record.duration_ns, record.phases_ns))

        yield on_step

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Have the summary written when the window's files are whole."""
        try:
            yield None
        finally:
            times = list(self._times)
            run.in_background(lambda: _write(run, window, times), collector=self.name, window=window)


def _write(run: RunContext, window: Window, times: Sequence[StepTime]) -> None:
    mine = [artifact for artifact in list(run.sink.artifacts) if artifact.window == window.index]
    files = WindowFiles(
        {artifact.collector: artifact.path for artifact in mine if artifact.type == "series"},
        next((artifact.path for artifact in mine if artifact.type == "trace"), None),
    )
    origin = RankSummary(
        rank=run.rank, world_size=run.world_size, host=socket.gethostname(), window=window.index, steps=[]
    )
    path = run.sink.place.directory / summary_path(window.index, run.rank)
    with run.sink.file(Artifact(path, "blob", RankSummaries.name, window.index)) as temporary:
        temporary.write_bytes(encode_summary(summarise(origin, times, files)) + b"\n")
