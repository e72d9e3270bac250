"""The only stateful object of a run: steps come in, windows open and close, collectors are told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.capture.base import OnStep, StepRecord
from lightning_memprof.capture.clock import StepClock
from lightning_memprof.capture.collectors.pulse import Pulse
from lightning_memprof.capture.recording import Recording
from lightning_memprof.capture.triggers.requests import Demands, NoWishes
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Action, Mark, Point, Schedule, Window, plan_window

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from lightning_memprof.capture.base import Collector, RunContext
    from lightning_memprof.capture.triggers.requests import Demand, Wishes

__all__ = ["Position", "Session"]

log = logging.getLogger(__name__)

_OTHER: Final = PHASES.index("other")
_NO_WISHES: Final = NoWishes()
WindowClosed = Callable[[int, Sequence[int], str | None], None]
_RECORDING: Final = (Action.RECORD, Action.RECORD_AND_SAVE)


class Position(NamedTuple):
    """Where the run is when a step begins.

    ``step`` counts the training batches that the run has seen before this one, ``global_step`` its optimizer steps,
    ``epoch`` its epochs, and ``schedule_step`` is the number that the schedule decides by.
    """

    step: int
    global_step: int
    epoch: int
    schedule_step: int


@dataclass
class _Overhead:
    """Nanoseconds of training time that we took, by cause."""

    pulse_ns: int = 0
    windows_ns: int = 0
    collectors_ns: dict[str, int] = field(default_factory=dict)


class Session:
    """Records one run of one stage.

    The adapter calls :meth:`begin_step` where a step begins and :meth:`mark` at the points inside it, and at the end
    :meth:`close`. What happens between two steps, opening and saving windows for instance, is not time of a step.

    Args:
        run: what collectors are given.
        schedule: decides by ``Position.schedule_step``.
        collectors: those that are available in this run.
        window_closed: called when a window is saved, with its index, the steps that it recorded, and why the
            recording ends with it, None where it goes on.
        wishes: asks for windows that were not planned; looked at once a step.

    """

    def __init__(
        self,
        run: RunContext,
        schedule: Callable[[int], Action],
        collectors: Sequence[Collector],
        window_closed: WindowClosed = lambda *_: None,
        wishes: Wishes = _NO_WISHES,
    ) -> None:
        self._run = run
        self._window_closed = window_closed
        self._schedule = schedule
        self._collectors = tuple(collectors)
        self._faults = run.faults
        self.has_pulse = any(isinstance(collector, Pulse) for collector in collectors)
        self.clock = StepClock(run.timer if self.has_pulse else None)
        self._followers: dict[str, tuple[AbstractContextManager[OnStep | None], OnStep | None]] = {}
        self._recording: Recording | None = None
        self._windows = 0
        self._position: Position | None = None
        self.point: Point | None = None
        self._action = Action.NONE
        self._last_count = -1
        self._steps = 0
        self._wishes = wishes
        self._demands = Demands()
        self._unusual = False
        self._resumed_inside = False
        self._overhead = _Overhead()
        self._unix_offset_ns = run.unix_offset_ns

    @property
    def window(self) -> Window | None:
        """The window that is open."""
        return self._recording.window if self._recording is not None else None

    @property
    def windows(self) -> int:
        """Number of windows so far, an open one included."""
        return self._windows

    @property
    def position(self) -> Position | None:
        """Where the present step began, or None between steps."""
        return self._position

    def open(self) -> None:
        """Begin to follow the run.

        Raises:
            ConfigError: a collector finds out, now that the model is whole, that its configuration does not fit.

        """
        for collector in self._collectors:
            if collector.name in self._faults.switched_off:
                continue
            try:
                follow = collector.follow(self._run)
                self._followers[collector.name] = (follow, follow.__enter__())
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 a collector of anybody's must not stop the training
                self._faults.report(collector.name, "enter", None, error)

    def begin_step(self, position: Position) -> None:
        """End the present step, if there is one, and begin the next."""
        self._end_step()
        in_window = self._recording is not None
        scheduled = self._scheduled(position.schedule_step)
        began = time.perf_counter_ns()
        self._listen(position.step)
        self._overhead.pulse_ns += time.perf_counter_ns() - began
        began = time.perf_counter_ns()
        action, demand = self._demands.turn(position.step, scheduled)
        self._turn_windows(position, action, demand)
        if in_window or self._recording is not None:
            self._overhead.windows_ns += time.perf_counter_ns() - began
        self.point = Point.STEP_START
        self._position, self._action, self._last_count = position, action, position.schedule_step
        if self._recording is not None:
            if action is not Action.WARMUP:
                self._recording.steps.append(position.step)
            self.mark(Point.STEP_START)
        self.clock.start()

    def unusual(self) -> None:
        """Say that the present step holds what is no part of a step, a validation for instance."""
        self._unusual = True

    def mark(self, point: Point, *, at_ns: int | None = None) -> None:
        """Tell the open window's collectors that the present step has come to ``point``.

        Args:
            point: the place inside the step.
            at_ns: reading of ``time.perf_counter_ns``; None is now.

        """
        self.point = point
        if self._recording is None or self._position is None:
            return
        began = time.perf_counter_ns()
        self.clock.enter(_OTHER)
        now = began if at_ns is None else at_ns
        self._recording.mark(
            Mark(
                self._position.step,
                self._position.global_step,
                point,
                self._action is not Action.WARMUP,
                now + self._unix_offset_ns,
            )
        )
        self.clock.leave()
        self._overhead.windows_ns += time.perf_counter_ns() - began

    def close(self, *, reason: str | None = None) -> None:
        """End the run: the present step, the open window, and all that was followed.

        What was wanted and could not be opened is written down.

        Args:
            reason: why the run ended early; None where it came to its end.

        """
        # Every part is done, also where Ctrl-C interrupts another.
        with ExitStack() as parts:
            for name, (follow, _) in self._followers.items():
                parts.callback(self._leave, name, follow)
            parts.callback(self._followers.clear)
            parts.callback(self._say_unmet)
            parts.callback(self._close_last_window, reason or "the run ended")
            parts.callback(self._end_step)

    def _leave(self, name: str, follow: AbstractContextManager[OnStep | None]) -> None:
        try:
            follow.__exit__(None, None, None)
        except Exception as error:  # noqa: BLE001 a collector of anybody's must not stop the training
            self._faults.report(name, "exit", None, error)

    def _close_last_window(self, reason: str) -> None:
        if self._recording is not None:
            began = time.perf_counter_ns()
            self._close_window(reason)
            self._overhead.windows_ns += time.perf_counter_ns() - began

    def _say_unmet(self) -> None:
        for demand in self._demands.unmet:
            self._run.sink.manifest.append(
                "note", collector="triggers", message=f"the run ended before a window could open: {demand.cause}"
            )

    def facts(self) -> dict[str, Any]:
        """Return the number of steps and what we cost, for the manifest's last row."""
        return {
            "steps": self._steps,
            "overhead": {
                "pulse_ns": self._overhead.pulse_ns,
                "windows_ns": self._overhead.windows_ns,
                "collectors_ns": self._overhead.collectors_ns,
            },
        }

    def _end_step(self) -> None:
        position = self._position
        if position is None:
            return
        start = self.clock.start_ns
        now, phases, moments = self.clock.stop()
        self._steps += 1
        unusual, self._unusual = self._unusual, False
        if self._followers or self._wishes is not _NO_WISHES:
            record = StepRecord(
                position.step,
                position.global_step,
                position.epoch,
                None if self._recording is None else self._recording.window.index,
                start + self._unix_offset_ns,
                now - start,
                phases,
                moments,
                not unusual,
            )
            for name, (_, on_step) in self._followers.items():
                if on_step is not None and name not in self._faults.switched_off:
                    try:
                        on_step(record)
                    except Exception as error:  # noqa: BLE001 a collector of anybody's must not stop the training
                        self._faults.report(name, "mark", None, error)
            self._wishes.after_step(record)
        self._overhead.pulse_ns += time.perf_counter_ns() - now
        try:
            self.mark(Point.STEP_END, at_ns=now)
        finally:
            self._position = None

    def _scheduled(self, count: int) -> Action:
        action = self._schedule(count)
        if not isinstance(self._schedule, Schedule) or count == 0:
            return action
        # A window that was open at the checkpoint from which this run goes on is not resumed.
        if self._steps == 0 and self._position is None and self._last_count < 0:
            self._resumed_inside = action in _RECORDING and self._schedule(count - 1) is Action.RECORD
        elif self._resumed_inside:
            self._resumed_inside = action in _RECORDING and self._schedule(count - 1) is not Action.RECORD_AND_SAVE
        return Action.NONE if self._resumed_inside else action

    def _listen(self, step: int) -> None:
        for demand in self._wishes.before_step(step):
            self._demands.add(demand)

    def _turn_windows(self, position: Position, action: Action, demand: Demand | None) -> None:
        if self._recording is not None:
            # A function of the user's may leave a window without saying that it saves.
            left = action is Action.NONE or (action is Action.WARMUP and self._action is Action.RECORD)
            if self._action is Action.RECORD_AND_SAVE:
                self._close_window(None)
            elif demand is None and self._demands.open is None and position.schedule_step <= self._last_count:
                self._close_window("a new epoch began")
            elif demand is not None or (self._demands.open is None and left):
                self._close_window(None)
        if self._recording is None and action is not Action.NONE:
            self._open_window(position, action, demand)

    def _open_window(self, position: Position, action: Action, demand: Demand | None) -> None:
        window = Window(self._windows, (), ())
        if demand is not None:
            window = demand.window(self._windows, position.step)
            said = f"window {window.index} was not planned and records steps {_span(window.active)}: {demand.cause}"
            log.info("%s", said)
            self._run.sink.manifest.append("note", collector="triggers", message=said)
        elif isinstance(self._schedule, Schedule):
            window = plan_window(self._schedule, position.schedule_step, step=position.step, index=self._windows)
            if action is Action.WARMUP:
                log.info("window %d warming up, steps %s", window.index, _span(window.warmup))
            log.info("window %d recording steps %s", window.index, _span(window.active))
        else:
            # A function of the user's may count its calls: it is asked once a step and never ahead.
            log.info("window %d opens at step %d", window.index, position.step)
        self._windows += 1
        self._run.sink.manifest.append(
            "window", window=window.index, event="open", warmup_steps=window.warmup, active_steps=window.active
        )
        self._recording = Recording(self._run, window, self._overhead.collectors_ns)
        self._recording.open(self._collectors)

    def _close_window(self, reason: str | None) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        truncated = reason is not None and self._action is not Action.RECORD_AND_SAVE
        try:
            recording.close()
        finally:
            self._run.sink.manifest.append(
                "window",
                window=recording.window.index,
                event="close",
                steps=recording.steps,
                truncated=truncated,
                reason=reason if truncated else None,
            )
        self._window_closed(recording.window.index, recording.steps, reason)


def _span(steps: tuple[int, ...]) -> str:
    if not steps:
        return "none"
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
