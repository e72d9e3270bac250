"""A collector's two contexts while they are open: of a window, and of the whole run; each collector on its own."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Final

from lightning_memprof.capture.base import SkipWindow
from lightning_memprof.capture.budget import remove_old_windows
from lightning_memprof.capture.watchdog import Watchdog
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Point

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from lightning_memprof.capture.base import Collector, OnMark, OnStep, RunContext, StepRecord
    from lightning_memprof.schedule import Mark, Window

__all__ = ["Followers", "Recording"]

# A collector's sys.exit() is its failure; only Ctrl-C is the user's.
_FAILURES: Final = (Exception, SystemExit, GeneratorExit)


class Followers:
    """The collectors that follow the whole run, while they are open.

    Args:
        run: passed to the collectors.

    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._faults = run.faults
        self._open: dict[str, tuple[AbstractContextManager[OnStep | None], OnStep | None]] = {}

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
                self._open[collector.name] = (follow, follow.__enter__())
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 a collector of anybody's must not stop the training
                self._faults.report(collector.name, "enter", None, error)

    def step(self, record: StepRecord) -> None:
        """Pass a finished step to the collectors."""
        for name, (_, on_step) in self._open.items():
            if on_step is not None and name not in self._faults.disabled:
                try:
                    on_step(record)
                except Exception as error:  # noqa: BLE001 a collector of anybody's must not stop the training
                    self._faults.report(name, "mark", None, error)

    def close(self) -> None:
        """Leave the collectors, in reverse order."""
        with ExitStack() as stack:
            for name, (follow, _) in self._open.items():
                stack.callback(self._leave, name, follow)
            self._open = {}

    def _leave(self, name: str, follow: AbstractContextManager[OnStep | None]) -> None:
        try:
            follow.__exit__(None, None, None)
        except Exception as error:  # noqa: BLE001 a collector of anybody's must not stop the training
            self._faults.report(name, "exit", None, error)


class Recording:
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
            remove = partial(remove_old_windows, self._run, self.window.index)
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
