"""A collector that writes into the operator trace which line of the program runs each operator."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Final

from lightning_memprof.capture.base import Collector, OnMark, RunContext
from lightning_memprof.capture.observe import take_out
from lightning_memprof.capture.sources.assignments import is_library
from lightning_memprof.capture.torch_internals import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    _RecordFunctionFast,
)
from lightning_memprof.schedule import Window
from lightning_memprof.testing.figures import LIGHTNING, LINE

_LIGHTNINGS: Final = frozenset({"lightning", "lightning_fabric", "pytorch_lightning"})
# Their caller decides what they run.
_BETWEEN: Final = frozenset({"lightning_memprof", "lightning_utilities", "rich", "torch", "tqdm"})
_RUNS: Final = ("torch.amp", "torch.autograd", "torch.nn", "torch.optim")
_LOOPS: Final = ("lightning.pytorch.loops", "pytorch_lightning.loops")
_HARMFUL: Final = str.maketrans({'"': "'", "\\": "/"})


class Lines(Collector):
    """Puts a range around each operator; its name is the line that runs the operator."""

    name: ClassVar[str] = "operator_lines"

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:  # noqa: ARG002 overriding
        """Add the ranges of one window."""
        mode = _Ranges()
        _push_mode(mode)
        try:
            yield None
        finally:
            take_out(_pop, _push_mode, lambda other: other is mode)


class _Ranges(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled regions compiled: under other modes torch runs them uncompiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Which operators wait, only the trace knows: an index with a mask does, within its kernel.
        with _RecordFunctionFast(f"{LINE}{running_line(sys._getframe(1))}".translate(_HARMFUL)):  # noqa: SLF001 as inspect
            return func(*args, **kwargs or {})


def _pop() -> Any:
    return _pop_mode() if _get_current_dispatch_mode_stack() else None


def running_line(frame: FrameType | None) -> str:
    """Return the line of the program that Lightning's loop has called, else that of a package, else ``LIGHTNING``.

    ``LIGHTNING`` is code of Lightning alone, as of its progress bar. Without any of them the text is empty.

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
