"""Memory at the start and end of named functions."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import psutil

from lightning_memprof.artifacts.naming import Edge, SnapshotName, StatsFormat, functions_name
from lightning_memprof.artifacts.series import FunctionRow, columns_of, encode_rows
from lightning_memprof.artifacts.sink import ArtifactSpec
from lightning_memprof.capture.base import Collector, OnMark, OnStep, RunContext, StepRecord
from lightning_memprof.capture.collectors.allocator_history import memory_history, write_snapshot
from lightning_memprof.capture.function_rows import stats_key, write_memory_stats
from lightning_memprof.capture.sources.call_memory import CallMemory, UserHooks
from lightning_memprof.capture.sources.memory import memory_stats
from lightning_memprof.capture.sources.methods import IN_COMPILED, marked_methods, method_calls, unsupported_method
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Mark, Point, Window

if TYPE_CHECKING:
    from lightning_memprof.capture.sources.call_memory import Forwards
    from lightning_memprof.capture.sources.methods import MethodCall


@dataclass(frozen=True)
class CallRange:
    """Calls number ``first`` to ``last`` of each function, counted from 1 since the start of the run.

    Raises:
        ConfigError: the range is empty.
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        """Validate the range."""
        if self.first < 1 or self.last < self.first:
            raise ConfigError(f"CallRange(first={self.first}, last={self.last}): must be 1 <= first <= last")


@dataclass(frozen=True, kw_only=True)
class FunctionMemory(Collector):
    """Memory at the start and end of named methods of the LightningModule, and of methods marked `memprofilable`.

    Each start and each end is a row of the series; those of a step's first call are also entries
    ``{rank}.{function}.{number}.{start|end}`` of ``rank_{rank}_memory_stats.yaml``: every statistic of the device's
    allocator under torch's names, ``rss`` and ``vms`` in bytes, and with hooks

    - ``rss_pre_forward``: RSS at the start of the first outermost forward of a module in the call;
      ``rss_post_forward``: at the end of the last one; ``rss_diff``: total growth over the outermost forwards.
      Without a forward they are 0.
    - ``npp_pre_forward``, ``npp_post_forward``, ``npp_diff``: the same for the bytes that autograd saved for backward
      since the start of the call, each storage once and completely, without those of parameters and buffers.

    Hook values are None in threads other than the training's, in generators and coroutines, and if a part of the
    model is compiled. A call of a generator starts and ends with its body.

    Saved-tensor hooks restrict the program, so they are off by default: ``torch.func.grad`` and ``torch.func.jacrev``
    raise under them, as does ``disable_saved_tensors_hooks``; a custom function gets a saved parameter back as a plain
    tensor without its attributes; the text of autograd's in-place error differs; the operator trace contains
    ``aten::detach`` for each saved tensor. Losses and gradients of any order are the same, and the in-place error is
    still raised. ``SavedTensors`` needs no hooks.

    Args:
        functions: names of methods. Outside fit ``training_step`` means the stage's own step, ``validation_step`` for
            instance.
        memory_hooks: read RSS at forwards.
        saved_tensors_hooks: count the bytes of saved activations.
        allocator_snapshots: functions at whose start and end a CUDA allocator snapshot is written; True is all.
        dump_yaml: write the YAML file.
        dump_pickle: write the same as ``rank_{rank}_memory_stats.pickle``, a dict of dicts.
        calls: record these calls of each function, independently of the schedule; ``number`` is then the call's. None
            records the windows' steps, and ``number`` is the step + 1.
        user_hooks: your own hooks.
    """

    name: ClassVar[str] = "functions"

    functions: Sequence[str] = ("training_step",)
    memory_hooks: bool = True
    saved_tensors_hooks: bool = False
    allocator_snapshots: Sequence[str] | bool = False
    dump_yaml: bool = True
    dump_pickle: bool = False
    calls: CallRange | None = None
    user_hooks: UserHooks | None = None

    def __post_init__(self) -> None:
        """Validate the names.

        Raises:
            ConfigError: an option for names is a string, or contains something else.
        """
        for option in ("functions", "allocator_snapshots"):
            value = getattr(self, option)
            if isinstance(value, bool) and option == "allocator_snapshots":
                continue
            if isinstance(value, str) or not all(isinstance(name, str) for name in value):
                msg = f"FunctionMemory({option}={value!r}): must be a list of method names, as in ['training_step']"
                raise ConfigError(msg)

    def unavailable(self, run: RunContext) -> str | None:
        """Return a reason if a name is not a method of the model, or snapshots are requested without CUDA."""
        if self.allocator_snapshots and run.device.type != "cuda":
            return f"allocator_snapshots needs CUDA, and the model is on {run.device}"
        names = _names(self, run)
        reasons = [reason for name in names if (reason := unsupported_method(run.model, name))]
        missing = [reason for reason in reasons if not reason.endswith(IN_COMPILED)]
        if missing or (reasons and len(reasons) == len(names)):
            return "; ".join(missing or reasons)
        return None

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Record the functions' calls in the window's recorded steps, and write the rows at its end."""
        if self.calls is not None:
            yield None
            return
        recording = _Recording(run, self, window)
        try:
            with recording:
                recording.observe()
                recording.open_hooks()
                yield recording.on_mark
        finally:
            recording.write()

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:
        """With ``calls``: record the functions until their last call is done, and write the rows."""
        if self.calls is None:
            yield None
            return
        recording = _CountedCalls(run, self, self.calls)
        try:
            with recording:
                recording.observe()
                yield recording.on_step
        finally:
            recording.write()


def _names(settings: FunctionMemory, run: RunContext) -> tuple[str, ...]:
    aliases = {} if run.stage == "fit" else {"training_step": run.function}
    return tuple(dict.fromkeys(aliases.get(name, name) for name in settings.functions))


class _Number(NamedTuple):
    """A call's number in file names, from 1, and its place in the run; None if unknown."""

    number: int
    step: int | None
    global_step: int | None


@dataclass(eq=False, kw_only=True)
class _Call:
    number: _Number
    depth: int
    thread: int
    thread_name: str | None
    is_named: bool
    measured: Forwards | None = None


class _Recording(ExitStack):
    """The functions while their calls are recorded; the rows and the hooks end with the context.

    A ``MethodListener``: it collects a row for each start and each end of a call.

    Args:
        run: of the collector.
        settings: the collector.
        window: its window; None for the whole run.
    """

    def __init__(self, run: RunContext, settings: FunctionMemory, window: Window | None) -> None:
        super().__init__()
        guard = partial(run.guarded, collector=settings.name, window=window)
        self.names: set[str] = set()
        self.memory = CallMemory(
            run,
            guard,
            memory=settings.memory_hooks,
            saved_tensors=settings.saved_tensors_hooks,
            user=settings.user_hooks,
        )
        self.start, self.end = guard(self._start), guard(self._end)
        self._run = run
        self._settings = settings
        self._window = window
        self._now: _Number | None = None
        self._thread = get_ident()
        self._process = psutil.Process()
        self._rows: list[dict[str, Any]] = []
        # The same values by the key of the stats file, for the first call under each number.
        self._stats: dict[str, dict[str, Any]] = {}
        self._named: dict[tuple[str, int], MethodCall] = {}
        self._open: dict[MethodCall, _Call] = {}
        self._depths: Counter[int] = Counter()
        self._is_finished = False

    def observe(self) -> None:
        """Wrap the functions."""
        run = self._run
        if self._settings.allocator_snapshots:
            self.enter_context(memory_history())
        self.callback(self.memory.close)
        self.callback(self._finish)
        wanted = _names(self._settings, run)
        # Compiled methods are recognized only until the first one is wrapped: all are checked before.
        self.names = {name for name in wanted if not self._report(unsupported_method(run.model, name))}
        for name in wanted:
            if name in self.names:
                self.enter_context(method_calls(run.model, name, self))
        self.enter_context(marked_methods(self))

    def open_hooks(self) -> None:
        """Add the hooks of this thread."""
        self._report(self.memory.open())

    def on_mark(self, mark: Mark) -> None:
        """Number the calls of recorded steps by the step."""
        if mark.point is Point.STEP_START and mark.recorded:
            self._now = _Number(mark.step + 1, mark.step, mark.global_step)
        elif mark.point is Point.STEP_END:
            self._now = None

    def write(self) -> None:
        """Write the rows, once."""
        sink, settings, name = self._run.sink, self._settings, self._settings.name
        rows, self._rows = self._rows, []
        if not rows:
            return
        if self._window is not None:
            sink.write_rows(self._window, name, rows)
        else:
            path = sink.place.directory / functions_name(sink.rank)
            sink.write_text(ArtifactSpec(path=path, type="series", collector=name), encode_rows(rows))
        forms: tuple[tuple[StatsFormat, bool], ...] = ("yaml", settings.dump_yaml), ("pickle", settings.dump_pickle)
        write_memory_stats(sink, name, self._stats, [form for form, is_wanted in forms if is_wanted])

    def _number(self, function: str) -> _Number | None:  # noqa: ARG002 for overriding
        """Return the number of a call that starts; None omits it."""
        return self._now

    def _ended(self, function: str, number: int) -> None:
        """Handle the recorded end of a call."""

    def _start(self, call: MethodCall) -> None:
        if self._is_finished or (number := self._number(call.function)) is None:
            return
        thread = get_ident()
        entry = _Call(
            number=number,
            depth=self._depths[thread],
            thread=thread,
            thread_name=None if thread == self._thread else threading.current_thread().name,
            is_named=self._named.setdefault((call.function, number.number), call) is call,
        )
        self._snapshot(call.function, entry, "start")
        entry.measured = self.memory.start(call)
        try:
            self._add(call, entry, "start")
        except BaseException:
            self.memory.end(entry.measured)
            raise
        self._depths[thread] += 1
        self._open[call] = entry

    def _end(self, call: MethodCall) -> None:
        entry = self._open.pop(call, None)
        if entry is None:
            return
        self._depths[entry.thread] -= 1
        self.memory.end(entry.measured)
        self._add(call, entry, "end")
        self.memory.reset()
        self._snapshot(call.function, entry, "end")
        self._ended(call.function, entry.number.number)

    def _finish(self) -> None:
        """End the open calls and record no further ones."""
        self._is_finished = True
        for call in reversed(list(self._open)):
            self._end(call)

    def _add(self, call: MethodCall, entry: _Call, edge: Edge) -> None:
        size = self._process.memory_info()
        values = memory_stats(self._run.device)
        values |= {"rss": size.rss, "vms": size.vms, **self.memory.values(entry.measured)}
        row = FunctionRow(
            step=entry.number.step,
            global_step=entry.number.global_step,
            point=edge,
            recorded=True,
            time_ns=time.perf_counter_ns() + self._run.unix_offset_ns,
            function=call.function,
            number=entry.number.number,
            depth=entry.depth,
            thread=entry.thread_name,
            raised=call.raised,
        )
        self._rows.append(columns_of(row) | values)
        if entry.is_named:
            self._stats[stats_key(self._run.rank, call.function, entry.number.number, edge)] = values

    def _snapshot(self, function: str, entry: _Call, edge: Edge) -> None:
        wanted = self._settings.allocator_snapshots
        if entry.is_named and (wanted if isinstance(wanted, bool) else function in wanted):
            name = SnapshotName(rank=self._run.rank, function=function, number=entry.number.number, edge=edge)
            write_snapshot(self._run, str(name), None if self._window is None else self._window.index)

    def _report(self, reason: str | None) -> bool:
        """Write a reason to the manifest, in the first window only; return whether there is one."""
        if reason is not None and (self._window is None or self._window.index == 0):
            self._run.note_unavailable(self._settings.name, reason)
        return reason is not None


class _CountedCalls(_Recording):
    """Functions that are recorded by call number: during the whole run, until their last calls are done."""

    def __init__(self, run: RunContext, settings: FunctionMemory, calls: CallRange) -> None:
        super().__init__(run, settings, None)
        self._calls = calls
        self._counts: dict[str, Iterator[int]] = {}
        self._step: int | None = None
        self._is_done = False

    def on_step(self, record: StepRecord) -> None:
        self._step = record.step + 1
        if self._is_done:
            self.write()

    def _number(self, function: str) -> _Number | None:
        number = next(self._counts.setdefault(function, itertools.count(1)))
        if not self._calls.first <= number <= self._calls.last:
            return None
        if not self.memory.is_open and get_ident() == self._thread:
            self.open_hooks()
        return _Number(number, self._step, getattr(self._run.model, "global_step", None))

    def _ended(self, function: str, number: int) -> None:
        if number >= self._calls.last and function in self.names:
            self.names.remove(function)
            if not self.names:
                self._is_done = True
                self.close()
