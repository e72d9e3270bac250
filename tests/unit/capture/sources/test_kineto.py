"""The lines that torch's native code prints around a trace, and its log levels."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memprof.capture.sources.kineto import WindowTrace, native_log_raised
from lightning_memprof.schedule import Mark, Point

SYMBOLS = ("_ZN9libkineto6Logger14severityLevel_E", "FLAGS_caffe2_log_level")
PROGRAM = """
import os, sys
from contextlib import ExitStack
import torch
from lightning_memprof.capture.sources.kineto import WindowTrace
from lightning_memprof.schedule import Mark, Point

unseen = [torch.zeros(9) for _ in range(3)]
profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
trace = WindowTrace(profiler, lambda trace: os.write(2, b"saved\\n"))
trace.prepare(ExitStack(), lambda: None)
trace.on_mark(Mark(0, 0, Point.STEP_START, True, 0))
unseen.clear()
os.write(2, b"inside\\n")
trace.finish()
"""


def levels() -> list[int]:
    library = ctypes.CDLL(sys.modules["torch._C"].__file__)
    return [ctypes.c_int.in_dll(library, symbol).value for symbol in SYMBOLS]


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("KINETO_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.slow
def test_a_trace_prints_no_line_of_torch_and_the_program_s_lines_stay(
    tmp_path: Path, run_program: Callable[..., CompletedProcess[str]]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    ended = run_program("program.py")
    assert (ended.returncode, ended.stderr.splitlines()) == (0, ["inside", "saved"])


def test_log_levels_are_raised_only_around_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    before = levels()
    seen = []
    with suppress(ValueError), native_log_raised():
        seen += levels()
        raise ValueError
    assert (seen, levels()) == ([6, 2], before)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "0")
    with native_log_raised():
        assert levels() == [before[0], 2]
    assert levels() == before


def test_a_level_that_is_higher_already_stays() -> None:
    level = ctypes.c_int.in_dll(ctypes.CDLL(sys.modules["torch._C"].__file__), SYMBOLS[1])
    before, level.value = level.value, 3
    try:
        with native_log_raised():
            assert level.value == 3
    finally:
        level.value = before


def test_a_torch_without_the_symbols_still_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_memprof.capture.sources.kineto._LOG_LEVELS", (("no_such_symbol", "X", 1),))
    before = levels()
    with native_log_raised():
        assert levels() == before


def test_a_mode_of_the_program_sees_no_operator_of_the_start() -> None:
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    trace = WindowTrace(profiler, lambda _: None)
    with ExitStack() as ranges, Mode():
        trace.prepare(ranges, lambda: None)
        trace.on_mark(Mark(0, 0, Point.STEP_START, recorded=True, time_ns=0))
        started = list(seen)
        trace.finish()
    assert [name for name in started if "record_function" not in name] == []
