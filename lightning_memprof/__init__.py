"""Where did the memory go, and where did the time go: a Lightning callback and profiler that say it after the run.

Importing the package loads neither torch nor Lightning; its names are loaded when they are first used.
"""

from __future__ import annotations

# `typing` alone is most of the time that importing this package takes.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from lightning_memprof.analysis.run import load_run
    from lightning_memprof.capture.allocator_history import AllocatorHistory, start_memory_history
    from lightning_memprof.capture.allocator_stats import AllocatorStats
    from lightning_memprof.capture.base import Collector, NotNowError, RunContext
    from lightning_memprof.capture.hook_timings import HookTimings
    from lightning_memprof.capture.host import HostMemory
    from lightning_memprof.capture.operator_trace import OperatorTrace
    from lightning_memprof.capture.pulse import Pulse
    from lightning_memprof.errors import ArtifactError, ConfigError, MemprofError, ReportError
    from lightning_memprof.integration.callback import MemProfilerCallback
    from lightning_memprof.integration.profiler import ExtendedPyTorchProfiler
    from lightning_memprof.schedule import Action, Mark, Point, Schedule, Window

__version__ = "0.1.0"

__all__ = [
    "Action",
    "AllocatorHistory",
    "AllocatorStats",
    "ArtifactError",
    "Collector",
    "ConfigError",
    "ExtendedPyTorchProfiler",
    "HookTimings",
    "HostMemory",
    "Mark",
    "MemProfilerCallback",
    "MemprofError",
    "NotNowError",
    "OperatorTrace",
    "Point",
    "Pulse",
    "ReportError",
    "RunContext",
    "Schedule",
    "Window",
    "load_run",
    "start_memory_history",
]


def __getattr__(name: str) -> object:
    home = _home(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _home(name: str) -> str | None:
    return {
        "Action": "schedule",
        "AllocatorHistory": "capture.allocator_history",
        "AllocatorStats": "capture.allocator_stats",
        "ArtifactError": "errors",
        "Collector": "capture.base",
        "ConfigError": "errors",
        "ExtendedPyTorchProfiler": "integration.profiler",
        "HookTimings": "capture.hook_timings",
        "HostMemory": "capture.host",
        "Mark": "schedule",
        "MemProfilerCallback": "integration.callback",
        "MemprofError": "errors",
        "NotNowError": "capture.base",
        "OperatorTrace": "capture.operator_trace",
        "Point": "schedule",
        "Pulse": "capture.pulse",
        "ReportError": "errors",
        "RunContext": "capture.base",
        "Schedule": "schedule",
        "Window": "schedule",
        "load_run": "analysis.run",
        "start_memory_history": "capture.allocator_history",
    }.get(name)
