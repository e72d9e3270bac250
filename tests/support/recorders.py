"""The two ways of recording that every row of the table is tried with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from every_collector import every_collector
from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule

# Of the shortest fit here, six steps: steps 2 and 5.
WINDOWS: Final = Schedule(wait=1, warmup=1, active=1, repeat=2)


def defaults() -> dict[str, Any]:
    """Give callback and profiler as a person would write them, with windows early enough for a short fit."""
    return {"callbacks": [MemProfilerCallback(WINDOWS, output=_quiet())], "profiler": "fts_extended"}


def everything() -> dict[str, Any]:
    """Give every collector that a CPU has, and the profiler."""
    return {
        "callbacks": [MemProfilerCallback(WINDOWS, every_collector(), output=_quiet())],
        "profiler": "fts_extended",
    }


def _quiet() -> OutputOptions:
    return OutputOptions(summary=False, report=False)


RECORDERS: Final[Mapping[str, Callable[[], dict[str, Any]]]] = MappingProxyType(
    {"defaults": defaults, "everything": everything}
)
