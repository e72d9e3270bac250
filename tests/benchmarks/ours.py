"""This package's ways of recording. Imported where one of them is about to be fitted, and not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning_memprof as memprof

if TYPE_CHECKING:
    from pathlib import Path

    from tests.benchmarks import schedule
else:
    import schedule

ONE_WINDOW = memprof.Schedule(wait=schedule.WAIT, warmup=schedule.WARMUP, active=schedule.ACTIVE, repeat=1)
NEVER = memprof.Schedule(wait=1_000_000)


def window(*, idle: bool) -> memprof.Schedule:
    return NEVER if idle else ONE_WINDOW


def pulse(directory: Path) -> dict[str, Any]:
    return _alone(directory, NEVER, [memprof.Pulse()])


def trace(directory: Path, *, names: bool) -> dict[str, Any]:
    return _alone(directory, ONE_WINDOW, [memprof.OperatorTrace(record_module_names=names)])


def memory(directory: Path, *, idle: bool = False, modules: bool = False) -> dict[str, Any]:
    rss = memprof.ModuleRss() if modules else memprof.HostMemory()
    return _alone(directory, window(idle=idle), [memprof.FunctionMemory(), memprof.SavedTensors(), rss])


def default(directory: Path, *, idle: bool = False) -> dict[str, Any]:
    """Give callback and profiler with nothing chosen but when, and where to; no page where nothing was recorded."""
    output = memprof.Output(dirpath=directory, report=not idle)
    return {
        "callbacks": [memprof.MemProfilerCallback(window(idle=idle), output=output)],
        "profiler": memprof.ExtendedPyTorchProfiler(dirpath=directory),
    }


def everything(directory: Path, *, idle: bool = False) -> dict[str, Any]:
    """Give every collector that records on a CPU, with all that it can be asked for.

    The anomalies are watched, and their limits never reached: what they cost is the watching.
    """
    collectors: list[memprof.Collector] = [
        memprof.Pulse(),
        memprof.HostMemory(),
        memprof.HookTimings(),
        memprof.Garbage(cycles=True),
        memprof.System(interval=0.1, always=True),
        memprof.Throughput(samples=len, flops=True),
        memprof.FunctionMemory(
            functions=("training_step", "backward"), saved_tensors_hooks=True, dump_yaml=True, dump_pickle=True
        ),
        memprof.SavedTensors(),
        memprof.ModuleMemory(),
        memprof.ModuleRss(),
        memprof.OutOfMemory(history="always"),
        memprof.OperatorTrace(
            record_shapes=True, profile_memory=True, with_stack=True, with_flops=True, with_modules=True
        ),
    ]
    triggers = memprof.Triggers(
        anomalies=[memprof.SlowStep(factor=1e6), memprof.MemoryGrowth(grows_bytes=1 << 50)],
    )
    callback = memprof.MemProfilerCallback(
        window(idle=idle),
        collectors,
        ranks="all",
        triggers=triggers,
        budget=memprof.Budget(max_run_trace_bytes=1 << 40, keep_windows=10),
        # The page of `default` is enough: each one is seconds of another process, after the fit.
        output=memprof.Output(dirpath=directory, report=False),
    )
    return {"callbacks": [callback], "profiler": memprof.ExtendedPyTorchProfiler(dirpath=directory)}


def _alone(directory: Path, when: memprof.Schedule, collectors: list[memprof.Collector]) -> dict[str, Any]:
    output = memprof.Output(dirpath=directory, report=False)
    return {"callbacks": [memprof.MemProfilerCallback(when, collectors, output=output)]}
