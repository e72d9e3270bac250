"""Steps that do not end, and the Python stacks of all threads in them."""

from __future__ import annotations

import linecache
import statistics
import sys
import threading
import traceback
from collections import deque
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, ClassVar, Final

from lightning_memprof.artifacts.naming import hang_stacks_name, hangs_name
from lightning_memprof.artifacts.series import HangRow, columns_of, encode_rows
from lightning_memprof.artifacts.sink import ArtifactSpec
from lightning_memprof.capture.base import Collector
from lightning_memprof.capture.sources.assignments import is_library
from lightning_memprof.errors import ConfigError
from lightning_memprof.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from types import FrameType

    from lightning_memprof.capture.base import OnMark, OnStep, Position, RunContext, StepRecord
    from lightning_memprof.capture.clock import StepClock
    from lightning_memprof.schedule import Window

__all__ = ["Hangs", "step_limit"]

_SECOND_NS: Final = 1_000_000_000
_LEAST_NS: Final = 60 * _SECOND_NS
# The first steps compile, choose kernels and start workers.
_FIRST_NS: Final = 600 * _SECOND_NS
_FIRST_STEPS: Final = 3
# Of the median step, and of the longest step with a validation or a checkpoint.
_TIMES: Final = 10
_TIMES_UNUSUAL: Final = 3
_RECENT: Final = 65
_CHECKS: Final = 4
_LONGEST_SLEEP: Final = 15.0
_TRAINERS: Final = ("lightning", "pytorch_lightning")
_OURS: Final = "lightning_memprof"


class Hangs(Collector):
    """Writes the Python stacks of all threads when a step does not end; only writes, and continues to watch.

    A thread compares the time since the start of the step with a limit, four times per limit. By default the limit is
    10 times the median step and at least 60 s; 10 minutes in the first 3 steps. A step with a validation, a checkpoint
    or the end of an epoch has 10 times as long, and at least 3 times the longest such step before it. C code that
    holds the interpreter's lock delays the stacks until it releases it.

    Args:
        max_step_seconds: the limit of a step without validation, checkpoint or end of an epoch; None for the default.

    Raises:
        ConfigError: the limit is not a positive number.

    """

    name: ClassVar[str] = "hangs"
    every_rank: ClassVar[bool] = True

    def __init__(self, *, max_step_seconds: float | None = None) -> None:
        if max_step_seconds is not None and (
            type(max_step_seconds) not in (int, float) or not 0 < max_step_seconds < threading.TIMEOUT_MAX
        ):
            raise ConfigError(
                f"Hangs(max_step_seconds={max_step_seconds!r}): must be a number of seconds above 0, or None for 10 "
                "times the median step"
            )
        self._seconds = max_step_seconds

    def record(self, run: RunContext, window: Window) -> AbstractContextManager[OnMark | None]:  # noqa: ARG002
        """Record nothing per window."""
        return nullcontext(None)

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:
        """Watch the steps of the run."""
        watch = _Watch(run, None if self._seconds is None else round(self._seconds * _SECOND_NS))
        watch.start()
        try:
            yield watch.step
        finally:
            watch.stop()
            watch.list_files()


def step_limit(durations: Sequence[int], longest_unusual: int, chosen: int | None, *, is_usual: bool) -> int:
    """Return the limit of a step in nanoseconds.

    Args:
        durations: of the last usual steps, in ns.
        longest_unusual: of the steps with a validation, a checkpoint or the end of an epoch, in ns.
        chosen: limit of a usual step in ns; None for :class:`Hangs`' default.
        is_usual: whether the step has none of these so far.

    """
    limit = chosen
    if limit is None:
        is_known = len(durations) >= _FIRST_STEPS
        limit = max(_LEAST_NS, round(_TIMES * statistics.median(durations))) if is_known else _FIRST_NS
    return limit if is_usual else max(_TIMES * limit, _TIMES_UNUSUAL * longest_unusual)


class _Watch:
    """Watches the current step of the thread that creates it.

    Args:
        run: the run.
        limit_ns: see :class:`Hangs`.

    """

    def __init__(self, run: RunContext, limit_ns: int | None) -> None:
        self._run = run
        self._limit_ns = limit_ns
        self._training = threading.get_ident()
        self._durations: deque[int] = deque(maxlen=_RECENT)
        self._longest_unusual = 0
        # By their start, as of the clock: the step that was reported, and the last one that ended. Until the next one
        # starts the clock, it has that of the last.
        self._reported_ns = 0
        self._ended_ns = 0
        # A report is complete before its step can end.
        self._reporting = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memprof-hangs", daemon=True)
        directory = run.sink.place.directory
        self._rows = directory / hangs_name(run.rank)
        self._stacks = directory / hang_stacks_name(run.rank)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._done.set()
        self._thread.join()

    def list_files(self) -> None:
        """List the files in the manifest."""
        if self._rows.exists():
            self._run.sink.list_artifact(ArtifactSpec(path=self._rows, type="series", collector=Hangs.name))
            self._run.sink.list_artifact(ArtifactSpec(path=self._stacks, type="blob", collector=Hangs.name))

    def step(self, record: StepRecord) -> None:
        """Add a finished step; about 0.2 µs."""
        if record.usual:
            self._durations.append(record.duration_ns)
        else:
            self._longest_unusual = max(self._longest_unusual, record.duration_ns)
        self._ended_ns = record.start_ns - self._run.unix_offset_ns
        if self._reported_ns:
            with self._reporting:
                self._reported_ns = 0
                self._write(HangRow(kind="end", step=record.step, waited_ns=record.duration_ns))

    def _limit(self) -> int:
        # Other than iterating, copying a deque is one step for other threads.
        durations = self._durations.copy()
        is_usual = self._run.progress.is_usual
        return step_limit(durations, self._longest_unusual, self._limit_ns, is_usual=is_usual)

    def _watch(self) -> None:
        while not self._done.wait(min(self._limit() / _SECOND_NS / _CHECKS, _LONGEST_SLEEP)):
            try:
                self._check()
            except Exception as error:  # noqa: BLE001 a full disk, or a step that ends meanwhile, must not end the thread
                self._run.faults.report(Hangs.name, "mark", None, error)
                return

    def _check(self) -> None:
        progress = self._run.progress
        position, clock = progress.position, progress.clock
        if position is None or clock is None:
            return
        start, limit = clock.start_ns, self._limit()
        waited = perf_counter_ns() - start
        if waited <= limit or start == self._reported_ns:
            return
        with self._reporting:
            self._reported_ns = start
            # Set before it is compared: a step that ends from here on waits for the report.
            if start == self._ended_ns or start != clock.start_ns:
                self._reported_ns = 0
                return
            self._report(position, clock, waited, limit)

    def _report(self, position: Position, clock: StepClock, waited: int, limit: int) -> None:
        frames = sys._current_frames()  # noqa: SLF001 the documented way to the stacks of all threads
        del frames[threading.get_ident()]
        training = frames[self._training]
        place, source = _place(training)
        with self._stacks.open("a", encoding="utf-8") as file:
            file.write(f"Step {position.step} has not ended after {format_ns(waited)} (limit {format_ns(limit)}).\n")
            file.writelines(_stacks(frames, self._training))
        self._write(
            HangRow(
                kind="hang",
                step=position.step,
                global_step=position.global_step,
                time_ns=clock.start_ns + waited + self._run.unix_offset_ns,
                phase=clock.phase,
                waited_ns=waited,
                limit_ns=limit,
                function=_function(training),
                place=place,
                source=source,
            )
        )

    def _write(self, row: HangRow) -> None:
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(encode_rows([columns_of(row)]))


def _function(frame: FrameType) -> str:
    """Return the module and the name of a frame's function."""
    name = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
    return f"{frame.f_globals.get('__name__', '?')}.{name}"


def _place(innermost: FrameType) -> tuple[str | None, str | None]:
    """Return the innermost line of the program, with its function, and its source; None where the Trainer runs it."""
    frame: FrameType | None = innermost
    found: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if found is not None and package in _TRAINERS:
            source = linecache.getline(found.f_code.co_filename, found.f_lineno).strip()
            return f"{Path(found.f_code.co_filename).name}:{found.f_lineno} in {found.f_code.co_name}", source or None
        if (
            found is None
            and package != _OURS
            and not code.co_filename.startswith("<")
            and not is_library(code.co_filename)
        ):
            found = frame
        frame = frame.f_back
    return None, None


def _stacks(frames: dict[int, FrameType], training: int) -> Iterator[str]:
    """Yield the stacks of all threads, that of the training first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident in sorted(frames, key=lambda ident: ident != training):
        yield f"\nThread {names.get(ident, ident)}{', the training' if ident == training else ''}:\n"
        yield from traceback.format_stack(frames[ident])
    yield "\n"
