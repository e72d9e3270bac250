"""Results that are made beside or after the training: rank summaries, the HTML report and the page."""

from __future__ import annotations

import socket
import subprocess
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Final, Literal, TextIO

from lightning_memprof.account.ranks.summary import RankSummary, StepTime, encode_summary, summarise
from lightning_memprof.artifacts.naming import summary_path
from lightning_memprof.artifacts.own_program import own_program
from lightning_memprof.artifacts.sink import ArtifactSpec, RunPlace
from lightning_memprof.capture.base import Collector, OnMark, OnStep, RunContext, StepRecord
from lightning_memprof.errors import MemprofError
from lightning_memprof.logs import logger_of
from lightning_memprof.report.summary import print_summary
from lightning_memprof.report.written import PAGE_NAME
from lightning_memprof.units import quoted

if TYPE_CHECKING:
    from lightning_memprof.schedule import Window

log = logger_of(__name__)

# Enough steps for a typical step time.
_LAST_STEPS: Final = 512
# Without our pipes, whose end a caller waits for, and without the terminal, whose Ctrl-C is not for this process. The
# shell exits at once: the process is not our child, may outlive the training, and leaves no zombie.
_DETACHED: Final = '"$@" </dev/null >/dev/null 2>&1 &'
_START_SECONDS: Final = 5


class RankSummaries(Collector):
    """A summary of each window, some kilobytes, from which thousands of ranks can be compared.

    It has step times, their breakdown, callbacks, memory peaks and collectives. Runs of several ranks have it as their
    first collector: it exits last, so that its background work follows that of the others, whose files it reads.
    """

    name: ClassVar[str] = "rank_summary"
    every_rank: ClassVar[bool] = True

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=_LAST_STEPS)

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:
        """Keep the last steps."""
        yield self._records.append

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Write the summary in the background when the files of the window are complete."""
        try:
            yield None
        finally:
            times = [StepTime(each.step, each.window, each.duration_ns, each.phases_ns) for each in self._records]
            run.in_background(lambda: _write_summary(run, window, times), collector=self.name, window=window)


def _write_summary(run: RunContext, window: Window, times: Sequence[StepTime]) -> None:
    own = [artifact for artifact in list(run.sink.artifacts) if artifact.window == window.index]
    series = {artifact.collector: artifact.path for artifact in own if artifact.type == "series"}
    trace = next((artifact.path for artifact in own if artifact.type == "trace"), None)
    origin = RankSummary(
        rank=run.rank, world_size=run.world_size, host=socket.gethostname(), window=window.index, steps=[]
    )
    path = run.sink.place.directory / summary_path(window.index, run.rank)
    with run.sink.file(
        ArtifactSpec(path=path, type="blob", collector=RankSummaries.name, window=window.index)
    ) as temporary:
        temporary.write_bytes(encode_summary(summarise(origin, times, series, trace)) + b"\n")


def start_report(place: RunPlace) -> bool:
    """Start a process that writes the HTML report of a finished run; takes some milliseconds.

    The process writes an error to ``report.log`` in the same directory.

    Returns:
        Whether it was started: not for a run at a URL, whose working copy is about to be removed.
    """
    if place.url is not None:
        log.info("write the HTML report with: lightning-memprof report %s", quoted(place.location))
        return False
    try:
        command = own_program("lightning_memprof.report.written", str(place.directory.absolute()))
        subprocess.run(
            ["/bin/sh", "-c", _DETACHED, "sh", *command],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            timeout=_START_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning(
            "the HTML report cannot be written (%s); write it with: lightning-memprof report %s",
            error,
            quoted(place.location),
        )
        return False
    log.info("HTML report: %s (being written)", place.directory / PAGE_NAME)
    return True


def print_page(place: RunPlace, summary: bool | Literal["line"], file: TextIO | None) -> None:
    """Print the page of a finished run, or a line, as :class:`OutputOptions` says; a failure is a line of the log."""
    where = place.location
    if not summary:
        log.info("recorded in %s; show it with: lightning-memprof show %s", where, quoted(where))
        return
    try:
        print_summary(place.directory, file, url=place.url, is_line=summary == "line")
    except (MemprofError, OSError) as error:
        log.warning("the summary cannot be shown: %s", error)
