"""The life of a run on one rank: from ``setup`` to the last file."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from lightning.pytorch import Callback, Trainer

from lightning_memprof.artifacts.naming import regions_name
from lightning_memprof.artifacts.series import PulseRow
from lightning_memprof.artifacts.sink import ArtifactSpec, RunPlace
from lightning_memprof.capture.base import Collector, OnException, RunContext
from lightning_memprof.capture.faults import describe
from lightning_memprof.capture.observe import hide_wrappers, kept_interrupts
from lightning_memprof.capture.session import Session
from lightning_memprof.capture.sources.memory import without_statistics
from lightning_memprof.capture.triggers.watch import TriggerWatch
from lightning_memprof.integration.background import RankSummaries
from lightning_memprof.integration.context import available_collectors, build_context
from lightning_memprof.integration.curves import Curves, curves_of
from lightning_memprof.integration.driver import StepDriver, joined, position_source, stage_actions
from lightning_memprof.integration.facts import training_facts
from lightning_memprof.integration.feeds import ActionTap, TensorFeed
from lightning_memprof.integration.live_runs import Endings
from lightning_memprof.integration.place import release_place
from lightning_memprof.integration.reach import steps_ahead, unreachable
from lightning_memprof.integration.settings import Settings
from lightning_memprof.logs import logger_of
from lightning_memprof.schedule import Schedule
from lightning_memprof.units import MIB, format_count

log = logger_of(__name__)

_INTERRUPTED: Final = "Lightning called neither on_exception nor teardown"
# If many small objects took the last byte, no report could be made. It is never touched: address space only.
_RESERVE_BYTES: Final = 32 * MIB


class Attachment:
    """One run of one stage on one rank.

    Args:
        trainer: in its ``setup``: ranks are known, ``log_dir`` may be read once.
        stage: ``fit``, ``validate``, ``test`` or ``predict``.
        settings: the settings of this rank.
        place: where the files of the run go.
        ours: the type of our adapters, whose hooks are not callbacks of the user.
        owner: the adapter whose run it is.

    Attributes:
        ended_early: called to end the run if no hook of Lightning does, with the reason; None if it finished.

    Raises:
        ConfigError: a collector that the user requires is not available in this run.
    """

    def __init__(
        self,
        trainer: Trainer,
        stage: str,
        settings: Settings,
        place: RunPlace,
        ours: type[Callback],
        owner: Callback,
    ) -> None:
        self.place = place
        self.tensors = TensorFeed(trainer)
        self.trainer = trainer
        self.ended_early: Callable[[str | None], None] = lambda _: None
        self._process = os.getpid()
        self._raised: str | None = None
        self._stage = stage
        self._settings = settings
        self._ours = ours
        self._owner = owner
        self._ended = False
        self._batches_before = 0
        self._interrupts = ExitStack()
        self._tap = ActionTap(trainer.profiler, self.break_off)  # type: ignore[attr-defined]
        context = build_context(trainer, stage, settings, place, self._tap, self.tensors)
        self.run: RunContext = replace(context, pulse_written=self._pulse_written)
        self._curves = curves_of(trainer, stage, settings, self.run.sink, self.run.faults)
        try:
            available = available_collectors(self.run, trainer, settings)
            self.triggers = TriggerWatch(settings.triggers, self.run)
            across = [RankSummaries()] if trainer.world_size > 1 else []
            collectors = [*across, *available]
            self.session = Session(self.run, settings.schedule, collectors, self._window_closed, self.triggers)
            self._oom = _MemoryWatch(self.run, available)
        except BaseException as error:
            self._ended = True
            with ExitStack() as parts:
                parts.callback(release_place, self.run.sink)
                parts.callback(self.run.sink.close)
                self.run.sink.manifest.append("end", status="exception", exception=describe(error), steps=0)
            raise

    @property
    def raises(self) -> bool:
        """Whether failures are raised into the training, for tests."""
        return self._settings.output.on_error == "raise"

    @property
    def wants_report(self) -> bool:
        """Whether the HTML report is written after this run."""
        return self._stage == "fit" and self._settings.output.report

    def start(self) -> None:
        """Start recording: the loop of the stage is about to run, loaders and optimizers are known."""
        trainer, sink = self.trainer, self.run.sink
        if self._stage == "fit":
            facts, missing = training_facts(trainer)
            sink.manifest.append("training", **facts)
            for name, error in missing.items():
                self.run.note_unavailable("training", f"{name} cannot be read ({error})")
        if message := unreachable(trainer, self._stage, self._settings.schedule):
            if self._settings.fits_short_runs:
                message = self._record_every_step(max(steps_ahead(trainer, self._stage) or 0, 1))
            sink.manifest.append("note", collector="schedule", message=message)
            if trainer.is_global_zero:
                log.warning("%s", message)
        position = position_source(trainer, self._stage, self._settings.schedule)
        driver = StepDriver(self.session, stage_actions(trainer, self._stage, self._ours), position)
        endings = Endings(trainer, self._owner, self._loop_raised, self.abandon)
        self._batches_before = self._batches_seen()
        self.session.open()
        self.triggers.start()
        kept = self._interrupts.enter_context(kept_interrupts())
        both = zip(driver.handlers(), endings.handlers(), strict=True)
        starts, stops = (joined(self.session.clock.log, first, second) for first, second in both)
        self._tap.install(starts, stops, kept, self.session.clock.log)

    def _record_every_step(self, steps: int) -> str:
        schedule = Schedule(wait=0, warmup=0, active=steps, repeat=1)
        self._settings = replace(self._settings, schedule=schedule)
        self.session.reschedule(schedule)
        return (
            f"every step is recorded: {self._stage} has {format_count(steps, 'step')}, too few for the default schedule"
        )

    def stop(self, reason: str | None = None) -> None:
        """Stop recording: the loop of the stage has ended."""
        if not self._tap.is_installed:
            return
        self._tap.remove()
        # Saving the last window takes the longest: a Ctrl-C during that is raised when it is saved.
        with self._interrupts:
            self.triggers.stop()
            self.session.close(reason=reason)
        recorded, seen = self.session.facts()["steps"], self._batches_seen() - self._batches_before
        if self._stage == "fit" and recorded < seen // 2:
            profiler = type(self.trainer.profiler).__name__  # type: ignore[attr-defined]
            message = (
                f"{recorded} of {seen} steps were recorded: {profiler} does not call start and stop for every action"
            )
            self.run.sink.manifest.append("note", collector="session", message=message)
            log.warning("%s", message)

    def _batches_seen(self) -> int:
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.ready

    def abandon(self, reason: str | None = None) -> None:
        """End the run because no hook of Lightning does.

        Args:
            reason: why the run did not finish; None is the exception that left the training loop, if there was one.
        """
        # A forked process has a copy of the run.
        if not self._ended and os.getpid() == self._process:
            is_interrupted = self.trainer.state.stopped and not self.trainer.state.finished
            self.ended_early(self._raised or reason or (_INTERRUPTED if is_interrupted else None))

    def __del__(self) -> None:
        """End a run whose Trainer is garbage-collected."""
        if hasattr(self, "run"):
            self.abandon()

    def _loop_raised(self, error: BaseException) -> None:
        # Only the text: the exception would keep the memory of its frames.
        self._raised = describe(error)

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
        if sink.uploads is not None and exception is not None and not isinstance(exception, Exception):
            sink.uploads.hurry()
        try:
            try:
                # First: the frames of the exception still hold the memory.
                self._oom.end(exception)
            finally:
                # A Ctrl-C may end the autopsy.
                self.stop(reason)
            sink.drain()
            if self._curves is not None:
                with self.run.faults.caught(Curves.name, "exit"):
                    self._curves.end()
            named = self.place.directory / regions_name(self.run.rank)
            if named.exists():
                sink.list_artifact(ArtifactSpec(path=named, type="series", collector="snapshots"))
        finally:
            status = "finished" if reason is None else "exception"
            sink.manifest.append("end", status=status, exception=reason, **self.session.facts())
            sink.close()
            if exception is not None:
                hide_wrappers(exception)
        return reason

    def release(self) -> None:
        """Wait until the last files are at the URL of the run, if it has one, and remove the working copy."""
        release_place(self.run.sink)

    def break_off(self, error: Exception) -> None:
        """Stop recording after a failure outside the collectors; training continues."""
        if self.raises:
            raise error
        log.warning("recording failed and is disabled; training continues", exc_info=error)
        self.run.faults.report("session", "mark", None, error)
        with self.run.faults.caught("session", "exit"):
            self.stop(f"recording failed: {describe(error)}")

    def _pulse_written(self, rows: Sequence[PulseRow]) -> None:
        if self._curves is not None and Curves.name not in self.run.faults.disabled:
            with self.run.faults.caught(Curves.name, "hook"):
                device = self.run.device if without_statistics(self.run.device) is None else None
                self._curves.add_rows(rows, device, in_window=self.session.window is not None)

    def _window_closed(self, window: int, steps: Sequence[int], reason: str | None) -> None:
        if self._curves is not None:
            self._curves.window_closed(window, steps)


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
        if (clock := self._run.progress.clock) is not None:
            clock.leave_out(time.perf_counter_ns() - began)
