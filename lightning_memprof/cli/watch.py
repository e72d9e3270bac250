"""``lightning-memprof watch``: a live page of a running job, from its files alone."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.cli.command import RUN_HELP, Command, say
from lightning_memprof.errors import ArtifactError, ConfigError, MemprofError

if TYPE_CHECKING:
    from lightning_memprof.account.ledger.model import TimeLedger
    from lightning_memprof.judge import Finding
    from lightning_memprof.read.run.following import Follower
    from lightning_memprof.report.sections.live import Watched

# A pulse is written every few seconds: a shorter interval shows nothing new.
INTERVAL_SECONDS: Final = 2.0
# Findings read the whole pulse: they are computed again when the run is half as long again, so that each row is read
# three times at most.
GROWTH: Final = 1.5
MAX_PULSE_BYTES: Final = 64 << 20
WIDTH: Final = 80


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("RUN", help=RUN_HELP)
    parser.add_argument(
        "--interval", type=float, default=INTERVAL_SECONDS, metavar="S", help="seconds between updates (default: 2.0)"
    )
    parser.add_argument("--once", action="store_true", help="print the page once and exit")


def _execute(options: Namespace) -> int:
    """Show a run until it ends or Ctrl-C: a live page in a terminal, else one line per update.

    Reads only the run's files, and of these only new rows: it works on another node of a shared file system.
    """
    from lightning_memprof.artifacts.remote import is_url
    from lightning_memprof.read.run.locate import find_run

    if not options.interval > 0:
        raise ConfigError(f"--interval {options.interval:g}: must be above 0 seconds")
    if is_url(options.RUN):
        raise ArtifactError(f"{options.RUN}: a run at a URL has its files only when it has ended; use show then")
    watcher = _Watcher(find_run(Path(options.RUN)).directory)
    with suppress(KeyboardInterrupt):
        if options.once:
            _print_page(watcher.update())
        elif sys.stdout.isatty():
            _live(watcher, options.interval)
        else:
            _lines(watcher, options.interval)
    return 0


class _Watcher:
    """A run and its findings."""

    def __init__(self, directory: Path) -> None:
        from lightning_memprof.read.run.following import Follower
        from lightning_memprof.read.run.locate import shown_path

        self.follower = Follower(directory)
        self._name = shown_path(directory)
        self._ledger: TimeLedger | None = None
        self._findings: tuple[Finding, ...] = ()
        self._examined_steps = 0
        self._examined_windows = self._examined_reports = 0

    def update(self) -> Watched:
        """Read new rows, and compute the findings again where there are enough of them."""
        from lightning_memprof.report.sections.live import Watched

        self.follower.look()
        lead = self.follower.lead
        windows = sum(window.closed for window in lead.windows.values())
        is_longer = lead.steps > GROWTH * self._examined_steps
        has_ended = self.follower.has_ended and lead.steps != self._examined_steps
        reports = sum(rank.reports for rank in self.follower.ranks.values())
        if is_longer or windows > self._examined_windows or has_ended or reports > self._examined_reports:
            self._examined_steps, self._examined_windows, self._examined_reports = lead.steps, windows, reports
            self._examine()
        return Watched(
            name=self._name,
            follower=self.follower,
            now_ns=time.time_ns(),
            ledger=self._ledger,
            findings=self._findings,
        )

    def _examine(self) -> None:
        from lightning_memprof.judge import Facts, Severity, examine
        from lightning_memprof.read.run.load import load_run

        with suppress(MemprofError):  # a file is being written; it is readable at the next update
            facts = Facts.of(load_run(self.follower.directory, max_pulse_bytes=MAX_PULSE_BYTES))
            self._ledger = facts.ledgers.get(facts.run.lead.rank)
            self._findings = tuple(found for found in examine(facts) if found.severity is not Severity.NONE)


def _print_page(watched: Watched) -> None:
    from lightning_memprof.report.printers.terminal import print_page
    from lightning_memprof.report.printers.text import sections_page
    from lightning_memprof.report.sections.live import live_document

    print_page(sections_page, live_document(watched), width=WIDTH)


def _live(watcher: _Watcher, interval: float) -> None:
    from lightning_memprof.report.printers.terminal import Display, ascii_only, page_width
    from lightning_memprof.report.printers.text import sections_page
    from lightning_memprof.report.sections.live import live_document

    display, file = Display(sys.stdout), sys.stdout
    watched = watcher.update()
    try:
        while True:
            page = live_document(watched)
            display.show(sections_page(page, page_width(file, WIDTH), ascii_only=ascii_only(file)))
            if watcher.follower.has_ended or _is_gone(watcher.follower):
                return
            time.sleep(interval)
            watched = watcher.update()
    finally:
        # The whole page: the terminal may have had too few rows.
        display.clear()
        _print_page(watched)


def _lines(watcher: _Watcher, interval: float) -> None:
    from lightning_memprof.report.printers.values import clean, words_text
    from lightning_memprof.report.sections.live import live_line

    printed: set[str] = set()
    while True:
        watched = watcher.update()
        say(clean(words_text(live_line(watched))))
        for finding in watched.findings:
            if finding.rule not in printed:
                printed.add(finding.rule)
                say(f"  {finding.severity.name.lower()}: {finding.title}")
        if watcher.follower.has_ended or _is_gone(watcher.follower):
            return
        time.sleep(interval)


def _is_gone(follower: Follower) -> bool:
    """Return whether the process of the leading rank is gone from this machine without having written an end."""
    import socket

    from lightning_memprof.report.sections.live import SILENT_NS

    lead = follower.lead
    facts = lead.facts
    if facts is None or lead.end is not None or facts.host != socket.gethostname() or (facts.pid or 0) <= 0:
        return False
    last = lead.last_ns or facts.time_ns
    # Another container may have the same host name and other process ids: only where no rows arrive either.
    if last is None or time.time_ns() - last < SILENT_NS:
        return False
    try:
        os.kill(facts.pid or 0, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


COMMAND: Final = Command(
    summary="watch a running job",
    description="Watch a running job through its files; also from another node.",
    add_options=_add_options,
    execute=_execute,
)
