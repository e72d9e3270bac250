"""Start and duration of every action of the Trainer in a window."""

from __future__ import annotations

import functools
import inspect
import os
import time
from contextlib import ExitStack, contextmanager
from threading import get_ident
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from torch.compiler import is_compiling

from lightning_memprof.artifacts.series import HookRow, LineRow
from lightning_memprof.capture.base import Collector, OnMark
from lightning_memprof.capture.observe import wrapped
from lightning_memprof.capture.threads import LineSampler
from lightning_memprof.capture.torch_internals import (
    _BaseDataLoaderIter,
    _IterableDatasetFetcher,
    _MapDatasetFetcher,
    _MultiProcessingDataLoaderIter,
)
from lightning_memprof.schedule import Point

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lightning_memprof.capture.base import RunContext, TimedPart
    from lightning_memprof.capture.observe import Link
    from lightning_memprof.schedule import Mark, Window

    Report = Callable[[str], None]
    # Returns the action name for a call of this object's method, or None if the call is not reported.
    ActionOf = Callable[[Any], str | None]

_STEP: Final = "step"
# The action of the collectors' work at a mark.
_MARK: Final = "[MemProfiler]"
_FETCH: Final = "fetch"
# torch's classes and methods, and their names in actions; torch has no public ones.
_FETCHES: Final = (
    (_BaseDataLoaderIter, "_next_index", "sampler"),
    (_MultiProcessingDataLoaderIter, "_get_data", "workers"),
    (_MapDatasetFetcher, "fetch", _FETCH),
    (_IterableDatasetFetcher, "fetch", _FETCH),
)


class HookTimings(Collector):
    """Every action of the Trainer in the window's steps.

    These are the hooks of each callback and of the module, fetches and their parts, transfers, strategy, precision,
    optimizers, loggers, checkpoints, a validation inside fit, and the collectors' work at the marks. A thread looks at
    the program's line every millisecond, for the series ``lines``.
    """

    name: ClassVar[str] = "hooks"
    every_rank: ClassVar[bool] = True

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Listen to the actions, and wrap the methods that are not actions."""
        log = ActionLog(run.unix_offset_ns)
        sampler = LineSampler()

        def on_mark(mark: Mark) -> None:
            sampler.is_open = mark.point is not Point.STEP_END
            log.mark(mark)

        try:
            with (
                sampler,
                timed_parts(run.parts(), log.start, log.stop),
                timed_fetches(log.start, log.stop),
                run.actions.listen(log.start, log.stop),
            ):
                yield on_mark
        finally:
            run.sink.write_rows(window, self.name, log.rows())
            run.sink.write_rows(window, LineRow.series, sampler.rows())


class ActionLog:
    """Starts and stops of actions; nothing is computed while they are recorded.

    A stop is a negative time. Recording one costs about 0.2 µs.

    Args:
        offset_ns: of the run, see :class:`RunContext`.
    """

    def __init__(self, offset_ns: int) -> None:
        # Name and time of each event, added in one call: a signal may come between two.
        self._log: list[Any] = []
        self._marks: dict[int, Mark] = {}
        self._offset_ns = offset_ns

    def start(self, name: str) -> None:
        """Record the start of an action."""
        self._log.extend((name, time.perf_counter_ns()))

    def stop(self, name: str) -> None:
        """Record the end of an action."""
        self._log.extend((name, -time.perf_counter_ns()))

    def mark(self, mark: Mark) -> None:
        """Record a mark at its time, the start of a step at the time of this call: other collectors got it earlier."""
        self._marks[len(self._log) // 2] = mark
        if mark.point is Point.STEP_START:
            self.start(_STEP)
        else:
            name = _STEP if mark.point is Point.STEP_END else _MARK + mark.point.value
            self._log.extend((name, self._offset_ns - mark.time_ns))

    def rows(self) -> list[HookRow]:
        """Return one row per action in order of start: its step, name, start, duration and depth.

        The row of a step has depth -1 and starts with its first action. A mark inside a step is an action too,
        ``[MemProfiler]`` and its point: the work of all collectors at it, until the next event. Actions that started
        before the log or did not end in it are omitted.
        """
        offset = self._offset_ns
        rows: list[HookRow] = []
        open_rows: list[HookRow] = []
        mark: Mark | None = None
        times = self._log[1::2]
        for index, (name, moment) in enumerate(zip(self._log[::2], times, strict=True)):
            here = self._marks.get(index)
            mark = here or mark
            following = abs(times[index + 1]) if index + 1 < len(times) else None
            if here is not None and name.startswith(_MARK):
                if following is not None:
                    row = _row(here, name, offset - moment, len(open_rows) - 1)
                    row.duration_ns = following + moment
                    rows.append(row)
            elif moment < 0:
                _close(open_rows, name, offset - moment)
            elif mark is not None:
                first_action = moment if here is None or following is None else following
                row = _row(mark, name, first_action + offset, len(open_rows) - 1)
                rows.append(row)
                open_rows.append(row)
        return [row for row in rows if row.duration_ns is not None]


def _row(mark: Mark, action: str, start_ns: int, depth: int) -> HookRow:
    return HookRow(
        step=mark.step,
        global_step=mark.global_step,
        recorded=mark.recorded,
        action=action,
        start_ns=start_ns,
        depth=depth,
    )


def _close(open_rows: list[HookRow], name: str, end_ns: int) -> None:
    for depth in range(len(open_rows) - 1, -1, -1):
        row = open_rows[depth]
        if row.action == name:
            row.duration_ns = end_ns - (row.start_ns or 0)
            del open_rows[depth:]
            return


@contextmanager
def timed_parts(parts: Iterable[TimedPart], start: Report, stop: Report) -> Iterator[None]:
    """Call ``start`` and ``stop`` with a part's action around every call of its method while the context is open.

    Calls in other threads are not reported.
    """
    thread = get_ident()
    is_open = [True]
    actions: dict[tuple[type, str], dict[int, str]] = {}

    def of_instance(action: str, _: Any) -> str | None:
        return action if is_open and get_ident() == thread else None

    def of_class(known: dict[int, str], owner: Any) -> str | None:
        action = known.get(id(owner)) if is_open else None
        return action if action is not None and get_ident() == thread else None

    with ExitStack() as undo:
        undo.callback(is_open.clear)
        for owner, method, action, *_ in parts:
            known = actions.setdefault((type(owner), method), {})
            if isinstance(inspect.getattr_static(type(owner), method, None), FunctionType):
                known[id(owner)] = action
            if method in getattr(owner, "__dict__", {}):
                action_of = functools.partial(of_instance, known.pop(id(owner), action))
                undo.enter_context(wrapped(owner, method, functools.partial(_reported, action_of, (start, stop))))
        for (cls, method), known in actions.items():
            if known:
                wrap = functools.partial(_reported, functools.partial(of_class, known), (start, stop))
                undo.enter_context(wrapped(cls, method, wrap))
        yield


@contextmanager
def timed_fetches(start: Report, stop: Report) -> Iterator[None]:
    """Call ``start`` and ``stop`` around the parts of a fetch from torch's data loaders while the context is open.

    The actions are ``[DataLoader]DATASET.sampler``, ``.workers`` (the wait for a batch from another process),
    ``.fetch`` (the data set in this process) and inside it ``.collate``. Only loaders that are iterated in the thread
    that opens the context are reported; worker processes pass through.
    """
    here = [(os.getpid(), get_ident())]

    def action_of(part: str, iterator: Any) -> str | None:
        # A worker that was forked from this thread has its number.
        if not here or here[0] != (os.getpid(), get_ident()):
            return None
        # A data set may be a tensor, or another object without a truth value.
        dataset = getattr(iterator, "dataset", getattr(iterator, "_dataset", None))
        return f"[DataLoader]{type(dataset).__name__}.{part}"

    with ExitStack() as undo:
        undo.callback(here.clear)
        for cls, method, part in _FETCHES:
            if method in vars(cls):
                wrap = functools.partial(_reported, functools.partial(action_of, part), (start, stop))
                undo.enter_context(wrapped(cls, method, wrap))
                if part == _FETCH:
                    wrap = functools.partial(_collated, functools.partial(action_of, "collate"), (start, stop))
                    undo.enter_context(wrapped(cls, method, wrap))
        yield


def _reported(action_of: ActionOf, report: tuple[Report, Report], link: Link) -> Callable[..., Any]:
    """Return a method that reports its calls and calls the method below."""
    start, stop = report

    def call(*args: Any, **keywords: Any) -> Any:
        __tracebackhide__ = True
        # First: a compiled region that steps its optimizer must trace nothing of ours.
        if is_compiling() or (action := action_of(args[0] if args else None)) is None:
            return link.call(*args, **keywords)
        start(action)
        try:
            return link.call(*args, **keywords)
        finally:
            stop(action)

    # torch marks an optimizer's step with attributes, and reads signatures.
    return functools.update_wrapper(call, link.below)


def _collated(action_of: ActionOf, report: tuple[Report, Report], link: Link) -> Callable[..., Any]:
    """Return a fetch in which the fetcher's ``collate_fn``, an attribute of the instance, reports its call."""

    def call(fetcher: Any, *args: Any, **keywords: Any) -> Any:
        __tracebackhide__ = True
        action = action_of(fetcher)
        if action is None:
            return link.call(fetcher, *args, **keywords)
        with wrapped(fetcher, "collate_fn", functools.partial(_reported, lambda _: action, report)):
            return link.call(fetcher, *args, **keywords)

    return functools.update_wrapper(call, link.below)
