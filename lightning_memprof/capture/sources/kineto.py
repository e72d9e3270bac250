"""torch.profiler's use of Kineto in one window: its trace from preparation to file, and the ranges in it."""

from __future__ import annotations

import atexit
import ctypes
import errno
import gzip
import os
import shutil
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from isal import igzip
from torch.autograd.profiler import profile as autograd_profile

from lightning_memprof.artifacts.trace_rewriting import FAST_LEVEL, range_name
from lightning_memprof.capture.observe import wrapped
from lightning_memprof.capture.sources.compiled import WRAPPED, compiled_modules, module_paths
from lightning_memprof.capture.sources.module_calls import module_calls
from lightning_memprof.capture.torch_internals import (
    DisableTorchFunction,
    _disable_profiler_legacy,
    _profiler_enabled,
    _ProfilerDisableOptions,
    _RecordFunctionFast,
)
from lightning_memprof.schedule import Point
from lightning_memprof.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.profiler import profile

    Report = Callable[[str], None]
    Listener = Callable[[Report, Report], AbstractContextManager[None]]
    from lightning_memprof.capture.observe import Link
    from lightning_memprof.schedule import Mark

_TAIL_BYTES: Final = 16
# Levels in torch's libraries, the variables that set them, and the level above what a window makes torch print:
# libkineto::Logger announces each start and stop above its errors, c10 warns of the first block of unknown size.
_LOG_LEVELS: Final = (
    ("_ZN9libkineto6Logger14severityLevel_E", "KINETO_LOG_LEVEL", 6),
    ("FLAGS_caffe2_log_level", "TORCH_CPP_LOG_LEVEL", 2),
)
_OPENED: Final = Path("/proc/self/fd")


class WindowTrace:
    """One window's trace: prepared, started at the first recorded step, finished once.

    Args:
        profiler: torch's profiler, not prepared yet.
        save: called with this object when a started trace has stopped.
        max_steps: recorded steps after which it is finished; None is the end of the window.
    """

    def __init__(self, profiler: profile, save: Callable[[WindowTrace], None], max_steps: int | None = None) -> None:
        self.profiler = profiler
        self.steps = 0
        self.stopping_ns = 0
        self._save = save
        self._max_steps = max_steps
        self._step = ExitStack()
        self._ranges: ExitStack | None = None
        self._cut_actions: Callable[[], None] = lambda: None
        self._started = False
        self._process = os.getpid()
        register_after_fork(self, WindowTrace._stop_in_fork)

    def prepare(self, ranges: ExitStack, cut_actions: Callable[[], None]) -> None:
        """Warm up Kineto; ``ranges`` are closed before the trace stops."""
        self.profiler.prepare_trace()
        self._ranges, self._cut_actions = ranges, cut_actions

    def on_mark(self, mark: Mark) -> None:
        """Start with the first recorded step, and name the steps."""
        if self._ranges is None:
            return
        if mark.point is Point.STEP_START and mark.recorded:
            if not self._started:
                self._start()
                self._started = True
                atexit.register(self._stop_at_exit)
            with DisableTorchFunction():
                self._step.enter_context(torch.profiler.record_function(f"ProfilerStep#{mark.step}"))
            self.steps += 1
        elif mark.point is Point.STEP_END:
            self._cut_actions()
            with DisableTorchFunction():
                self._step.close()
            if self.steps == self._max_steps:
                self.finish()

    def finish(self) -> bool:
        """Stop the trace and save it; return whether it was still running, and in this process."""
        if os.getpid() != self._process:
            return False
        ranges, self._ranges = self._ranges, None
        if ranges is None:
            return False
        atexit.unregister(self._stop_at_exit)
        self.stopping_ns = time.perf_counter_ns()
        try:
            self._cut_actions()
            self._step.close()
            ranges.close()
        finally:
            with native_log_raised():
                if not self._started:
                    # Kineto stays prepared until a trace is stopped.
                    self.profiler.start_trace()
                self.profiler.stop_trace()
        if self._started:
            self._save(self)
        return True

    def _start(self) -> None:
        # Torch warns of the first free of a block that it has not seen allocated, and then of every thousandth. A
        # storage, not a tensor, whose operators dispatch modes of the program would see.
        unseen = torch.UntypedStorage(1, device="cpu")  # type: ignore[no-untyped-call]
        with native_log_raised():
            self.profiler.start_trace()
            del unseen

    def _stop_at_exit(self) -> None:
        """Stop recording where Lightning has not ended the run: torch crashes at the exit of a process that records."""
        # The profiler belongs to the thread that started it.
        if os.getpid() == self._process and self._ranges is not None and _profiler_enabled():
            self.profiler.stop_trace()

    def _stop_in_fork(self) -> None:
        """Stop recording in a forked process of ``multiprocessing``, which inherits it with the thread's state."""
        if self._started and self._ranges is not None and _profiler_enabled():
            # Not by the profiler's own function: it would call CUPTI, which the process cannot use.
            _disable_profiler_legacy(_ProfilerDisableOptions(True, False))  # noqa: FBT003 takes no names
            if self.profiler.with_stack:
                sys.setprofile(None)


@contextmanager
def native_log_raised() -> Iterator[None]:
    """Raise the log levels of Kineto and c10 for the body, except those that the environment sets.

    File descriptors stay as they are: lines of the program are neither lost nor late. If torch lacks these symbols, it
    prints its lines.
    """
    raised = []
    with suppress(OSError, ValueError):
        # The libraries that it depends on are searched, too.
        libraries = ctypes.CDLL(sys.modules["torch._C"].__file__)
        for symbol, variable, above in _LOG_LEVELS:
            if not os.environ.get(variable):
                level = ctypes.c_int.in_dll(libraries, symbol)
                raised.append((level, level.value))
                level.value = max(level.value, above)
    try:
        yield
    finally:
        for level, before in raised:
            level.value = before


@contextmanager
def yields_to_others(owner: object, give_way: Callable[[], bool]) -> Iterator[None]:
    """Call ``give_way`` before another profiler uses Kineto; it returns whether this one was still using it.

    A second profiler inside the first loses the first one's data and can crash the process, and torch does not show
    that one is warming up: for the time of a window the two methods that every profiler starts with are wrapped.
    """

    def prepare(link: Link) -> Callable[[Any], None]:
        def prepare_trace(profiler: Any) -> None:
            if profiler is not owner:
                give_way()
            link.call(profiler)

        return prepare_trace

    def start(link: Link) -> Callable[[Any], None]:
        def start_trace(profiler: Any) -> None:
            if profiler is not owner and give_way():
                # It was prepared before the window; stopping our trace has undone that.
                profiler._prepare_trace()  # noqa: SLF001 torch has no public one
            link.call(profiler)

        return start_trace

    with wrapped(autograd_profile, "_prepare_trace", prepare), wrapped(autograd_profile, "_start_trace", start):
        yield


@contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """Name every sub-module's forward ``[pl][module]{type}: {path}`` in the trace; a compiled one has one range."""
    compiled = compiled_modules(model)
    names = {}
    for path, module in module_paths(model).items():
        kind = type(getattr(module, WRAPPED, module))
        name = f"{kind.__module__}.{kind.__qualname__}{' (compiled)' if path in compiled else ''}"
        names[path] = range_name(f"[pl][module]{name}: {path}")
    ranges: list[Any] = []

    def before(path: str, args: tuple[Any, ...]) -> None:  # noqa: ARG001 the name is enough
        if path:
            ranges.append(_RecordFunctionFast(names[path]))
            ranges[-1].__enter__()

    def after(path: str, output: Any) -> None:  # noqa: ARG001 the path is enough
        if path:
            ranges.pop().__exit__(None, None, None)

    with module_calls(model, before, after):
        yield


@contextmanager
def action_ranges(*listeners: Listener) -> Iterator[Callable[[], None]]:
    """Name every action of the Trainer ``[pl][profile]{action}`` in the trace.

    Each listener calls the two functions that it gets at the start and the stop of actions, while its context is open.

    Yields a function that ends the open ranges. It must be called if a range around them ends first, as a step does
    that ends in the middle of the next epoch's first action: ranges that partially overlap crash torch when the process
    ends.
    """
    ranges: list[tuple[str, Any]] = []

    def start(name: str) -> None:
        opened = _RecordFunctionFast(range_name("[pl][profile]" + name))
        opened.__enter__()
        ranges.append((name, opened))

    def stop(name: str) -> None:
        if ranges and ranges[-1][0] == name:
            ranges.pop()[1].__exit__(None, None, None)

    def cut() -> None:
        while ranges:
            ranges.pop()[1].__exit__(None, None, None)

    with ExitStack() as listening:
        for listener in listeners:
            listening.enter_context(listener(start, stop))
        try:
            yield cut
        finally:
            cut()


@contextmanager
def plain_directory(directory: Path) -> Iterator[str]:
    """Create a directory, and yield a path of it to which torch can save a trace.

    Kineto changes backslashes and line breaks in a path and then cannot rename the file, refuses a name that is not
    UTF-8, and writes quotes and control characters unescaped into the JSON. The yielded path has none of them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    opened = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        plain = _OPENED / str(opened)
        yield str(plain if plain.is_dir() else directory)
    finally:
        os.close(opened)


@dataclass(frozen=True)
class TraceFile:
    """A trace that Kineto has written: as JSON until it is compressed, then only as ``trace``."""

    raw: Path
    trace: Path

    def take(self, profiler: profile) -> int:
        """Let Kineto write the JSON, which holds the GIL; return its size.

        Args:
            profiler: torch's, stopped.

        Raises:
            RuntimeError: it has no trace.
            OSError: the file is truncated: torch reports no failed write.
        """
        results = profiler.profiler.kineto_results if profiler.profiler is not None else None
        if results is None or results.trace_start_ns() == 0:
            raise RuntimeError("Kineto returned no trace of this window; another profiler may have stopped it")
        try:
            with plain_directory(self.raw.parent) as plain:
                results.save(f"{plain}/{self.raw.name}")
            return self._complete_bytes()
        except BaseException:
            for partial in (self.raw, self._unfinished):
                with suppress(OSError):
                    partial.unlink()
            raise

    @property
    def _unfinished(self) -> Path:
        # Kineto's own temporary name, which remains if it could not write to the end.
        return self.raw.with_name(f"{self.raw.name}.tmp")

    def _complete_bytes(self) -> int:
        size, is_complete = 0, False
        found = self.raw if self.raw.exists() else self._unfinished
        with suppress(FileNotFoundError), found.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            is_complete = file.read().rstrip().endswith(b"}")
        if found is not self.raw or not is_complete:
            free = format_bytes(shutil.disk_usage(self.raw.parent).free)
            msg = f"torch wrote {format_bytes(size)} of the trace, which is truncated; {free} free on the file system"
            raise OSError(errno.EIO, msg, str(self.raw))
        return size

    def export(self, path: str, use_python_export: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 torch's
        """Replace ``torch.profiler.profile.export_chrome_trace``."""
        is_compressed = str(path).endswith(".gz")
        with (
            self.raw.open("rb") if self.raw.exists() else gzip.open(self.trace, "rb") as source,
            # isal releases the GIL.
            igzip.open(path, "wb", FAST_LEVEL) if is_compressed else Path(path).open("wb") as target,  # type: ignore[no-untyped-call]
        ):
            shutil.copyfileobj(source, target, 1 << 20)
