"""This package's ways of recording. Imported where one of them is about to be fitted, and not before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import schedule

import lightning_memprof as memprof
from lightning_memprof import collectors, triggers

ONE_WINDOW = memprof.Schedule(wait=schedule.WAIT, warmup=schedule.WARMUP, active=schedule.ACTIVE, repeat=1)
NEVER = memprof.Schedule(wait=1_000_000)


def window(*, idle: bool) -> memprof.Schedule:
    return NEVER if idle else ONE_WINDOW


def pulse(directory: Path) -> dict[str, Any]:
    return _alone(directory, NEVER, [collectors.Pulse()])


def trace(directory: Path, *, names: bool) -> dict[str, Any]:
    return _alone(directory, ONE_WINDOW, [collectors.OperatorTrace(record_module_names=names)])


def memory(directory: Path, *, idle: bool = False) -> dict[str, Any]:
    chosen = [collectors.FunctionMemory(), collectors.SavedTensors(), collectors.HostMemory()]
    return _alone(directory, window(idle=idle), chosen)


def default(directory: Path, *, idle: bool = False) -> dict[str, Any]:
    """Give callback and profiler with nothing chosen but when, and where to; no page where nothing was recorded."""
    output = memprof.OutputOptions(dirpath=directory, report=not idle)
    return {
        "callbacks": [memprof.MemProfilerCallback(window(idle=idle), output=output)],
        "profiler": memprof.ExtendedPyTorchProfiler(dirpath=directory),
    }


def everything(directory: Path, *, idle: bool = False) -> dict[str, Any]:
    """Give every collector that records on a CPU, with all that it can be asked for.

    The anomalies are watched, and their limits never reached: what they cost is the watching.
    """
    chosen: list[memprof.Collector] = [
        collectors.Pulse(),
        collectors.HostMemory(),
        collectors.HookTimings(),
        collectors.GarbageCollection(),
        collectors.SystemStats(interval=0.1, always=True),
        collectors.Throughput(samples=len, flops=True),
        collectors.FunctionMemory(
            functions=("training_step", "backward"), saved_tensors_hooks=True, dump_yaml=True, dump_pickle=True
        ),
        collectors.SavedTensors(),
        collectors.ModuleMemory(),
        collectors.OOMAutopsy(history="always"),
        collectors.OperatorTrace(
            record_shapes=True, profile_memory=True, with_stack=True, with_flops=True, with_modules=True
        ),
    ]
    requests = memprof.Triggers(
        anomalies=[triggers.SlowStep(factor=1e6)],
    )
    callback = memprof.MemProfilerCallback(
        window(idle=idle),
        chosen,
        ranks="all",
        triggers=requests,
        budget=memprof.Budget(max_trace_bytes=1 << 40, keep_windows=10),
        # The page of `default` is enough: each one is seconds of another process, after the fit.
        output=memprof.OutputOptions(dirpath=directory, report=False),
    )
    return {"callbacks": [callback], "profiler": memprof.ExtendedPyTorchProfiler(dirpath=directory)}


def _alone(directory: Path, when: memprof.Schedule, collectors: list[memprof.Collector]) -> dict[str, Any]:
    output = memprof.OutputOptions(dirpath=directory, report=False)
    return {"callbacks": [memprof.MemProfilerCallback(when, collectors, output=output)]}
