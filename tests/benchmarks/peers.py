"""The peers' ways of recording. What is not installed is imported where it is about to be fitted, and not before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import schedule
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class Absent(ModuleType):
    """Stands for a package that a peer imports and does not use here: every name in it is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class ByHand(Callback):
    """What a program without any of these libraries would write: plain ``torch.profiler``, stepped after each batch."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace
        self._profiler: torch.profiler.profile | None = None

    def on_train_start(self, *args: Any) -> None:
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=schedule.of_torch(),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(self._trace)),
        )
        self._profiler.start()

    def on_train_batch_end(self, *args: Any) -> None:
        self._profiler.step()

    def on_train_end(self, *args: Any) -> None:
        self._profiler.stop()


def by_hand(trace: Path) -> dict[str, Any]:
    return {"callbacks": [ByHand(trace)]}


def lightning(directory: Path) -> dict[str, Any]:
    return {"profiler": PyTorchProfiler(dirpath=directory, filename="trace", schedule=schedule.of_torch())}


def device_stats(directory: Path) -> dict[str, Any]:
    """Give Lightning's monitor, and the logger without which it refuses to go; it logs each step."""
    return {"callbacks": [DeviceStatsMonitor(cpu_stats=True)], "logger": CSVLogger(directory)}


def finetuning_profiler(directory: Path) -> dict[str, Any]:
    sys.modules.setdefault("transformers", Absent("transformers"))
    from fts_examples.profiling import ExtendedPyTorchProfiler

    cycle = {"wait": schedule.WAIT, "warmup": schedule.WARMUP, "active": schedule.ACTIVE, "repeat": 1}
    return {"profiler": ExtendedPyTorchProfiler(dirpath=directory, filename="trace", schedule_cfg=cycle)}


def finetuning_memory(directory: Path) -> dict[str, Any]:
    """Give MemProfiler in the training step, in the steps in which the others' window is."""
    sys.modules.setdefault("transformers", Absent("transformers"))
    from fts_examples.profiling import MemProfiler, MemProfilerCfg, MemProfilerSchedule, ProfilerHooksMixin

    def build(model: Callable[..., LightningModule], *values: Any) -> LightningModule:
        class Recorded(ProfilerHooksMixin, model):  # type: ignore[misc, valid-type]
            training_step = MemProfiler.memprofilable(model.training_step)

        first = schedule.WAIT + schedule.WARMUP
        cycle = MemProfilerSchedule(warmup_iters=first, max_iter=first + schedule.ACTIVE)
        return Recorded(MemProfilerCfg(enabled=True, schedule=cycle, save_dir=directory), *values)

    return {"build": build}
