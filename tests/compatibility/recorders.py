"""The two ways of recording that every row of the table is tried with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from lightning_memprof import Collector, ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import (
    FunctionMemory,
    GarbageCollection,
    HookTimings,
    HostMemory,
    ModuleMemory,
    ModuleRss,
    OOMAutopsy,
    Pulse,
    SavedTensors,
    SystemStats,
    Throughput,
)

# Of the shortest fit here, six steps: steps 2 and 5.
WINDOWS: Final = Schedule(wait=1, warmup=1, active=1, repeat=2)


def defaults() -> dict[str, Any]:
    """Give callback and profiler as a person would write them, with windows early enough for a short fit."""
    return {"callbacks": [MemProfilerCallback(WINDOWS, output=_quiet())], "profiler": "fts_extended"}


def everything() -> dict[str, Any]:
    """Give every collector that a CPU has, with what of their options costs most."""
    collectors: list[Collector] = [
        Pulse(),
        HostMemory(),
        SystemStats(),
        HookTimings(),
        GarbageCollection(),
        FunctionMemory(functions=["training_step", "backward"]),
        SavedTensors(),
        ModuleMemory(),
        ModuleRss(),
        Throughput(flops=True),
        OOMAutopsy(),
    ]
    trace = ExtendedPyTorchProfiler(profile_memory=True, record_shapes=True, with_stack=True)
    return {"callbacks": [MemProfilerCallback(WINDOWS, collectors, output=_quiet())], "profiler": trace}


def _quiet() -> OutputOptions:
    return OutputOptions(summary=False, report=False)


RECORDERS: Final[Mapping[str, Callable[[], dict[str, Any]]]] = MappingProxyType(
    {"defaults": defaults, "everything": everything}
)
