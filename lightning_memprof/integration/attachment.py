"""The life of a run on one rank: from ``setup`` to the last file.

Lightning calls neither ``on_exception`` nor ``teardown`` of a callback that the program has removed, nor where another
callback raises in ``on_exception``. Some of these ends show in the Trainer's actions; the other runs are ended by the
next event: a Trainer is made or set up, the Trainer is garbage, or the process exits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

from lightning.pytorch import Callback, Trainer

from lightning_memprof.artifacts.manifest import NoteRow
from lightning_memprof.artifacts.series import LIGHTNING_PROFILER, PulseRow
from lightning_memprof.artifacts.sink import RunPlace, Sink
from lightning_memprof.capture.base import RunContext
from lightning_memprof.capture.budget import Ledger
from lightning_memprof.capture.clock import device_timer
from lightning_memprof.capture.faults import Faults, describe
from lightning_memprof.capture.observe import kept_interrupts
from lightning_memprof.capture.sources.memory import without_statistics
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
from lightning_memprof.integration.facts import launch_of, peak_flops, training_facts
from lightning_memprof.integration.feeds import ActionTap, TensorFeed, unprofiled_parts
from lightning_memprof.integration.live_run import LIVE, LiveRun
from lightning_memprof.integration.settings import Settings, group_timeout_seconds
from lightning_memprof.logs import logger_of
from lightning_memprof.packages import lightning_class
from lightning_memprof.schedule import Schedule
from lightning_memprof.units import format_count

log = logger_of(__name__)

_INTERRUPTED: Final = "Lightning called neither on_exception nor teardown"


def end_abandoned(trainer: Trainer | None = None) -> None:
    """End the live runs that are over, and those of ``trainer``, which begins another."""
    for run in tuple(LIVE):
        if run.is_over() or (isinstance(run, Attachment) and run.trainer is trainer):
            run.abandon()


class Attachment(LiveRun):
    """One run of one stage of a Trainer on one rank.

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
        self.tensors = TensorFeed(self.is_over, lambda: tuple(trainer.optimizers))
        self.trainer = trainer
        self.ended_early: Callable[[str | None], None] = lambda _: None
        self._raised: str | None = None
        self._handled: BaseException | None = None
        # For each epoch that runs: a search of a Tuner has one inside another, with callbacks of its own.
        self._had_owner: list[bool] = []
        self._ours = ours
        self._owner = owner
        self._interrupts = ExitStack()
        self._tap = ActionTap(trainer.profiler, self.break_off)  # type: ignore[attr-defined]
        sink, device = Sink(place, trainer.global_rank), trainer.strategy.root_device
        run = RunContext(
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
            peak_flops=peak_flops(device, str(trainer.precision)),
            ledger=Ledger(settings.budget, group_timeout_seconds(trainer)),
            parts=lambda: unprofiled_parts(trainer, stage),
            pulse_written=self._pulse_written,
            profiler_conflict=_profiler_conflict(trainer.profiler),  # type: ignore[attr-defined]
        )
        self._curves = curves_of(trainer, stage, settings, sink)
        super().__init__(run, settings, launch_of(trainer))

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

    def is_over(self) -> bool:
        """Return whether the Trainer has stopped."""
        return self.trainer.state.stopped

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
        if self.is_here:
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

    def _drained(self) -> None:
        if self._curves is not None:
            with self.run.faults.caught(Curves.name, "exit"):
                self._curves.end()

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


def _profiler_conflict(profiler: Any) -> str | None:
    if lightning_class(profiler, "PyTorchProfiler") and not getattr(profiler, "idle_actions", False):
        return LIGHTNING_PROFILER
    return None
