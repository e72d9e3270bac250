"""Collectors for tests: record calls and fail on request, wait for files, name each operator's line."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from lightning_memprof.capture.base import Collector, SkipWindow
from lightning_memprof.capture.observe import take_out
from lightning_memprof.capture.sources.assignments import is_library
from lightning_memprof.capture.torch_internals import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    _RecordFunctionFast,
)
from lightning_memprof.testing.figures import LIGHTNING, LINE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

    from lightning_memprof.capture.base import OnMark, OnStep, RunContext, StepRecord
    from lightning_memprof.schedule import Mark, Window

_LIGHTNINGS: Final = frozenset({"lightning", "lightning_fabric", "pytorch_lightning"})
# Packages that run code for their caller.
_BETWEEN: Final = frozenset({"lightning_memprof", "lightning_utilities", "rich", "torch", "tqdm"})
_RUNS: Final = ("torch.amp", "torch.autograd", "torch.nn", "torch.optim")
_LOOPS: Final = ("lightning.pytorch.loops", "pytorch_lightning.loops")
_HARMFUL: Final = str.maketrans({'"': "'", "\\": "/"})

Occasion = Literal["enter", "mark", "exit", "follow", "step", "unfollow"]


class FakeCollector(Collector):
    """Records its calls in memory, in order, also those that it fails; writes no files.

    Args:
        name: the collector's name.
        fails: by occasion, the exception to raise each time.
        unavailable_reason: why it is not available in any run; None if it is available.
        skip_reason: why it skips every window; None if it records them.
        follows: whether it follows the whole run.
        journal: calls as ``(name, occasion, value)``; several collectors may share one to record their order.
    """

    def __init__(
        self,
        name: str = "fake",
        *,
        fails: Mapping[Occasion, Exception] | None = None,
        unavailable_reason: str | None = None,
        skip_reason: str | None = None,
        follows: bool = False,
        journal: list[tuple[str, Occasion, Any]] | None = None,
    ) -> None:
        self.name = name  # type: ignore[misc]  # each instance is another collector
        self._fails = fails or {}
        self._unavailable_reason = unavailable_reason
        self._skip_reason = skip_reason
        self._follows = follows
        self._journal = [] if journal is None else journal

    @property
    def calls(self) -> list[tuple[Occasion, Any]]:
        """The calls: with a window (``enter``), a mark, a step, or the exception that ended the window (``exit``)."""
        return [(occasion, value) for name, occasion, value in self._journal if name == self.name]

    @property
    def marks(self) -> list[Mark]:
        """The marks of all windows."""
        return [value for occasion, value in self.calls if occasion == "mark"]

    @property
    def steps(self) -> list[StepRecord]:
        """The steps of the run, if it follows the run."""
        return [value for occasion, value in self.calls if occasion == "step"]

    def unavailable(self, run: RunContext) -> str | None:  # noqa: ARG002 overriding
        """Return the reason of the test."""
        return self._unavailable_reason

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:  # noqa: ARG002 overriding
        """Record the calls of one window."""
        self._call("enter", window)
        if self._skip_reason is not None:
            raise SkipWindow(self._skip_reason)
        error: BaseException | None = None
        try:
            yield lambda mark: self._call("mark", mark)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._call("exit", error)

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:  # noqa: ARG002 overriding
        """Record every step, if it follows the run."""
        if not self._follows:
            yield None
            return
        self._call("follow", None)
        try:
            yield lambda record: self._call("step", record)
        finally:
            self._call("unfollow", None)

    def _call(self, occasion: Occasion, value: Any) -> None:
        self._journal.append((self.name, occasion, value))
        if (error := self._fails.get(occasion)) is not None:
            raise error


class WaitsForFiles(Collector):
    """Waits after each step until the files of its window are written: behind two of them a window has no trace."""

    name: ClassVar[str] = "waits_for_files"

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:
        """Wait after each step."""
        yield lambda _: run.sink.drain()


class Lines(Collector):
    """Puts a range around each operator; its name is the line that runs the operator."""

    name: ClassVar[str] = "operator_lines"

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:  # noqa: ARG002 overriding
        """Add the ranges of one window."""
        mode = _Ranges()  # type: ignore[no-untyped-call]
        _push_mode(mode)
        try:
            yield None
        finally:
            take_out(_pop, _push_mode, lambda other: other is mode)


class _Ranges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled regions compiled: under other modes torch runs them uncompiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Only the trace shows which operators wait: indexing with a mask waits inside its kernel.
        with _RecordFunctionFast(f"{LINE}{running_line(sys._getframe(1))}".translate(_HARMFUL)):  # noqa: SLF001 as inspect
            return func(*args, **kwargs or {})


def _pop() -> Any:
    return _pop_mode() if _get_current_dispatch_mode_stack() else None


def running_line(frame: FrameType | None) -> str:
    """Return the line of the program that Lightning's loop has called, else that of a package, else ``LIGHTNING``.

    ``LIGHTNING`` means code of Lightning alone, such as its progress bar. Empty if the stack has none of them.

    Args:
        frame: the innermost frame.
    """
    runner = ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        package = module.partition(".")[0]
        file = frame.f_code.co_filename
        if module.startswith(_LOOPS):
            break
        if package in _LIGHTNINGS:
            runner = runner or LIGHTNING
        elif module.startswith(_RUNS):
            runner = runner or f"{module.replace('.', '/')}.py:{frame.f_lineno}"
        elif package not in _BETWEEN and not file.startswith("<"):
            if not is_library(file):
                return f"{_short(file)}:{frame.f_lineno}"
            if package not in sys.stdlib_module_names:
                runner = runner or f"{module.replace('.', '/')}.py:{frame.f_lineno}"
        frame = frame.f_back
    return runner


def _short(file: str) -> str:
    """Return a path relative to the working directory if it is below."""
    try:
        return os.fspath(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file
