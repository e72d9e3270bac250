"""One run of one stage: steps come in, windows open and close."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from lightning_memprof.artifacts.manifest import OverheadFacts
from lightning_memprof.artifacts.series import PHASES, PROFILER
from lightning_memprof.capture.base import StepRecord
from lightning_memprof.capture.clock import StepClock
from lightning_memprof.capture.planner import WindowPlanner
from lightning_memprof.capture.recording import Followers, Recording
from lightning_memprof.schedule import Action, Mark, Point

if TYPE_CHECKING:
    from lightning_memprof.capture.base import Collector, Position, RunContext
    from lightning_memprof.capture.planner import RequestSource, Turn
    from lightning_memprof.schedule import Window

__all__ = ["Session"]

log = logging.getLogger(__name__)

WindowClosed = Callable[[int, Sequence[int], str | None], None]


class Session:
    """Records one run of one stage.

    The adapter calls :meth:`begin_step` where a step begins, :meth:`mark` at the points inside it, and :meth:`close` at
    the end. The time between two steps, in which windows open and are saved, is not counted as time of a step.

    Args:
        run: passed to the collectors.
        schedule: decides by ``Position.schedule_step``.
        collectors: those that are available in this run.
        window_closed: called when a window is saved, with its index, its recorded steps, and why the recording ends
            with it; None if it continues.
        requests: makes window requests; called once a step.

    """

    def __init__(
        self,
        run: RunContext,
        schedule: Callable[[int], Action],
        collectors: Sequence[Collector],
        window_closed: WindowClosed = lambda *_: None,
        requests: RequestSource | None = None,
    ) -> None:
        times_device = any(collector.times_device for collector in collectors)
        self.clock = StepClock(run.timer if times_device else None)
        self._marking = self.clock.slot(PROFILER, PHASES.index("other"))
        self._run = run
        self._collectors = tuple(collectors)
        self._window_closed = window_closed
        self._requests = requests
        self._planner = WindowPlanner(schedule)
        self._followers = Followers(run)
        self._recording: Recording | None = None
        # Nanoseconds of training time that this package took.
        self._pulse_ns = self._windows_ns = 0
        self._collectors_ns: dict[str, int] = {}
        self._steps = 0
        self._is_usual = True
        self._progress = run.progress
        self._progress.clock = self.clock

    @property
    def window(self) -> Window | None:
        """The open window."""
        return self._recording.window if self._recording is not None else None

    @property
    def windows(self) -> int:
        """Number of windows so far, including an open one."""
        return self._planner.windows

    @property
    def position(self) -> Position | None:
        """Where the current step began, or None between steps."""
        return self._progress.position

    def open(self) -> None:
        """Enter the collectors that follow the whole run.

        Raises:
            ConfigError: the configuration of a collector does not fit the model, which is complete now.

        """
        self._followers.open(self._collectors)

    def begin_step(self, position: Position) -> None:
        """End the current step, if there is one, and begin the next."""
        self._end_step()
        began = time.perf_counter_ns()
        was_open = self._recording is not None
        if self._requests is not None:
            for request in self._requests.before_step(position.step):
                self._planner.request(request)
        turn = self._planner.turn(position)
        if turn.closes:
            self._close_window(turn.cut_by, truncated=turn.cut_by is not None)
        if turn.opens is not None:
            self._open_window(turn.opens, turn, position)
        in_window = was_open or self._recording is not None
        if in_window:
            self._windows_ns += time.perf_counter_ns() - began
        self._progress.position, self._progress.point = position, Point.STEP_START
        if self._recording is not None:
            if turn.action is not Action.WARMUP:
                self._recording.steps.append(position.step)
            self.mark(Point.STEP_START)
        self.clock.start()
        if not in_window:
            self._pulse_ns += self.clock.start_ns - began

    def unusual(self) -> None:
        """Note that the current step contains more than a step, a validation for instance."""
        self._is_usual = False

    def mark(self, point: Point, *, at_ns: int | None = None) -> None:
        """Pass the mark of ``point`` in the current step to the collectors of the open window.

        Args:
            point: the place inside the step.
            at_ns: reading of ``time.perf_counter_ns``; None is now.

        """
        self._progress.point = point
        position = self._progress.position
        if self._recording is None or position is None:
            return
        began = time.perf_counter_ns()
        self.clock.enter(self._marking)
        now = began if at_ns is None else at_ns
        recorded = self._planner.action is not Action.WARMUP
        time_ns = now + self._run.unix_offset_ns
        self._recording.mark(
            Mark(step=position.step, global_step=position.global_step, point=point, recorded=recorded, time_ns=time_ns)
        )
        self.clock.leave()
        self._windows_ns += time.perf_counter_ns() - began

    def close(self, *, reason: str | None = None) -> None:
        """End the current step, the open window and the followers; list the pending requests in the manifest.

        Args:
            reason: why the run ended early; None if it came to its end.

        """
        # Every part runs, also if Ctrl-C interrupts another.
        with ExitStack() as parts:
            parts.callback(self._followers.close)
            parts.callback(self._list_pending)
            parts.callback(self._close_last_window, reason or "the run ended")
            parts.callback(self._end_step)

    def facts(self) -> dict[str, Any]:
        """Return the number of steps and the profiler overhead, for the manifest's last row."""
        overhead = OverheadFacts(
            pulse_ns=self._pulse_ns, windows_ns=self._windows_ns, collectors_ns=self._collectors_ns
        )
        return {"steps": self._steps, "overhead": msgspec.structs.asdict(overhead)}

    def _end_step(self) -> None:
        position = self._progress.position
        if position is None:
            return
        start = self.clock.start_ns
        times = self.clock.stop()
        now = times.end_ns
        self._steps += 1
        is_usual, self._is_usual = self._is_usual, True
        # By position: it is made in every step.
        record = StepRecord(
            position.step,
            position.global_step,
            position.epoch,
            self._progress.window,
            start + self._run.unix_offset_ns,
            now - start,
            times.phases_ns,
            times.moments,
            is_usual,
            times.actions,
        )
        self._followers.step(record)
        if self._requests is not None:
            self._requests.after_step(record)
        self._pulse_ns += time.perf_counter_ns() - now
        try:
            self.mark(Point.STEP_END, at_ns=now)
        finally:
            self._progress.position = None

    def _open_window(self, window: Window, turn: Turn, position: Position) -> None:
        manifest = self._run.sink.manifest
        if turn.request is not None:
            message = f"window {window.index} was requested and records {_span(window.active)}: {turn.request.cause}"
            log.info("%s", message)
            manifest.append("note", collector="triggers", message=message)
        elif window.active:
            if turn.action is Action.WARMUP:
                log.info("window %d warms up in %s", window.index, _span(window.warmup))
            log.info("window %d records %s", window.index, _span(window.active))
        else:
            log.info("window %d opens at step %d", window.index, position.step)
        manifest.append(
            "window", window=window.index, event="open", warmup_steps=window.warmup, active_steps=window.active
        )
        self._recording = Recording(self._run, window, self._collectors_ns)
        self._progress.window = window.index
        self._recording.open(self._collectors)

    def _close_last_window(self, reason: str) -> None:
        if self._recording is not None:
            began = time.perf_counter_ns()
            self._close_window(reason, truncated=self._planner.action is not Action.RECORD_AND_SAVE)
            self._windows_ns += time.perf_counter_ns() - began

    def _close_window(self, reason: str | None, *, truncated: bool) -> None:
        recording, self._recording = self._recording, None
        self._progress.window = None
        if recording is None:
            return
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

    def _list_pending(self) -> None:
        for request in self._planner.pending:
            self._run.sink.manifest.append(
                "note", collector="triggers", message=f"the run ended before a window could open: {request.cause}"
            )


def _span(steps: tuple[int, ...]) -> str:
    if not steps:
        return "no steps"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}\N{EN DASH}{steps[-1]}"
