"""When every event of the Trainer began and how long it took."""

from __future__ import annotations

import time
from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from lightning_memprof.capture.base import Collector, OnMark, unix_offset_ns
from lightning_memprof.capture.collectors.hook_events import timed_fetches, timed_parts
from lightning_memprof.schedule import Point

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.schedule import Mark, Window

__all__ = ["ActionLog", "HookTimings"]

_CAPACITY: Final = 4096
_STEP: Final = "step"
# The action of our own work at a mark.
_MARK: Final = "[MemProfiler]"


class ActionLog:
    """Starts and stops of actions in preallocated storage; nothing is computed while they are taken.

    A stop is a negative time. Taking one costs about 0.2 us.

    Args:
        offset_ns: of the run, see :class:`RunContext`; None is that of this moment.

    """

    def __init__(self, offset_ns: int | None = None) -> None:
        self._names: list[str] = [""] * _CAPACITY
        self._times = array("q", bytes(8 * _CAPACITY))
        self._used = 0
        self._marks: dict[int, Mark] = {}
        self._offset_ns = unix_offset_ns() if offset_ns is None else offset_ns

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

    def mark(self, mark: Mark) -> None:
        """Take a mark at its own time: others were told of it before us."""
        used = self._used
        self._marks[used] = mark
        if mark.point is Point.STEP_START:
            self.start(_STEP)
            return
        if mark.point is Point.STEP_END:
            self.stop(_STEP)
        else:
            self.stop(_MARK + mark.point.value)
        self._times[used] = self._offset_ns - mark.time_ns

    def rows(self) -> list[dict[str, Any]]:
        """Give one row an action in order of start: its step, name, start, duration and depth.

        The row of a step itself has depth -1 and begins with its first action. A mark inside of a step is an action
        too, ``[MemProfiler]`` and its point: all collectors' work at it, until the next event. Actions that began
        before the log or did not end in it are left out.
        """
        offset = self._offset_ns
        rows: list[dict[str, Any]] = []
        open_rows: list[dict[str, Any]] = []
        mark: Mark | None = None
        for index in range(self._used):
            here = self._marks.get(index)
            mark = here or mark
            name, moment = self._names[index], self._times[index]
            following = abs(self._times[index + 1]) if index + 1 < self._used else None
            if here is not None and name.startswith(_MARK):
                if following is not None:
                    rows.append(_row(here, name, (offset - moment, following + offset), len(open_rows) - 1))
            elif moment < 0:
                _close(open_rows, name, offset - moment)
            elif mark is not None:
                first_action = moment if here is None or following is None else following
                row = _row(mark, name, (first_action + offset, None), len(open_rows) - 1)
                rows.append(row)
                open_rows.append(row)
        return [row for row in rows if row["duration_ns"] is not None]

    def _grow(self) -> None:
        self._names.extend([""] * len(self._names))
        self._times.extend(self._times)


def _row(mark: Mark, action: str, span_ns: tuple[int, int | None], depth: int) -> dict[str, Any]:
    start, end = span_ns
    return {
        "step": mark.step,
        "global_step": mark.global_step,
        "recorded": mark.recorded,
        "action": action,
        "start_ns": start,
        "duration_ns": None if end is None else end - start,
        "depth": depth,
    }


def _close(open_rows: list[dict[str, Any]], name: str, end_ns: int) -> None:
    for depth in range(len(open_rows) - 1, -1, -1):
        if open_rows[depth]["action"] == name:
            open_rows[depth]["duration_ns"] = end_ns - open_rows[depth]["start_ns"]
            del open_rows[depth:]
            return


class HookTimings(Collector):
    """Every event of the Trainer in the window's steps.

    That is each hook of each callback and of the module, fetches and their parts, transfers, strategy, precision,
    optimizers, loggers, checkpoints, a validation inside fit, and our own work at the marks.
    """

    name: ClassVar[str] = "hooks"
    every_rank: ClassVar[bool] = True

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Listen to the actions, and stand in front of what is no action."""
        actions = ActionLog(run.unix_offset_ns)
        told = actions.start, actions.stop
        try:
            with timed_parts(run.parts(), *told), timed_fetches(*told), run.actions.listen(*told):
                yield actions.mark
        finally:
            if rows := actions.rows():
                run.sink.write_rows(window, self.name, rows)
