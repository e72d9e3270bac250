"""``lightning-memprof watch``: a run as it goes on, from its files alone."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings import Facts, Severity, examine, shown_path
from lightning_memprof.analysis.run.following import Follower
from lightning_memprof.analysis.run.load import load_run
from lightning_memprof.analysis.run.locate import find_run
from lightning_memprof.artifacts.upload import is_url
from lightning_memprof.errors import ArtifactError, ConfigError, MemprofError
from lightning_memprof.report.watching import SILENT_NS, Watched, watch_line, watch_page

if TYPE_CHECKING:
    from rich.text import Text

    from lightning_memprof.analysis.findings import Finding
    from lightning_memprof.report.memory_tables import Line

__all__ = ["watch"]

# A pulse is written every few seconds: looking more often shows nothing new.
INTERVAL_SECONDS: Final = 2.0
# The rules see the whole pulse: they are asked again when the run is half as long again, so that each row is read
# three times at most.
GROWTH: Final = 1.5
MAX_PULSE_BYTES: Final = 64 << 20
WIDTH: Final = 80


def watch(run: str, *, interval: float = INTERVAL_SECONDS, once: bool = False) -> int:
    """Show a run while it goes on, until it ends or Ctrl-C: a page in a terminal, else a line for each look.

    Only its files are read, so that it may run on another node of a shared file system, and only what is new in them.

    Args:
        run: a log directory, its memprofiler directory, or a parent directory with one run in it.
        interval: seconds between two looks.
        once: look once, print the page, and end.

    Returns:
        The exit code.

    Raises:
        ArtifactError: there is no run, there are several, or it lies at a URL.
        ConfigError: the interval is not above 0.

    """
    if not interval > 0:
        raise ConfigError(f"--interval {interval:g}: must be above 0 seconds")
    if is_url(run):
        raise ArtifactError(f"{run}: a run at a URL cannot be watched, its files are there at its end; use show then")
    place = Path(run)
    watcher = _Watcher(find_run(place).directory)
    with suppress(KeyboardInterrupt):
        if once:
            _print_page(watcher.look())
        elif sys.stdout.isatty():
            _live(watcher, interval)
        else:
            _lines(watcher, interval)
    return 0


class _Watcher:
    """A run, and what the rules found in it."""

    def __init__(self, directory: Path) -> None:
        self.follower = Follower(directory)
        self._name = shown_path(directory)
        self._findings: tuple[Finding, ...] = ()
        self._asked_at = 0
        self._asked_windows = 0

    def look(self) -> Watched:
        """Read what is new, and ask the rules where there is enough of it."""
        self.follower.look()
        lead = self.follower.lead
        windows = sum(window.closed for window in lead.windows.values())
        is_longer = lead.steps > GROWTH * self._asked_at
        if is_longer or windows > self._asked_windows or (self.follower.has_ended and lead.steps != self._asked_at):
            self._asked_at, self._asked_windows = lead.steps, windows
            self._findings = self._ask()
        return Watched(self._name, self.follower, self._findings, time.time_ns())

    def _ask(self) -> tuple[Finding, ...]:
        try:
            found = examine(Facts.of(load_run(self.follower.directory, max_pulse_bytes=MAX_PULSE_BYTES)))
        except MemprofError:
            # A file that is just being written; it is there at the next look.
            return self._findings
        return tuple(request for request in found if request.severity is not Severity.NONE)


def _print_page(watched: Watched) -> None:
    from rich.console import Console

    console = Console()
    width = min(console.width, WIDTH)
    for line in watch_page(watched, width, ascii_only=console.options.ascii_only):
        console.print(_text(line), soft_wrap=True, highlight=False)


def _live(watcher: _Watcher, interval: float) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    console = Console()

    def page(watched: Watched) -> Group:
        lines = watch_page(watched, min(console.width, WIDTH), ascii_only=console.options.ascii_only)
        return Group(*(_text(line) for line in lines))

    with Live(page(watcher.look()), console=console, auto_refresh=False) as live:
        while not watcher.follower.has_ended and not _is_gone(watcher.follower):
            time.sleep(interval)
            live.update(page(watcher.look()), refresh=True)


def _lines(watcher: _Watcher, interval: float) -> None:
    said: set[str] = set()
    while True:
        watched = watcher.look()
        print(watch_line(watched), flush=True)
        for finding in watched.findings:
            if finding.rule not in said:
                said.add(finding.rule)
                print(f"  {finding.severity.name.lower()}: {finding.sentence}", flush=True)
        if watcher.follower.has_ended or _is_gone(watcher.follower):
            return
        time.sleep(interval)


def _text(line: Line) -> Text:
    from rich.text import Text

    return Text.assemble(*line)


def _is_gone(follower: Follower) -> bool:
    """Say whether the leading rank ran on this machine, has written no end, and its process is not there any more."""
    import socket

    lead = follower.lead
    facts = lead.facts or {}
    pid = facts.get("pid")
    last = lead.last_ns or facts.get("time_ns")
    if lead.end is not None or facts.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    # Another container may have this host's name and other numbers: only where nothing comes any more either.
    if not isinstance(last, int) or time.time_ns() - last < SILENT_NS:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
