"""Where did the memory go, and where did the time go: a Lightning callback and profiler that say it after the run.

Importing the package loads neither torch nor Lightning; its names are loaded when they are first used.
"""

from __future__ import annotations

# `typing` alone is most of the time that importing this package takes.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from lightning_memprof.analysis.run.load import load_run
    from lightning_memprof.capture.base import Collector, NotNowError, RunContext
    from lightning_memprof.capture.budget import Budget
    from lightning_memprof.capture.collectors.allocator_history import AllocatorHistory, start_memory_history
    from lightning_memprof.capture.collectors.allocator_stats import AllocatorStats
    from lightning_memprof.capture.collectors.functions import CallRange, FunctionMemory
    from lightning_memprof.capture.collectors.garbage import Garbage
    from lightning_memprof.capture.collectors.hook_timings import HookTimings
    from lightning_memprof.capture.collectors.host import HostMemory
    from lightning_memprof.capture.collectors.module_rss import ModuleRss
    from lightning_memprof.capture.collectors.oom import OutOfMemory
    from lightning_memprof.capture.collectors.operator_trace import OperatorTrace
    from lightning_memprof.capture.collectors.pulse import Pulse
    from lightning_memprof.capture.collectors.saved_tensors import SavedTensors
    from lightning_memprof.capture.collectors.system import System
    from lightning_memprof.capture.collectors.throughput import Throughput
    from lightning_memprof.capture.sources.forward_hooks import UserHooks
    from lightning_memprof.capture.sources.methods import memprofilable
    from lightning_memprof.capture.tracker.fsdp import FSDPMemory
    from lightning_memprof.capture.tracker.modules import ModuleMemory
    from lightning_memprof.capture.triggers.anomalies import AllocatorRetries, Anomaly, MemoryGrowth, NearOOM, SlowStep
    from lightning_memprof.capture.triggers.watch import Triggers
    from lightning_memprof.errors import ArtifactError, ConfigError, MemprofError, ReportError
    from lightning_memprof.integration.callback import MemProfilerCallback
    from lightning_memprof.integration.memprofiler_cfg import (
        MemProfilerCfg,
        MemProfilerFuncs,
        MemProfilerHooks,
        MemProfilerSchedule,
    )
    from lightning_memprof.integration.memprofiler_cli import MemProfiler, MemProfilerCLI, add_memprofiler_arguments
    from lightning_memprof.integration.output import Output
    from lightning_memprof.integration.profiler import ExtendedPyTorchProfiler
    from lightning_memprof.schedule import Action, Mark, Point, Schedule, Stages, Window

__version__ = "0.1.0"

__all__ = [
    "Action",
    "AllocatorHistory",
    "AllocatorRetries",
    "AllocatorStats",
    "Anomaly",
    "ArtifactError",
    "Budget",
    "CallRange",
    "Collector",
    "ConfigError",
    "ExtendedPyTorchProfiler",
    "FSDPMemory",
    "FunctionMemory",
    "Garbage",
    "HookTimings",
    "HostMemory",
    "Mark",
    "MemProfiler",
    "MemProfilerCLI",
    "MemProfilerCallback",
    "MemProfilerCfg",
    "MemProfilerFuncs",
    "MemProfilerHooks",
    "MemProfilerSchedule",
    "MemoryGrowth",
    "MemprofError",
    "ModuleMemory",
    "ModuleRss",
    "NearOOM",
    "NotNowError",
    "OperatorTrace",
    "OutOfMemory",
    "Output",
    "Point",
    "Pulse",
    "ReportError",
    "RunContext",
    "SavedTensors",
    "Schedule",
    "SlowStep",
    "Stages",
    "System",
    "Throughput",
    "Triggers",
    "UserHooks",
    "Window",
    "add_memprofiler_arguments",
    "load_run",
    "memprofilable",
    "start_memory_history",
]


def __getattr__(name: str) -> object:
    home = _home(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    import importlib

    if home.startswith("integration."):
        import sys

        from lightning_memprof.integration.distributions import check_asked

        check_asked(name, sys._getframe(1))  # noqa: SLF001 there is no public way to know who asks
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _home(name: str) -> str | None:
    return {
        "Action": "schedule",
        "AllocatorHistory": "capture.collectors.allocator_history",
        "AllocatorRetries": "capture.triggers.anomalies",
        "AllocatorStats": "capture.collectors.allocator_stats",
        "Anomaly": "capture.triggers.anomalies",
        "ArtifactError": "errors",
        "Budget": "capture.budget",
        "CallRange": "capture.collectors.functions",
        "Collector": "capture.base",
        "ConfigError": "errors",
        "ExtendedPyTorchProfiler": "integration.profiler",
        "FSDPMemory": "capture.tracker.fsdp",
        "FunctionMemory": "capture.collectors.functions",
        "Garbage": "capture.collectors.garbage",
        "HookTimings": "capture.collectors.hook_timings",
        "HostMemory": "capture.collectors.host",
        "Mark": "schedule",
        "MemProfiler": "integration.memprofiler_cli",
        "MemProfilerCLI": "integration.memprofiler_cli",
        "MemProfilerCallback": "integration.callback",
        "MemProfilerCfg": "integration.memprofiler_cfg",
        "MemProfilerFuncs": "integration.memprofiler_cfg",
        "MemProfilerHooks": "integration.memprofiler_cfg",
        "MemProfilerSchedule": "integration.memprofiler_cfg",
        "MemoryGrowth": "capture.triggers.anomalies",
        "MemprofError": "errors",
        "ModuleMemory": "capture.tracker.modules",
        "ModuleRss": "capture.collectors.module_rss",
        "NearOOM": "capture.triggers.anomalies",
        "NotNowError": "capture.base",
        "OperatorTrace": "capture.collectors.operator_trace",
        "OutOfMemory": "capture.collectors.oom",
        "Output": "integration.output",
        "Point": "schedule",
        "Pulse": "capture.collectors.pulse",
        "ReportError": "errors",
        "RunContext": "capture.base",
        "SavedTensors": "capture.collectors.saved_tensors",
        "Schedule": "schedule",
        "SlowStep": "capture.triggers.anomalies",
        "Stages": "schedule",
        "System": "capture.collectors.system",
        "Throughput": "capture.collectors.throughput",
        "Triggers": "capture.triggers.watch",
        "UserHooks": "capture.sources.forward_hooks",
        "Window": "schedule",
        "add_memprofiler_arguments": "integration.memprofiler_cli",
        "load_run": "analysis.run.load",
        "memprofilable": "capture.sources.methods",
        "start_memory_history": "capture.collectors.allocator_history",
    }.get(name)
