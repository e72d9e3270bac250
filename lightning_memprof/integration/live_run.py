"""A live run of one stage on one rank, driven by a Trainer or by a loop of the program."""

from __future__ import annotations

import atexit
import mmap
import os
import sys
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final
from weakref import WeakSet

from lightning_memprof.artifacts.manifest import EndRow, NoteRow, UnavailableRow
from lightning_memprof.artifacts.naming import regions_name
from lightning_memprof.artifacts.sink import ArtifactSpec
from lightning_memprof.artifacts.upload import HURRY_S, PATIENCE_S
from lightning_memprof.capture.base import Collector, OnException, RunContext, no_training_step
from lightning_memprof.capture.faults import describe
from lightning_memprof.capture.observe import hide_wrappers
from lightning_memprof.capture.session import Session
from lightning_memprof.capture.triggers.watch import TriggerWatch
from lightning_memprof.errors import ConfigError
from lightning_memprof.integration.background import RankSummaries
from lightning_memprof.integration.facts import Launch, run_facts
from lightning_memprof.integration.place import release_place
from lightning_memprof.integration.settings import Settings, choice_note
from lightning_memprof.logs import logger_of
from lightning_memprof.units import MIB

log = logger_of(__name__)

_EXITED: Final = "the process exited during the run"
# If many small objects took the last byte, no report could be made. It is never touched: address space only.
_RESERVE_BYTES: Final = 32 * MIB


class LiveRun:
    """A run while it is recorded: its session, its triggers, and its end.

    Args:
        run: the run, as collectors see it.
        settings: the settings of this rank.
        launch: how this rank was started.

    Attributes:
        settings: the settings; their schedule changes where the run is too short for it.

    Raises:
        ConfigError: a collector that the user requires is not available in this run.
    """

    def __init__(self, run: RunContext, settings: Settings, launch: Launch) -> None:
        self.run = run
        self.place = run.sink.place
        self.settings = settings
        self._process = os.getpid()
        self._ended = False
        self._patience_s = PATIENCE_S
        try:
            available = available_collectors(run, settings, launch)
            self.triggers = TriggerWatch(settings.triggers, run)
            collectors = [*([RankSummaries()] if run.world_size > 1 else []), *available]
            self.session = Session(run, settings.schedule, collectors, self._window_closed, self.triggers)
            self._oom = _MemoryWatch(run, available)
        except BaseException as error:
            self._ended = True
            with ExitStack() as parts:
                parts.callback(release_place, run.sink)
                parts.callback(run.sink.close)
                parts.callback(run.resident.close)
                run.sink.manifest.append(EndRow(status="exception", exception=describe(error), steps=0))
            raise

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether the Trainer or the loop has ended, even if the recording has not."""

    @abstractmethod
    def abandon(self, reason: str | None = None) -> None:
        """End the run because nothing else does; ``reason`` is why it did not finish, None if it did."""

    @abstractmethod
    def stop(self, reason: str | None = None) -> None:
        """Stop recording: the loop has ended."""

    def _drained(self) -> None:
        """Called when all files of the windows are written; for overriding."""

    @property
    def is_here(self) -> bool:
        """Whether the run has not ended and is this process's: a forked one has a copy."""
        return not self._ended and os.getpid() == self._process

    def end(self, exception: BaseException | None = None, reason: str | None = None) -> str | None:
        """Finish every file, once; nothing is written afterwards.

        Args:
            exception: the exception that ended the run, if any.
            reason: why the run did not finish, if there is no exception.

        Returns:
            Why the run did not finish; None if it finished.
        """
        if exception is not None:
            reason = describe(exception)
        if self._ended:
            return reason
        self._ended = True
        sink = self.run.sink
        if exception is not None and not isinstance(exception, Exception):
            self._patience_s = HURRY_S
        try:
            try:
                # First: the frames of the exception still hold the memory.
                self._oom.end(exception)
            finally:
                # A Ctrl-C may end the autopsy.
                self.stop(reason)
            sink.drain()
            self._drained()
            named = self.place.directory / regions_name(self.run.rank)
            if named.exists():
                sink.list_artifact(ArtifactSpec(path=named, type="series", collector="snapshots"))
        finally:
            row = self.session.facts()
            row.status, row.exception = "finished" if reason is None else "exception", reason
            sink.manifest.append(row)
            sink.close()
            if exception is not None:
                hide_wrappers(exception)
        return reason

    def release(self) -> None:
        """Wait until the last files are at the URL of the run, if it has one, and remove the working copy."""
        release_place(self.run.sink, self._patience_s)

    def _window_closed(self, *_: object) -> None:
        if self.run.sink.uploads is not None:
            self.run.sink.in_background(self._copy)

    def _copy(self) -> None:
        if (uploads := self.run.sink.uploads) is not None:
            uploads.copy(self.run.sink.files)


# One per process, as is the state that a live run changes: torch's profiler, wrapped methods, signal handlers.
LIVE: Final[WeakSet[LiveRun]] = WeakSet()


@atexit.register
def _end_all() -> None:
    for run in tuple(LIVE):
        run.abandon(None if run.is_over() else _EXITED)


def available_collectors(run: RunContext, settings: Settings, launch: Launch) -> list[Collector]:
    """Return the collectors that are available, and write the facts of the run to the manifest.

    Raises:
        ConfigError: a collector that the user requires is not available.
    """
    manifest = run.sink.manifest
    reasons = [(collector, asked, _unavailable(collector, run)) for collector, asked in settings.collectors]
    available = [collector for collector, _, reason in reasons if reason is None]
    manifest.append(
        "run",
        **run_facts(run, settings.schedule, available, launch),
        every_collector=settings.every_collector,
        triggers=settings.triggers.file,
        operator_table=settings.table.chosen(),
    )
    if run.rank == 0 and (note := choice_note(settings.ranks, run.world_size)):
        manifest.append(NoteRow(collector="ranks", message=note))
    missing = [(collector, asked, reason) for collector, asked, reason in reasons if reason is not None]
    # A collector for the fit must not stop the test after it.
    wrong = [(collector, why) for collector, asked, why in missing if asked and why != no_training_step(run)]
    if refused := [f"{type(collector).__name__} ({why})" for collector, why in wrong]:
        raise ConfigError(f"not available in this run: {', '.join(refused)}; remove it from `collectors`")
    for collector, _, reason in missing:
        manifest.append(UnavailableRow(collector=collector.name, reason=reason))
        if run.rank == 0:
            # The page has it in its notes; most machines lack something.
            log.debug("%s: collector %s is disabled", reason, collector.name)
    return available


def _unavailable(collector: Collector, run: RunContext) -> str | None:
    with run.faults.caught(collector.name, "enter"):
        return collector.unavailable(run)
    return None


def _reserve() -> mmap.mmap | None:
    """Return reserved address space to release when memory has run out; None if the system refuses it."""
    try:
        return mmap.mmap(-1, _RESERVE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError):
        return None


class _MemoryWatch:
    """A run's guards (:meth:`Collector.guard`) while they are open.

    Args:
        run: the run.
        collectors: those that are available in this run.
    """

    def __init__(self, run: RunContext, collectors: Sequence[Collector]) -> None:
        self._run = run
        self._stack = ExitStack()
        self._guards: list[OnException] = []
        for collector in collectors:
            with run.faults.caught(collector.name, "enter"):
                on_exception = self._stack.enter_context(collector.guard(run))
                self._guards += [] if on_exception is None else [on_exception]
        self._reserve = _reserve() if self._guards else None

    def end(self, exception: BaseException | None) -> None:
        """Pass an exception to the guards and print the autopsy if memory ran out; close them. Never raises."""
        began = time.perf_counter_ns()
        if self._reserve is not None:
            self._reserve.close()
        try:
            with self._stack:
                described = False
                for on_exception in self._guards:
                    described |= exception is not None and on_exception(exception)
            if described:
                from lightning_memprof.report.summary import print_autopsy

                print_autopsy(self._run.sink.place.directory, self._run.rank, sys.stderr)
        except Exception as error:
            log.warning("the out-of-memory report cannot be shown: %s", type(error).__name__, exc_info=True)
        self._run.clock.leave_out(time.perf_counter_ns() - began)
