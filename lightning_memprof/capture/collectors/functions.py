"""Memory at the start and end of named functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, ClassVar

from lightning_memprof.artifacts.naming import StatsFormat, functions_name
from lightning_memprof.artifacts.series import encode_rows
from lightning_memprof.artifacts.sink import ArtifactSpec
from lightning_memprof.capture.base import Collector, OnMark, OnStep, RunContext, StepRecord
from lightning_memprof.capture.collectors.allocator_history import memory_history
from lightning_memprof.capture.function_rows import CallNumber, Counting, FunctionRows, write_memory_stats
from lightning_memprof.capture.sources.call_memory import CallMemory, UserHooks
from lightning_memprof.capture.sources.methods import IN_COMPILED, marked_methods, method_calls, unsupported_method
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Mark, Point, Window


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
        retain_hooks_for: with ``calls``, the hooks are removed when these functions are done; empty is all functions.
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
    retain_hooks_for: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Validate the names.

        Raises:
            ConfigError: an option for names is a string, or contains something else.
        """
        for option in ("functions", "allocator_snapshots", "retain_hooks_for"):
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
        reasons = [reason for name in self._names(run) if (reason := unsupported_method(run.model, name))]
        missing = [reason for reason in reasons if not reason.endswith(IN_COMPILED)]
        if missing or (reasons and len(reasons) == len(self._names(run))):
            return "; ".join(missing or reasons)
        return None

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Record the functions' calls in the window's recorded steps, and write the rows at its end."""
        if self.calls is not None:
            yield None
            return
        steps = _Steps()
        guard = partial(run.guarded, collector=self.name, window=window)
        memory = self._memory(run, guard)
        rows = FunctionRows(run, memory, Counting(steps.number, self._has_snapshots), guard, window)
        try:
            with ExitStack() as stack:
                if self.allocator_snapshots:
                    stack.enter_context(memory_history())
                stack.callback(memory.close)
                stack.callback(rows.finish)
                self._report(run, memory.open(), window)
                for name in self._supported_names(run, window):
                    stack.enter_context(method_calls(run.model, name, rows))
                stack.enter_context(marked_methods(rows))
                yield steps.on_mark
        finally:
            if rows.rows:
                run.sink.write_rows(window, self.name, rows.rows)
                write_memory_stats(run.sink, self.name, rows.stats, self._forms())

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:
        """With ``calls``: record the functions until their last call is done, and write the rows."""
        if self.calls is None:
            yield None
            return
        counted = _CountedCalls(run, self, self.calls)
        counted.open()
        try:
            yield counted.on_step
        finally:
            counted.close()

    def _names(self, run: RunContext) -> tuple[str, ...]:
        aliases = {} if run.stage == "fit" else {"training_step": run.function}
        return tuple(dict.fromkeys(aliases.get(name, name) for name in self.functions))

    def _supported_names(self, run: RunContext, window: Window | None) -> list[str]:
        # Compiled methods are recognized only until the first one is wrapped: all are checked before.
        return [name for name in self._names(run) if not self._report(run, unsupported_method(run.model, name), window)]

    def _memory(self, run: RunContext, guard: Callable[..., Any]) -> CallMemory:
        return CallMemory(
            run, guard, memory=self.memory_hooks, saved_tensors=self.saved_tensors_hooks, user=self.user_hooks
        )

    def _has_snapshots(self, function: str) -> bool:
        wanted = self.allocator_snapshots
        return wanted if isinstance(wanted, bool) else function in wanted

    def _forms(self) -> list[StatsFormat]:
        forms: list[tuple[StatsFormat, bool]] = [("yaml", self.dump_yaml), ("pickle", self.dump_pickle)]
        return [form for form, wanted in forms if wanted]

    def _report(self, run: RunContext, reason: str | None, window: Window | None) -> bool:
        """Write a reason to the manifest, in the first window only; return whether there is one."""
        if reason is not None and (window is None or window.index == 0):
            run.note_unavailable(self.name, reason)
        return reason is not None


class _Steps:
    """Numbers calls by the step + 1, in recorded steps."""

    def __init__(self) -> None:
        self._now: CallNumber | None = None

    def on_mark(self, mark: Mark) -> None:
        if mark.point is Point.STEP_START and mark.recorded:
            self._now = CallNumber(mark.step + 1, mark.step, mark.global_step)
        elif mark.point is Point.STEP_END:
            self._now = None

    def number(self, _function: str) -> CallNumber | None:
        return self._now


class _CountedCalls:
    """Functions that are recorded by call number: during the whole run, each until its last call is done."""

    def __init__(self, run: RunContext, settings: FunctionMemory, calls: CallRange) -> None:
        guard = partial(run.guarded, collector=settings.name)
        self._run = run
        self._settings = settings
        self._calls = calls
        self._memory = settings._memory(run, guard)  # noqa: SLF001 part of the collector
        counting = Counting(self._number, settings._has_snapshots, self._ended)  # noqa: SLF001 part of the collector
        self._rows = FunctionRows(run, self._memory, counting, guard, None)
        self._counts: dict[str, Iterator[int]] = {}
        self._observed: dict[str, AbstractContextManager[None]] = {}
        self._waits_for: set[str] = set()
        self._has_hooks = True
        self._shared = ExitStack()
        self._thread = get_ident()
        self._step: int | None = None
        self._is_done = False
        self._is_written = False

    def open(self) -> None:
        settings, model = self._settings, self._run.model
        if settings.allocator_snapshots:
            self._shared.enter_context(memory_history())
        self._shared.enter_context(marked_methods(self._rows))
        for name in settings._supported_names(self._run, None):  # noqa: SLF001 part of the collector
            self._observed[name] = method_calls(model, name, self._rows)
            self._observed[name].__enter__()
        self._waits_for = {*settings.retain_hooks_for} & {*self._observed} or {*self._observed}

    def on_step(self, record: StepRecord) -> None:
        self._step = record.step + 1
        if self._is_done:
            self._write()

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._write)
            stack.callback(self._memory.close)
            stack.push(self._shared)
            for observed in self._observed.values():
                stack.push(observed)
            self._observed = {}

    def _number(self, function: str) -> CallNumber | None:
        number = next(self._counts.setdefault(function, itertools.count(1)))
        if not self._calls.first <= number <= self._calls.last:
            return None
        if self._has_hooks and not self._memory.is_open and get_ident() == self._thread:
            self._settings._report(self._run, self._memory.open(), None)  # noqa: SLF001 part of the collector
        return CallNumber(number, self._step, getattr(self._run.model, "global_step", None))

    def _ended(self, function: str, number: int) -> None:
        if number < self._calls.last:
            return
        if (observed := self._observed.pop(function, None)) is None:
            return
        observed.__exit__(None, None, None)
        self._waits_for.discard(function)
        if not self._waits_for:
            self._has_hooks = False
            self._memory.close()
        if not self._observed:
            self._shared.close()
            self._is_done = True

    def _write(self) -> None:
        if self._is_written:
            return
        self._is_written = True
        self._rows.finish()
        if not (rows := self._rows.rows):
            return
        sink, name = self._run.sink, self._settings.name
        path = sink.place.directory / functions_name(sink.rank)
        sink.write_text(ArtifactSpec(path=path, type="series", collector=name), encode_rows(rows))
        write_memory_stats(sink, name, self._rows.stats, self._settings._forms())  # noqa: SLF001 part of the collector
