"""The ways of recording that are compared: each gives a Trainer's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from lightning.pytorch import Callback
from lightning.pytorch.profilers import PyTorchProfiler

from lightning_memprof import (
    Collector,
    ExtendedPyTorchProfiler,
    FunctionMemory,
    MemProfilerCallback,
    ModuleRss,
    OperatorTrace,
    Output,
    Pulse,
    SavedTensors,
    Schedule,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

WAIT: Final = 20
WARMUP: Final = 1
ACTIVE: Final = 3
ONE_WINDOW: Final = Schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1)
NEVER: Final = Schedule(wait=1_000_000)


class ByHand(Callback):
    """What a program without any of these libraries would write: plain ``torch.profiler``, stepped after each batch."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace
        self._profiler: torch.profiler.profile | None = None

    def on_train_start(self, *args: Any) -> None:
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=_torch_schedule(),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(self._trace)),
        )
        self._profiler.start()

    def on_train_batch_end(self, *args: Any) -> None:
        self._profiler.step()

    def on_train_end(self, *args: Any) -> None:
        self._profiler.stop()


@dataclass(frozen=True)
class Configuration:
    """One way of recording.

    Attributes:
        says: what it is, in a few words.
        arguments: given a directory to write to, returns arguments of the Trainer.
        has_window: whether it records steps ``WAIT + WARMUP`` to ``WAIT + WARMUP + ACTIVE - 1``.

    """

    says: str
    arguments: Callable[[Path], dict[str, Any]]
    has_window: bool = True


def _torch_schedule() -> Callable[..., Any]:
    return torch.profiler.schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1)


def _trace_only(directory: Path, *, names: bool) -> dict[str, Any]:
    trace = OperatorTrace(record_module_names=names)
    return {"callbacks": [MemProfilerCallback(ONE_WINDOW, [trace], output=Output(dirpath=directory))]}


def _memory(directory: Path, schedule: Schedule) -> dict[str, Any]:
    collectors: list[Collector] = [FunctionMemory(), SavedTensors()]
    return {"callbacks": [MemProfilerCallback(schedule, collectors, output=Output(dirpath=directory))]}


def _memory_with_rss(directory: Path, schedule: Schedule) -> dict[str, Any]:
    collectors: list[Collector] = [FunctionMemory(), SavedTensors(), ModuleRss()]
    return {"callbacks": [MemProfilerCallback(schedule, collectors, output=Output(dirpath=directory))]}


def _everything(directory: Path, schedule: Schedule) -> dict[str, Any]:
    return {
        "callbacks": [MemProfilerCallback(schedule, output=Output(dirpath=directory))],
        "profiler": ExtendedPyTorchProfiler(dirpath=directory),
    }


def configurations() -> Mapping[str, Configuration]:
    """Give all configurations by name; ``bare`` is what the others are compared with."""
    return {
        "bare": Configuration("no profiler", lambda _: {}, has_window=False),
        "callback": Configuration(
            "a callback without methods: what Lightning takes for any", lambda _: {"callbacks": [Callback()]}, False
        ),
        "pulse": Configuration(
            "MemProfilerCallback, the pulse alone",
            lambda d: {"callbacks": [MemProfilerCallback(NEVER, [Pulse()], output=Output(dirpath=d))]},
            has_window=False,
        ),
        "idle": Configuration(
            "callback and profiler, no window reached", lambda d: _everything(d, NEVER), has_window=False
        ),
        "window": Configuration("callback and profiler, one window", lambda d: _everything(d, ONE_WINDOW)),
        "memory": Configuration("functions and saved tensors by module", lambda d: _memory(d, ONE_WINDOW)),
        "memory-rss": Configuration(
            "the same, and the resident size at every module's forward", lambda d: _memory_with_rss(d, ONE_WINDOW)
        ),
        "memory-idle": Configuration(
            "the same, no window reached", lambda d: _memory_with_rss(d, NEVER), has_window=False
        ),
        "trace": Configuration("our operator trace alone, no module names", lambda d: _trace_only(d, names=False)),
        "trace-names": Configuration("our operator trace alone, module names", lambda d: _trace_only(d, names=True)),
        "hand-json": Configuration(
            "torch.profiler by hand, trace as .json", lambda d: {"callbacks": [ByHand(d / "trace.json")]}
        ),
        "hand-gz": Configuration(
            "torch.profiler by hand, trace as .json.gz", lambda d: {"callbacks": [ByHand(d / "trace.json.gz")]}
        ),
        "lightning": Configuration(
            "Lightning's PyTorchProfiler",
            lambda d: {"profiler": PyTorchProfiler(dirpath=d, filename="trace", schedule=_torch_schedule())},
        ),
    }
