"""Binds one session to one run of a Trainer, from ``setup`` to the last file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memprof.artifacts.naming import regions_name
from lightning_memprof.artifacts.sink import Artifact, RunPlace, Sink
from lightning_memprof.capture.base import RunContext, no_training_step
from lightning_memprof.capture.budget import Ledger
from lightning_memprof.capture.clock import device_timer
from lightning_memprof.capture.faults import Faults, describe
from lightning_memprof.capture.session import Session
from lightning_memprof.capture.triggers.watch import TriggerWatch
from lightning_memprof.errors import ConfigError
from lightning_memprof.integration.background import RankSummaries, write_operator_table
from lightning_memprof.integration.curves import Curves, curves_of
from lightning_memprof.integration.driver import StageActions, StepDriver, position_source, stage_actions
from lightning_memprof.integration.facts import run_facts, training_facts, unreachable
from lightning_memprof.integration.feeds import LateFeed, TensorFeed
from lightning_memprof.integration.memory_watch import MemoryWatch
from lightning_memprof.integration.parts import untold_parts
from lightning_memprof.integration.peak_flops import peak_flops
from lightning_memprof.integration.place import release_place
from lightning_memprof.integration.settings import choice_note, group_timeout_seconds
from lightning_memprof.integration.tap import ActionTap
from lightning_memprof.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning.pytorch import Callback, Trainer

    from lightning_memprof.capture.base import Collector
    from lightning_memprof.integration.settings import Settings

__all__ = ["Attachment"]

log = logging.getLogger(__name__)


class Attachment:
    """One run of one stage on one rank.

    Args:
        trainer: in its ``setup``: ranks are known, ``log_dir`` may be asked for once.
        stage: ``fit``, ``validate``, ``test`` or ``predict``.
        settings: the options.
        place: where the run's files go.
        ours: adapters of this package, whose hooks are not the user's callbacks.

    Raises:
        ConfigError: a collector that the user asked for is not available in this run.

    """

    def __init__(self, trainer: Trainer, stage: str, settings: Settings, place: RunPlace, ours: type[Callback]) -> None:
        self.place = place
        self.table: Path | None = None
        self._trainer = trainer
        self._stage = stage
        self._settings = settings
        self._ended = False
        self._batches_before = 0
        self._tabled = 0
        self._tap: ActionTap | None = None
        self._actions: StageActions = stage_actions(trainer, stage, ours)
        self._ours = ours
        self.tensors = TensorFeed(trainer)
        sink = Sink(place, trainer.global_rank)
        faults = Faults(sink.manifest, settings.output.on_error)
        self._curves = curves_of(trainer, stage, settings, sink, faults)
        self.run = RunContext(
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            stage=stage,
            function=self._actions.function,
            strategy=type(trainer.strategy).__name__,
            device=trainer.strategy.root_device,
            model=trainer.lightning_module,
            actions=LateFeed(lambda: self._tap),
            training=self.tensors,
            sink=sink,
            faults=faults,
            timer=device_timer(trainer.strategy.root_device),
            peak_flops=peak_flops(trainer),
            ledger=Ledger(settings.budget, group_timeout_seconds(trainer)),
            parts=lambda: untold_parts(trainer, stage),
            pulse_written=self._pulse_written,
            profiler_conflict=_profiler_conflict(trainer.profiler),  # type: ignore[attr-defined]
        )
        try:
            available = self._available()
            self.triggers = TriggerWatch(settings.triggers, self.run)
            across = [RankSummaries()] if trainer.world_size > 1 else []
            collectors = [*across, *available]
            self.session = Session(self.run, settings.schedule, collectors, self._window_closed, self.triggers)
            self._oom = MemoryWatch(self.run, available)
        except BaseException as error:
            sink.manifest.append("end", status="exception", exception=describe(error), steps=0)
            sink.close()
            release_place(sink)
            raise

    @property
    def raises(self) -> bool:
        """Whether our failures are raised into the training, for tests."""
        return self._settings.output.on_error == "raise"

    @property
    def wants_report(self) -> bool:
        """Whether the page of this run is to be made when it has ended."""
        return self._stage == "fit" and self._settings.output.report

    def start(self) -> None:
        """The stage's loop is about to run: loaders and optimizers are known."""
        trainer, sink = self._trainer, self.run.sink
        if self._stage == "fit":
            sink.manifest.append("training", **training_facts(trainer))
        if message := unreachable(trainer, self._stage, self._settings.schedule):
            sink.manifest.append("note", collector="schedule", message=message)
            if trainer.is_global_zero:
                log.warning("%s", message)
        self._actions = stage_actions(trainer, self._stage, self._ours)
        position = position_source(trainer, self._stage, self._settings.schedule)
        driver = StepDriver(self.session, self._actions, position)
        starts, stops = driver.handlers()
        profiler = trainer.profiler  # type: ignore[attr-defined]
        self._tap = ActionTap(profiler, starts, stops, self.break_off)
        self._batches_before = self._batches_seen()
        self.session.open()
        self.triggers.start()
        self._tap.install()

    def stop(self, reason: str | None = None) -> None:
        """The stage's loop has ended."""
        tap, self._tap = self._tap, None
        if tap is None:
            return
        tap.remove()
        self.triggers.stop()
        self.session.close(reason=reason)
        heard, seen = self.session.facts()["steps"], self._batches_seen() - self._batches_before
        if self._stage == "fit" and heard < seen // 2:
            profiler = type(self._trainer.profiler).__name__  # type: ignore[attr-defined]
            message = f"{heard} of {seen} steps were seen: {profiler} does not call start and stop for every action"
            self.run.sink.manifest.append("note", collector="session", message=message)
            log.warning("%s", message)

    def _batches_seen(self) -> int:
        return self._trainer.fit_loop.epoch_loop.batch_progress.total.ready

    def end(self, exception: BaseException | None = None) -> None:
        """Finish every file; nothing is written afterwards."""
        if self._ended:
            return
        self._ended = True
        sink = self.run.sink
        reason = None if exception is None else describe(exception)
        if sink.uploads is not None and exception is not None and not isinstance(exception, Exception):
            sink.uploads.hurry()
        try:
            # First, while the exception's frames still hold what filled the memory.
            self._oom.end(exception)
            self.stop(reason)
            sink.drain()
            self._end_curves()
            # After an exception the process should end soon; `show` makes the table where it is missing.
            if exception is None and (self.table is None or self.session.windows > self._tabled):
                self._write_table()
            named = self.place.directory / regions_name(self.run.rank)
            if named.exists():
                sink.list_artifact(Artifact(named, "series", "snapshots"))
        finally:
            status = "finished" if exception is None else "exception"
            sink.manifest.append("end", status=status, exception=reason, **self.session.facts())
            sink.close()

    def release(self) -> None:
        """Wait until the last files are at their URL, where the run has one; nothing may be read here afterwards."""
        release_place(self.run.sink)

    def break_off(self, error: Exception) -> None:
        """End the recording, not the training, because of a failure that belongs to no single collector."""
        if self.raises:
            raise error
        log.warning("recording failed and is disabled; training continues", exc_info=error)
        self.run.faults.report("session", "mark", None, error)
        try:
            self.stop(f"recording failed: {describe(error)}")
        except Exception as second:  # noqa: BLE001 the training must not stop
            self.run.faults.report("session", "exit", None, second)

    def _pulse_written(self, rows: Sequence[tuple[int | None, ...]]) -> None:
        if self._curves is not None and Curves.name not in self.run.faults.disabled:
            try:
                device = None if self.run.device.type == "cpu" else self.run.device
                self._curves.hear(rows, device, in_window=self.session.window is not None)
            except Exception as error:  # noqa: BLE001 the pulse and the training continue
                self.run.faults.report(Curves.name, "hook", None, error)

    def _end_curves(self) -> None:
        if self._curves is not None:
            try:
                self._curves.end()
            except Exception as error:  # noqa: BLE001 what follows must be written too
                self.run.faults.report(Curves.name, "exit", None, error)

    def _window_closed(self, window: int, steps: Sequence[int], reason: str | None) -> None:
        if self._curves is not None:
            self._curves.window_closed(window, steps)
        # The last window of a schedule that ends: its table is made during training.
        schedule = self._settings.schedule
        is_last = isinstance(schedule, Schedule) and schedule.anchor == "fit" and window + 1 == schedule.windows
        if is_last and reason is None:
            self._tabled = window + 1
            self.run.sink.in_background(self._write_table)

    def _write_table(self) -> None:
        try:
            self.table = write_operator_table(self.run, self._settings.table)
        except Exception as error:  # noqa: BLE001 the table can be made later, the training must not stop
            self.run.faults.report("operator_table", "write", None, error)

    def _available(self) -> list[Collector]:
        manifest = self.run.sink.manifest
        reasons = [(collector, asked, self._why_not(collector)) for collector, asked in self._settings.collectors]
        available = [collector for collector, _, reason in reasons if reason is None]
        root = self.place.url or str(self.place.root)
        manifest.append(
            "run",
            **run_facts(self._trainer, self._stage, root, self._settings.schedule, available),
            every_collector=self._settings.every_collector,
            triggers=self._settings.triggers.file,
        )
        if self._trainer.is_global_zero and (note := choice_note(self._settings.ranks, self._trainer.world_size)):
            manifest.append("note", collector="ranks", message=note)
        missing = [(collector, asked, reason) for collector, asked, reason in reasons if reason is not None]
        # What was asked for the fit must not stop the test after it.
        wrong = [(collector, why) for collector, asked, why in missing if asked and why != no_training_step(self.run)]
        if refused := [f"{type(collector).__name__} ({why})" for collector, why in wrong]:
            msg = f"asked for and not available in this run: {', '.join(refused)}; take it out of `collectors`"
            raise ConfigError(msg)
        for collector, _, reason in missing:
            manifest.append("unavailable", collector=collector.name, reason=reason)
            if self._trainer.is_global_zero:
                log.info("%s: not recording %s", reason, collector.name.replace("_", " "))
        return available

    def _why_not(self, collector: Collector) -> str | None:
        try:
            return collector.unavailable(self.run)
        except Exception as error:
            if self.raises:
                raise
            self.run.faults.report(collector.name, "enter", None, error)
            return None


def _profiler_conflict(profiler: Any) -> str | None:
    names = [base.__name__ for base in type(profiler).__mro__]
    if "PyTorchProfiler" in names and "ExtendedPyTorchProfiler" not in names:
        return "Lightning's PyTorchProfiler owns torch.profiler in this run"
    return None
