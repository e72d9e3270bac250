"""One run of one stage: steps come in, windows open and close, and each collector's contexts with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Final

from lightning_memprof.artifacts.manifest import EndRow, NoteRow, OverheadFacts, WindowRow
from lightning_memprof.artifacts.series import PHASES, PROFILER
from lightning_memprof.capture.base import Collector, OnMark, OnStep, Position, RunContext, SkipWindow, StepRecord
from lightning_memprof.capture.clock import StepClock
from lightning_memprof.capture.planner import Turn, WindowPlanner
from lightning_memprof.capture.room import with_room
from lightning_memprof.capture.sources.memory import peak_rss_bytes
from lightning_memprof.capture.triggers.watch import TriggerWatch
from lightning_memprof.capture.watchdog import Watchdog
from lightning_memprof.errors import ConfigError
from lightning_memprof.logs import logger_of
from lightning_memprof.schedule import Action, Mark, Point, Window
from lightning_memprof.units import format_steps

log = logger_of(__name__)

# A collector's sys.exit() is its failure; only Ctrl-C is the user's.
_FAILURES: Final = (Exception, SystemExit, GeneratorExit)
# The pulse is timed in the first steps of a run, then in every 61st: 61 has no common factor with its chunks of 64
# rows.
_TIMED_STEPS: Final = 64
_TIMED_EVERY: Final = 61

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
        requests: makes window requests.
    """

    def __init__(
        self,
        run: RunContext,
        schedule: Callable[[int], Action],
        collectors: Sequence[Collector],
        window_closed: WindowClosed = lambda *_: None,
        requests: TriggerWatch | None = None,
    ) -> None:
        times_device = any(collector.times_device for collector in collectors)
        self.clock = run.clock = StepClock(run.timer if times_device else None)
        self._marking = self.clock.slot(PROFILER, PHASES.index("other"))
        self._run = run
        self._collectors = tuple(collectors)
        self._window_closed = window_closed
        self._requests = requests
        self._planner = WindowPlanner(schedule)
        self._followers = _Followers(run)
        self._recording: _Recording | None = None
        # Nanoseconds of training time that this package took.
        self._pulse_ns = self._windows_ns = 0
        # Over the timed steps; each later one also counts for the steps between.
        self._pulse_cpu_ns = self._timed_steps = 0
        self._collectors_ns: dict[str, int] = {}
        self._steps = 0

    def reschedule(self, schedule: Callable[[int], Action]) -> None:
        """Replace the schedule before the first step."""
        self._planner = WindowPlanner(schedule)

    def open(self) -> None:
        """Enter the collectors that follow the whole run.

        Raises:
            ConfigError: the configuration of a collector does not fit the model, which is complete now.
        """
        self._followers.open(self._collectors)

    def begin_step(self, position: Position) -> None:
        """End the current step, if there is one, and begin the next."""
        steps = self._steps
        weight = 1 if steps < _TIMED_STEPS else 0 if steps % _TIMED_EVERY else _TIMED_EVERY
        cpu_ns = self._cpu_ns() if weight else 0
        began = self._end_step()
        run, requests = self._run, self._requests
        if requests is not None and began >= requests.due_ns:
            for request in requests.before_step(position.step):
                self._planner.request(request)
        if self._recording is None and self._planner.is_quiet(position.schedule_step):
            # Most steps of a run.
            run.position, run.point = position, Point.STEP_START
            self.clock.start()
            if weight:
                self._add_pulse(weight, self.clock.start_ns - began, cpu_ns)
            return
        was_open = self._recording is not None
        turn = self._planner.turn(position)
        if turn.closes:
            self._close_window(turn.cut_by, truncated=turn.cut_by is not None)
        if turn.opens is not None:
            self._open_window(turn.opens, turn, position)
        if (recording := self._recording) is not None and turn.action is not Action.WARMUP:
            if not recording.steps and recording.window.active:
                log.info("window %d records %s", recording.window.index, format_steps(recording.window.active))
            recording.steps.append(position.step)
        in_window = was_open or self._recording is not None
        if in_window:
            spent_ns = time.perf_counter_ns() - began
            self._windows_ns += spent_ns
            self._run.note_pause(spent_ns)
        run.position, run.point = position, Point.STEP_START
        if self._recording is not None:
            self.mark(Point.STEP_START)
        self.clock.start()
        if weight and not in_window:
            self._add_pulse(weight, self.clock.start_ns - began, cpu_ns)

    def drop_step(self) -> None:
        """Forget the current step: its loader had no batch for it."""
        position, self._run.position = self._run.position, None
        if self._recording is not None and position is not None and position.step in self._recording.steps:
            self._recording.steps.remove(position.step)

    def unusual(self) -> None:
        """Note that the current step contains more than a step, a validation for instance."""
        self._run.is_usual = False

    def validation_batch(self) -> None:
        """Note that a batch of a validation inside fit begins."""
        if self._run.validation_batch is not None:
            self._run.validation_batch()

    def rare_action(self, action: str | None) -> None:
        """Note that an action that is not part of every step starts, or with None that it ends."""
        if self._run.rare_action is not None:
            self._run.rare_action(action)

    def mark(self, point: Point, *, at_ns: int | None = None) -> None:
        """Pass the mark of ``point`` in the current step to the collectors of the open window.

        Args:
            point: the place inside the step.
            at_ns: reading of ``time.perf_counter_ns``; None is now.
        """
        self._run.point = point
        position = self._run.position
        if self._recording is None or position is None:
            return
        began = time.perf_counter_ns()
        self.clock.enter(self._marking)
        now = began if at_ns is None else at_ns
        recorded = self._planner.action is not Action.WARMUP
        time_ns = now + self._run.unix_offset_ns
        mark = Mark(
            step=position.step, global_step=position.global_step, point=point, recorded=recorded, time_ns=time_ns
        )
        with_room(self._recording.mark, mark)
        self.clock.leave()
        self._windows_ns += time.perf_counter_ns() - began

    def marking(self, point: Point) -> Callable[[], None]:
        """Return :meth:`mark` of one point, for every step of a run."""
        run = self._run

        def mark() -> None:
            if self._recording is None:
                run.point = point
            else:
                self.mark(point)

        return mark

    def close(self, *, reason: str | None = None) -> None:
        """End the current step, the open window and the followers; list the pending requests in the manifest.

        Args:
            reason: why the run ended early; None if it came to its end.
        """
        # Every part runs, also if Ctrl-C interrupts another.
        with ExitStack() as parts:
            parts.callback(self._run.resident.close)
            parts.callback(self._followers.close)
            parts.callback(self._list_pending)
            parts.callback(self._close_last_window, reason or "the run ended")
            parts.callback(self.end_step)

    def facts(self) -> EndRow:
        """Return the number of steps, the peak RSS and the profiler overhead, for the manifest's last row."""
        apart = self._run.apart_ns
        spent = {name: self._collectors_ns.get(name, 0) + apart.get(name, 0) for name in self._collectors_ns | apart}
        overhead = OverheadFacts(
            pulse_ns=self._pulse_ns,
            pulse_cpu_ns=self._pulse_cpu_ns * self._steps // self._timed_steps if self._timed_steps else None,
            windows_ns=self._windows_ns + self._run.charged_ns,
            collectors_ns=spent,
        )
        return EndRow(steps=self._steps, peak_rss_bytes=peak_rss_bytes(0), overhead=overhead)

    def _add_pulse(self, weight: int, wall_ns: int, cpu_ns: int) -> None:
        """Add the pulse's time between two steps; ``cpu_ns`` is the CPU time when it began."""
        self._pulse_ns += weight * wall_ns
        self._pulse_cpu_ns += weight * max(self._cpu_ns() - cpu_ns, 0)
        self._timed_steps += weight

    def _cpu_ns(self) -> int:
        """Return the thread's CPU time, without that of collectors, which is charged separately. Costs 0.5 µs."""
        return time.thread_time_ns() - self._run.charged_ns

    def _end_step(self) -> int:
        """End the current step, if there is one; return the time from which on nothing is counted yet."""
        run = self._run
        position = run.position
        if position is None:
            return time.perf_counter_ns()
        start = self.clock.start_ns
        now, times, moments = self.clock.stop()
        self._steps += 1
        # By position: it is made in every step.
        record = StepRecord(
            position.step,
            position.global_step,
            position.epoch,
            run.window,
            start + self._run.unix_offset_ns,
            now - start,
            times,
            moments,
            run.is_usual,
        )
        run.is_usual = True
        charged = run.charged_ns
        self._followers.step(record)
        uncounted = now + run.charged_ns - charged
        if self._requests is not None and self._requests.watched:
            self._requests.after_step(record)
        if self._recording is None:
            run.position = None
            return uncounted
        began = time.perf_counter_ns()
        self._pulse_ns += began - uncounted
        try:
            self.mark(Point.STEP_END, at_ns=now)
        finally:
            run.position = None
        return time.perf_counter_ns()

    def end_step(self) -> None:
        """End the current step, if there is one: what follows belongs to no step."""
        began = self._end_step()
        if self._recording is None:
            self._pulse_ns += time.perf_counter_ns() - began

    def _open_window(self, window: Window, turn: Turn, position: Position) -> None:
        manifest = self._run.sink.manifest
        if turn.request is not None:
            message = f"window {window.index} was requested for {format_steps(window.active)}: {turn.request.cause}"
            log.info("%s", message)
            manifest.append(NoteRow(collector="triggers", message=message))
            self._run.holders_asked = turn.request.leaks
            if turn.request.leaks and not any(collector.name == "holders" for collector in self._collectors):
                note = "the request asks for holders of growing memory: add the collector Holders to the callback"
                log.warning("%s", note)
                manifest.append(NoteRow(collector="triggers", message=note))
        elif window.active:
            if turn.action is Action.WARMUP:
                log.info("window %d warms up in %s", window.index, format_steps(window.warmup))
        else:
            log.info("window %d opens at step %d", window.index, position.step)
        row = WindowRow(window=window.index, event="open")
        row.warmup_steps, row.active_steps = list(window.warmup), list(window.active)
        manifest.append(row)
        self._recording = _Recording(self._run, window, self._collectors_ns)
        self._run.window = window.index
        self._recording.open(self._collectors)

    def _close_last_window(self, reason: str) -> None:
        if self._recording is not None:
            began = time.perf_counter_ns()
            self._close_window(reason, truncated=self._planner.action is not Action.RECORD_AND_SAVE)
            self._windows_ns += time.perf_counter_ns() - began

    def _close_window(self, reason: str | None, *, truncated: bool) -> None:
        recording, self._recording = self._recording, None
        self._run.window = None
        if recording is None:
            return
        try:
            recording.close()
        finally:
            row = WindowRow(window=recording.window.index, event="close", steps=recording.steps, truncated=truncated)
            row.reason = reason if truncated else None
            self._run.sink.manifest.append(row)
        self._window_closed(recording.window.index, recording.steps, reason)

    def _list_pending(self) -> None:
        for request in self._planner.pending:
            message = f"the run ended before a window could open: {request.cause}"
            self._run.sink.manifest.append(NoteRow(collector="triggers", message=message))


class _Followers(ExitStack):
    """The collectors that follow the whole run, while they are open; left in reverse order.

    Args:
        run: passed to the collectors.
    """

    def __init__(self, run: RunContext) -> None:
        super().__init__()
        self._run = run
        self._faults = run.faults
        self._on_step: list[tuple[str, OnStep]] = []

    def open(self, collectors: Sequence[Collector]) -> None:
        """Enter the collectors that are not disabled.

        Raises:
            ConfigError: the configuration of a collector does not fit the model.
        """
        for collector in collectors:
            if collector.name in self._faults.disabled:
                continue
            try:
                follow = collector.follow(self._run)
                on_step = follow.__enter__()
                self.enter_context(self._faults.caught(collector.name, "exit"))
                self.callback(follow.__exit__, None, None, None)
                self._on_step += [] if on_step is None else [(collector.name, on_step)]
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 a collector of anybody's must not stop the training
                self._faults.report(collector.name, "enter", None, error)

    def step(self, record: StepRecord) -> None:
        """Pass a finished step to the collectors."""
        disabled = self._faults.disabled
        for name, on_step in self._on_step:
            if name not in disabled:
                try:
                    on_step(record)
                except Exception as error:  # noqa: BLE001 a collector of anybody's must not stop the training
                    self._faults.report(name, "mark", None, error)


class _Recording:
    """A window while it is open.

    Collectors are entered and get marks in the given order, and are left in reverse order. One that fails is left at
    once and disabled for the rest of the run; the others continue.

    Args:
        run: passed to the collectors.
        window: the window.
        spent_ns: nanoseconds of training time by collector; added to.
    """

    def __init__(self, run: RunContext, window: Window, spent_ns: dict[str, int]) -> None:
        self.window = window
        self.steps: list[int] = []
        self._run = run
        self._faults = run.faults
        self._spent_ns = spent_ns
        self._open: dict[str, tuple[AbstractContextManager[OnMark | None], OnMark | None]] = {}
        self._watchdog = Watchdog(run.ledger.budget.max_collector_seconds)

    def open(self, collectors: Sequence[Collector]) -> None:
        """Enter the collectors that are not disabled; only the light ones if the writer is behind."""
        self._watchdog.start()
        behind = self._run.sink.behind()
        for collector in collectors:
            if collector.name in self._faults.disabled:
                continue
            started = time.perf_counter_ns()
            try:
                if behind is not None and not collector.every_rank:
                    raise SkipWindow(behind)  # noqa: TRY301 reported like the collector's own
                context = collector.record(self._run, self.window)
                self._open[collector.name] = (context, self._watchdog.call(context.__enter__))
                self._watchdog.raise_swallowed()
            except SkipWindow as reason:
                self._run.note_unavailable(collector.name, str(reason), self.window)
            except Exception as error:  # noqa: BLE001 a collector of anybody's must not stop the training
                self._leave(collector.name, "enter", error)
                self._faults.report(collector.name, "enter", self.window.index, error)
            self._charge(collector.name, started)

    def mark(self, mark: Mark) -> None:
        """Pass a mark to the collectors; a step's end in reverse, so that no step includes another collector's work."""
        entries = list(self._open.items())
        for name, (_, on_mark) in reversed(entries) if mark.point is Point.STEP_END else entries:
            if on_mark is not None:
                self._guard(name, "mark", lambda on_mark=on_mark: on_mark(mark))  # type: ignore[misc]

    def close(self) -> None:
        """Leave the collectors; each saves its data, also if Ctrl-C interrupts another."""
        with ExitStack() as stack:
            stack.callback(self._watchdog.stop)
            for name, (context, _) in self._open.items():
                leave = partial(context.__exit__, None, None, None)
                stack.callback(self._guard, name, "exit", leave)
            self._open.clear()
        if self._run.ledger.budget.keep_windows is not None:
            # After the background work of the collectors.
            remove = partial(_remove_old_windows, self._run, self.window.index)
            self._run.sink.in_background(remove, window=self.window.index)

    def _guard(self, name: str, where: str, call: Callable[[], object]) -> None:
        started = time.perf_counter_ns()
        try:
            self._watchdog.call(call)
            self._watchdog.raise_swallowed()
        except _FAILURES as error:
            self._leave(name, where, error)
            self._faults.report(name, where, self.window.index, error)
        finally:
            self._charge(name, started)

    def _leave(self, name: str, where: str, error: BaseException) -> None:
        entry = self._open.pop(name, None)
        if entry is None or where == "exit":
            return
        try:
            self._watchdog.call(partial(entry[0].__exit__, type(error), error, error.__traceback__))
        except Exception as second:  # noqa: BLE001 its exit may fail as its mark did
            if second is not error:
                self._faults.report(name, "exit", self.window.index, second)

    def _charge(self, name: str, started: int) -> None:
        self._spent_ns[name] = self._spent_ns.get(name, 0) + time.perf_counter_ns() - started


def _remove_old_windows(run: RunContext, newest: int) -> None:
    """Remove the files of all windows but the last ``keep_windows`` up to ``newest``; never raises."""
    keep = run.ledger.budget.keep_windows
    if keep is None:
        return
    with run.faults.caught("keep_windows", "write", newest):
        windows = {artifact.window for artifact in list(run.sink.artifacts) if artifact.window is not None}
        for window in sorted(window for window in windows if window <= newest)[:-keep]:
            run.sink.remove_window(window, f"keep_windows is {keep}")
