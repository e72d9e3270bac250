"""When every action of the Trainer began and how long it took."""

from __future__ import annotations

import time
from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from lightning_memprof.capture.base import Collector, OnMark
from lightning_memprof.capture.clock import unix_ns
from lightning_memprof.schedule import Point

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.schedule import Mark, Window

__all__ = ["ActionLog", "HookTimings"]

_CAPACITY: Final = 4096
_STEP: Final = "step"


class ActionLog:
    """Starts and stops of actions in preallocated storage; nothing is computed while they are taken.

    A stop is a negative time. Taking one costs about 0.2 us.
    """

    def __init__(self) -> None:
        self._names: list[str] = [""] * _CAPACITY
        self._times = array("q", bytes(8 * _CAPACITY))
        self._used = 0
        self._steps: dict[int, Mark] = {}
        self._offset_ns = unix_ns(now := time.perf_counter_ns()) - now

    def start(self, name: str) -> None:
        """Take the start of an action."""
        used = self._used
        if used == len(self._names):
            self._grow()
        self._names[used] = name
        self._times[used] = time.perf_counter_ns()
        self._used = used + 1

    def stop(self, name: str) -> None:
        """Take the end of an action."""
        used = self._used
        if used == len(self._names):
            self._grow()
        self._names[used] = name
        self._times[used] = -time.perf_counter_ns()
        self._used = used + 1

    def step(self, mark: Mark) -> None:
        """Take the start or the end of a step, at the mark's own time: others were told of it before us."""
        used = self._used
        self._steps[used] = mark
        if mark.point is Point.STEP_START:
            self.start(_STEP)
        else:
            self.stop(_STEP)
            self._times[used] = self._offset_ns - mark.time_ns

    def rows(self) -> list[dict[str, Any]]:
        """Give one row an action in order of start: its step, name, start, duration and depth.

        The row of a step itself has depth -1 and begins with its first action. Actions that began before the log or
        did not end in it are left out.
        """
        offset = self._offset_ns
        rows: list[dict[str, Any]] = []
        open_rows: list[dict[str, Any]] = []
        mark: Mark | None = None
        for index in range(self._used):
            mark = self._steps.get(index, mark)
            name, moment = self._names[index], self._times[index]
            if moment < 0:
                _close(open_rows, name, offset - moment)
            elif mark is not None:
                is_step = index in self._steps
                first_action = abs(self._times[index + 1]) if is_step and index + 1 < self._used else moment
                row = {
                    "step": mark.step,
                    "global_step": mark.global_step,
                    "recorded": mark.recorded,
                    "action": name,
                    "start_ns": first_action + offset,
                    "duration_ns": None,
                    "depth": len(open_rows) - 1,
                }
                rows.append(row)
                open_rows.append(row)
        return [row for row in rows if row["duration_ns"] is not None]

    def _grow(self) -> None:
        self._names.extend([""] * len(self._names))
        self._times.extend(self._times)


def _close(open_rows: list[dict[str, Any]], name: str, end_ns: int) -> None:
    for depth in range(len(open_rows) - 1, -1, -1):
        if open_rows[depth]["action"] == name:
            open_rows[depth]["duration_ns"] = end_ns - open_rows[depth]["start_ns"]
            del open_rows[depth:]
            return


class HookTimings(Collector):
    """Every action of the Trainer in the window's steps: hooks of each callback, fetches, strategy, optimizer."""

    name: ClassVar[str] = "hooks"

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Listen to the actions."""
        actions = ActionLog()

        def on_mark(mark: Mark) -> None:
            if mark.point in (Point.STEP_START, Point.STEP_END):
                actions.step(mark)

        try:
            with run.actions.listen(actions.start, actions.stop):
                yield on_mark
        finally:
            if rows := actions.rows():
                run.sink.write_rows(window, self.name, rows)
