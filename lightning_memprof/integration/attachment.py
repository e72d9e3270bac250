"""The life of a run on one rank: from ``setup`` to the last file.

Lightning calls neither ``on_exception`` nor ``teardown`` of a callback that the program has removed, nor where another
callback raises in ``on_exception``. Some of these ends show in the Trainer's actions; the other runs are ended by the
next event: a Trainer is made or set up, the Trainer is garbage, or the process exits.
"""

from __future__ import annotations

import atexit
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final
from weakref import WeakSet

from lightning.pytorch import Callback, Trainer

from lightning_memprof.artifacts.manifest import EndRow, NoteRow, UnavailableRow
from lightning_memprof.artifacts.naming import regions_name
from lightning_memprof.artifacts.series import LIGHTNING_PROFILER, PulseRow
from lightning_memprof.artifacts.sink import ArtifactSpec, RunPlace, Sink
from lightning_memprof.artifacts.upload import HURRY_S, PATIENCE_S
from lightning_memprof.capture.base import Collector, OnException, RunContext, no_training_step
from lightning_memprof.capture.budget import Ledger
from lightning_memprof.capture.clock import device_timer
from lightning_memprof.capture.faults import Faults, describe
from lightning_memprof.capture.observe import hide_wrappers, kept_interrupts
from lightning_memprof.capture.session import Session
from lightning_memprof.capture.sources.memory import without_statistics
from lightning_memprof.capture.triggers.watch import TriggerWatch
from lightning_memprof.errors import ConfigError
from lightning_memprof.integration.background import RankSummaries
from lightning_memprof.integration.curves import Curves, curves_of
from lightning_memprof.integration.driver import (
    Handlers,
    StepDriver,
    joined,
    position_source,
    stage_actions,
    stage_function,
    steps_ahead,
    unreachable,
)
from lightning_memprof.integration.facts import peak_flops, run_facts, training_facts
from lightning_memprof.integration.feeds import ActionTap, TensorFeed, unprofiled_parts
from lightning_memprof.integration.place import release_place
from lightning_memprof.integration.settings import Settings, choice_note, group_timeout_seconds
from lightning_memprof.logs import logger_of
from lightning_memprof.packages import lightning_class
from lightning_memprof.schedule import Schedule
from lightning_memprof.units import MIB, format_count

log = logger_of(__name__)

_INTERRUPTED: Final = "Lightning called neither on_exception nor teardown"
_EXITED: Final = "the process exited during the run"
# If many small objects took the last byte, no report could be made. It is never touched: address space only.
_RESERVE_BYTES: Final = 32 * MIB


# One per process, as is the state that a live run changes: torch's profiler, wrapped methods, signal handlers.
LIVE: Final[WeakSet[Attachment]] = WeakSet()


def end_abandoned(trainer: Trainer | None = None) -> None:
    """End the live runs whose Trainer is over, and those of ``trainer``, which begins another."""
    for run in tuple(LIVE):
        if run.trainer is trainer or run.trainer.state.stopped:
            run.abandon()


@atexit.register
def _end_all() -> None:
    for run in tuple(LIVE):
        run.abandon(None if run.trainer.state.stopped else _EXITED)


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
        settings: the settings; their schedule changes where the run is too short for it.
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
        self._handled: BaseException | None = None
        # For each epoch that runs: a search of a Tuner has one inside another, with callbacks of its own.
        self._had_owner: list[bool] = []
        self.settings = settings
        self._ours = ours
        self._owner = owner
        self._ended = False
        self._patience_s = PATIENCE_S
        self._interrupts = ExitStack()
        self._tap = ActionTap(trainer.profiler, self.break_off)  # type: ignore[attr-defined]
        sink, device = Sink(place, trainer.global_rank), trainer.strategy.root_device
        self.run = RunContext(
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            stage=stage,
            function=stage_function(stage),
            strategy=type(trainer.strategy).__name__,
            device=device,
            model=trainer.lightning_module,
            actions=self._tap,
            training=self.tensors,
            sink=sink,
            faults=Faults(sink.manifest, settings.output.on_error),
            timer=device_timer(device),
            peak_flops=peak_flops(trainer),
            ledger=Ledger(settings.budget, group_timeout_seconds(trainer)),
            parts=lambda: unprofiled_parts(trainer, stage),
            pulse_written=self._pulse_written,
            profiler_conflict=_profiler_conflict(trainer.profiler),  # type: ignore[attr-defined]
        )
        self._curves = curves_of(trainer, stage, settings, self.run.sink)
        try:
            available = available_collectors(self.run, trainer, settings)
            self.triggers = TriggerWatch(settings.triggers, self.run)
            collectors = [*([RankSummaries()] if trainer.world_size > 1 else []), *available]
            self.session = Session(self.run, settings.schedule, collectors, self._window_closed, self.triggers)
            self._oom = _MemoryWatch(self.run, available)
        except BaseException as error:
            self._ended = True
            with ExitStack() as parts:
                parts.callback(release_place, self.run.sink)
                parts.callback(self.run.sink.close)
                parts.callback(self.run.resident.close)
                self.run.sink.manifest.append(EndRow(status="exception", exception=describe(error), steps=0))
            raise

    def start(self) -> None:
        """Start recording: the loop of the stage is about to run, loaders and optimizers are known."""
        trainer, sink = self.trainer, self.run.sink
        if self.run.stage == "fit":
            facts, missing = training_facts(trainer)
            sink.manifest.append("training", **facts)
            for name, error in missing.items():
                self.run.note_unavailable("training", f"{name} cannot be read ({error})")
        if message := unreachable(trainer, self.run.stage, self.settings.schedule):
            if self.settings.fits_short_runs:
                message = self._record_every_step(max(steps_ahead(trainer, self.run.stage) or 0, 1))
            sink.manifest.append(NoteRow(collector="schedule", message=message))
            if trainer.is_global_zero:
                log.warning("%s", message)
        position = position_source(trainer, self.run.stage, self.settings.schedule)
        driver = StepDriver(self.session, stage_actions(trainer, self.run.stage, self._ours), position)
        self._batches_before = self._batches_seen()
        self.session.open()
        self.triggers.start()
        kept = self._interrupts.enter_context(kept_interrupts())
        both = zip(driver.handlers(), self._end_handlers(), strict=True)
        starts, stops = (joined(self.session.clock.log, first, second) for first, second in both)
        self._tap.install(starts, stops, kept, self.session.clock.log)

    def _record_every_step(self, steps: int) -> str:
        schedule = Schedule(wait=0, warmup=0, active=steps, repeat=1)
        self.settings = replace(self.settings, schedule=schedule)
        self.session.reschedule(schedule)
        whole = f"{self.run.stage} has {format_count(steps, 'step')}"
        return f"every step is recorded: {whole}, too few for the default schedule"

    def stop(self, reason: str | None = None) -> None:
        """Stop recording: the loop of the stage has ended."""
        if not self._tap.is_installed:
            # The loop never began: no session closes it.
            self.run.resident.close()
            return
        self._tap.remove()
        # Saving the last window takes the longest: a Ctrl-C during that is raised when it is saved.
        with self._interrupts:
            self.triggers.stop()
            self.session.close(reason=reason)
        recorded, seen = self.session.facts().steps or 0, self._batches_seen() - self._batches_before
        if self.run.stage == "fit" and recorded < seen // 2:
            profiler = type(self.trainer.profiler).__name__  # type: ignore[attr-defined]
            message = (
                f"{recorded} of {seen} steps were recorded: {profiler} does not call start and stop for every action"
            )
            self.run.sink.manifest.append(NoteRow(collector="session", message=message))
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

    def _end_handlers(self) -> tuple[Handlers, Handlers]:
        """Return the handlers of actions that show an end of the run that Lightning does not report to the callback."""
        hooks = [f"[Callback]{callback.state_key}.on_exception" for callback in self.trainer.callbacks]  # type: ignore[attr-defined]
        starts: Handlers = {"run_training_epoch": self._epoch_start, **dict.fromkeys(hooks, self._note_handled)}
        stops: Handlers = {"run_training_epoch": self._epoch_end, **dict.fromkeys(hooks, self._hook_end)}
        return starts, stops

    def _note_handled(self) -> None:
        # The program may call fit while it handles an exception of its own.
        self._handled = sys.exc_info()[1]

    def _exception(self) -> BaseException | None:
        error = sys.exc_info()[1]
        return None if error is self._handled else error

    def _epoch_start(self) -> None:
        self._note_handled()
        self._had_owner.append(self._has_owner())

    def _epoch_end(self) -> None:
        error = self._exception()
        if error is not None and not isinstance(error, StopIteration):
            # Only the text: the exception would keep the memory of its frames.
            self._raised = describe(error)
        if self._had_owner.pop() and not self._has_owner():
            self.abandon()

    def _hook_end(self) -> None:
        if self._exception() is not None:
            self.abandon()

    def _has_owner(self) -> bool:
        """Whether the Trainer has the adapter; while it does not, another one may pass its hooks on."""
        return any(each is self._owner for each in self.trainer.callbacks)  # type: ignore[attr-defined]

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
            if self._curves is not None:
                with self.run.faults.caught(Curves.name, "exit"):
                    self._curves.end()
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

    def break_off(self, error: Exception) -> None:
        """Stop recording after a failure outside the collectors; training continues."""
        if self.settings.output.on_error == "raise":
            raise error
        log.warning("recording failed and is disabled; training continues", exc_info=error)
        self.run.faults.report("session", "mark", None, error)
        with self.run.faults.caught("session", "exit"):
            self.stop(f"recording failed: {describe(error)}")

    def _pulse_written(self, rows: Sequence[PulseRow]) -> None:
        if self._curves is not None and Curves.name not in self.run.faults.disabled:
            with self.run.faults.caught(Curves.name, "hook"):
                device = self.run.device if without_statistics(self.run.device) is None else None
                self._curves.add_rows(rows, device, in_window=self.run.window is not None)

    def _window_closed(self, *_: object) -> None:
        if self.run.sink.uploads is not None:
            self.run.sink.in_background(self._copy)

    def _copy(self) -> None:
        if (uploads := self.run.sink.uploads) is not None:
            uploads.copy(self.run.sink.files)


def available_collectors(run: RunContext, trainer: Trainer, settings: Settings) -> list[Collector]:
    """Return the collectors that are available, and write the facts of the run to the manifest.

    Raises:
        ConfigError: a collector that the user requires is not available.
    """
    manifest, place = run.sink.manifest, run.sink.place
    reasons = [(collector, asked, _unavailable(collector, run)) for collector, asked in settings.collectors]
    available = [collector for collector, _, reason in reasons if reason is None]
    manifest.append(
        "run",
        **run_facts(trainer, run.stage, place.url or str(place.root), settings.schedule, available),
        every_collector=settings.every_collector,
        triggers=settings.triggers.file,
        operator_table=settings.table.chosen(),
    )
    if trainer.is_global_zero and (note := choice_note(settings.ranks, trainer.world_size)):
        manifest.append(NoteRow(collector="ranks", message=note))
    missing = [(collector, asked, reason) for collector, asked, reason in reasons if reason is not None]
    # A collector for the fit must not stop the test after it.
    wrong = [(collector, why) for collector, asked, why in missing if asked and why != no_training_step(run)]
    if refused := [f"{type(collector).__name__} ({why})" for collector, why in wrong]:
        raise ConfigError(f"not available in this run: {', '.join(refused)}; remove it from `collectors`")
    for collector, _, reason in missing:
        manifest.append(UnavailableRow(collector=collector.name, reason=reason))
        if trainer.is_global_zero:
            # The page has it in its notes; most machines lack something.
            log.debug("%s: collector %s is disabled", reason, collector.name)
    return available


def _unavailable(collector: Collector, run: RunContext) -> str | None:
    with run.faults.caught(collector.name, "enter"):
        return collector.unavailable(run)
    return None


def _profiler_conflict(profiler: Any) -> str | None:
    if lightning_class(profiler, "PyTorchProfiler") and not getattr(profiler, "idle_actions", False):
        return LIGHTNING_PROFILER
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
