"""The calls of functions while they happen, and the rows that they leave."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from lightning_memprof.artifacts.naming import SnapshotName
from lightning_memprof.capture.collectors.allocator_history import write_snapshot
from lightning_memprof.capture.collectors.allocator_stats import memory_stats
from lightning_memprof.capture.collectors.memory_stats_file import stats_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_memprof.artifacts.naming import Edge
    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.capture.sources.function_hooks import CallMemory, MeasuredCall
    from lightning_memprof.capture.sources.methods import MethodCall
    from lightning_memprof.schedule import Window

__all__ = ["Counting", "FunctionRows", "Moment"]


class Moment(NamedTuple):
    """Which call it is: its number in file names, from 1, and where the run is; None where that is not known."""

    number: int
    step: int | None
    global_step: int | None


@dataclass(frozen=True)
class Counting:
    """What is recorded, and under which number.

    Attributes:
        moment: called with the function's name at each start; None leaves the call out.
        has_snapshots: whether the allocator is dumped at a function's edges.
        ended: called with the function's name and number behind each recorded end.

    """

    moment: Callable[[str], Moment | None]
    has_snapshots: Callable[[str], bool]
    ended: Callable[[str, int], None] = lambda _function, _number: None


@dataclass(eq=False)
class _Call:
    function: str
    moment: Moment
    depth: int
    thread: int
    thread_name: str | None
    is_named: bool = False
    measured: MeasuredCall | None = None


class FunctionRows:
    """Hears of calls and keeps a row of each start and each end; a ``MethodListener``.

    Args:
        run: of the collector.
        memory: what is measured inside of a call.
        counting: what is recorded.
        guard: makes a function safe to stand in the user's code.
        window: of the collector; None for the whole run.

    Attributes:
        rows: of every call, in order.
        stats: the same values by the key of the stats file, of the first call under each number.

    """

    def __init__(
        self,
        run: RunContext,
        memory: CallMemory,
        counting: Counting,
        guard: Callable[[Callable[..., None]], Any],
        window: Window | None,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self.stats: dict[str, dict[str, Any]] = {}
        self._run = run
        self._memory = memory
        self._counting = counting
        self._window = None if window is None else window.index
        self._process = psutil.Process()
        self._thread = threading.get_ident()
        self._depths: dict[int, int] = {}
        self._open: dict[_Call, None] = {}
        self._named: dict[tuple[str, int], _Call] = {}
        self._is_finished = False
        self._guarded_start = guard(self._start)
        self._guarded_end = guard(self._end)

    def start(self, call: MethodCall, /) -> None:
        """Hear that a call starts."""
        self._guarded_start(call)

    def end(self, call: MethodCall, /) -> None:
        """Hear that it ends."""
        if call.note is not None:
            self._guarded_end(call.note, call.raised)

    def finish(self) -> None:
        """End the calls that are still open, and hear of none any more."""
        self._is_finished = True
        for call in reversed(list(self._open)):
            self._end(call, None)

    def _start(self, call: MethodCall) -> None:
        if self._is_finished or (moment := self._counting.moment(call.function)) is None:
            return
        thread = threading.get_ident()
        depth = self._depths.get(thread, 0)
        name = None if thread == self._thread else threading.current_thread().name
        entry = _Call(call.function, moment, depth, thread, name)
        entry.is_named = self._named.setdefault((call.function, moment.number), entry) is entry
        self._snapshot(entry, "start")
        entry.measured = self._memory.start(call)
        try:
            self._add(entry, "start")
        except BaseException:
            self._memory.end(entry.measured)
            raise
        self._depths[thread] = depth + 1
        self._open[entry] = None
        call.note = entry

    def _end(self, entry: _Call, raised: str | None) -> None:
        if entry not in self._open:
            return
        del self._open[entry]
        self._depths[entry.thread] -= 1
        self._memory.end(entry.measured)
        self._add(entry, "end", raised=raised)
        self._memory.reset()
        self._snapshot(entry, "end")
        self._counting.ended(entry.function, entry.moment.number)

    def _add(self, entry: _Call, edge: Edge, **more: str | None) -> None:
        size = self._process.memory_info()
        values: dict[str, Any] = {} if self._run.device.type == "cpu" else memory_stats(self._run.device)
        values |= {"rss": size.rss, "vms": size.vms, **self._memory.values(entry.measured)}
        self.rows.append(
            {
                "step": entry.moment.step,
                "global_step": entry.moment.global_step,
                "point": edge,
                "recorded": True,
                "time_ns": time.perf_counter_ns() + self._run.unix_offset_ns,
                "function": entry.function,
                "number": entry.moment.number,
                "depth": entry.depth,
                "thread": entry.thread_name,
                **more,
                **values,
            }
        )
        if entry.is_named:
            self.stats[stats_key(self._run.rank, entry.function, entry.moment.number, edge)] = values

    def _snapshot(self, entry: _Call, edge: Edge) -> None:
        if entry.is_named and self._counting.has_snapshots(entry.function):
            name = SnapshotName(self._run.rank, entry.function, entry.moment.number, edge)
            write_snapshot(self._run, name, self._window)
