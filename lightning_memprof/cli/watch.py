"""``lightning-memprof show --watch``: the page of a live run, from its files alone, drawn again as they grow."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_memprof.cli.command import say
from lightning_memprof.errors import ArtifactError, MemprofError

if TYPE_CHECKING:
    from lightning_memprof.report.printers.layout import Line
    from lightning_memprof.report.view import View

# A pulse is written every few seconds: a shorter interval shows nothing new.
INTERVAL_SECONDS: Final = 2.0
# The analysis reads the whole pulse: it is repeated when the run is half as long again, so that each row is read three
# times at most.
GROWTH: Final = 1.5


def watch(target: str, page: Callable[..., list[Line]]) -> int:
    """Show a run until it ends, is silent for minutes, or Ctrl-C, and then its page; return the exit code.

    In a terminal the page is drawn again at each update, elsewhere an update is one line. Reads only the run's files,
    and of these mostly new rows: it works on another node of a shared file system.

    Args:
        target: a log directory, its memprofiler directory, or a parent directory, which means its newest run.
        page: lays out a document in a width.

    Raises:
        ArtifactError: there is no run, it is unreadable, or at a URL.
    """
    from lightning_memprof.artifacts.remote import is_url
    from lightning_memprof.read.run.locate import find_run
    from lightning_memprof.report.printers.terminal import Display, page_width, print_page
    from lightning_memprof.report.printers.values import clean, words_text
    from lightning_memprof.report.sections import run_document
    from lightning_memprof.report.sections.live import live_line

    if is_url(target):
        raise ArtifactError(f"{target}: a run at a URL has its files only when it has ended; omit --watch")
    watcher, display, file = _Watcher(find_run(Path(target)).directory), Display(sys.stdout), sys.stdout
    view = watcher.update()
    try:
        with suppress(KeyboardInterrupt):
            while view.live is not None:
                if file.isatty():
                    display.show(page(run_document(view), page_width(file)))
                else:
                    say(clean(words_text(live_line(view.live))))
                time.sleep(INTERVAL_SECONDS)
                view = watcher.update()
    finally:
        # The whole page: the terminal may have had too few rows.
        display.clear()
        print_page(page, run_document(view), file)
    return 0


class _Watcher:
    """A run directory, the new rows of its files, and the last analysis."""

    def __init__(self, directory: Path) -> None:
        from lightning_memprof.read.run.following import Follower

        self._follower = Follower(directory)
        self._view: View | None = None
        self._steps = 0
        self._seen: object = None

    def update(self) -> View:
        """Read new rows, and analyse the run again where there are enough of them."""
        from msgspec.structs import replace

        from lightning_memprof.report.live import live_now

        follower = self._follower
        follower.look()
        steps = follower.lead.steps
        windows = sum(window.is_closed for window in follower.lead.windows.values())
        seen = (windows, sum(rank.reports for rank in follower.ranks.values()), follower.has_ended)
        if self._view is None or steps > GROWTH * self._steps or seen != self._seen:
            self._steps, self._seen = steps, seen
            self._view = self._analysed()
        return replace(self._view, live=live_now(follower))

    def _analysed(self) -> View:
        from lightning_memprof.read.run.load import load_run
        from lightning_memprof.report.summary import MAX_PULSE_BYTES, brief_view

        try:
            return brief_view(load_run(self._follower.directory, max_pulse_bytes=MAX_PULSE_BYTES))
        except MemprofError:
            # A file is being written: it is readable at the next update.
            if self._view is None:
                raise
            return self._view
