"""What an analysis might say of a trace, by hand: a healthy training on a device, and whatever is to be different."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import (
    CollectiveTotals,
    GpuTimes,
    IdleCause,
    Kernel,
    RuntimeCall,
    StepTimes,
    TraceReport,
    TraceStep,
)

MS = 1_000_000
START = 1_700_000_000_000_000_000
STEP_NS = 100 * MS


def gpu_times(window_ns: int, idle_ns: int = 0, *, exposed_ns: int = 0, overlapped_ns: int = 0) -> GpuTimes:
    busy = window_ns - idle_ns
    return GpuTimes(
        window_ns=window_ns,
        busy_ns=busy,
        idle_ns=idle_ns,
        compute_ns=busy - exposed_ns,
        communication_ns=exposed_ns + overlapped_ns,
        memory_copy_ns=0,
        communication_overlapped_ns=overlapped_ns,
        communication_exposed_ns=exposed_ns,
    )


def idle(cause: Part, total_ns: int, example: str = "", at_ns: int | None = None) -> IdleCause:
    return IdleCause(
        cause=cause,
        total_ns=total_ns,
        count=10,
        longest_ns=total_ns // 5,
        example=example,
        example_share=1.0,
        longest_start_ns=at_ns,
    )


def kernel(name: str, count: int, each_ns: int) -> Kernel:
    return Kernel(name=name, kind="compute", count=count, total_ns=count * each_ns, max_ns=each_ns)


def collective(**changes: Any) -> CollectiveTotals:
    usual: dict[str, Any] = {
        "name": "nccl:all_reduce",
        "group": "0",
        "bytes_each": 25 << 20,
        "count": 10,
        "total_ns": 100 * MS,
        "median_ns": 10 * MS,
        "max_ns": 11 * MS,
        "exposed_ns": 5 * MS,
    }
    return CollectiveTotals(**{**usual, **changes})


def call(name: str, count: int, total_ns: int, at_ns: int | None = None) -> RuntimeCall:
    return RuntimeCall(name=name, count=count, total_ns=total_ns, max_ns=total_ns // count, longest_start_ns=at_ns)


def trace(steps: int = 5, *, loading_ns: int = 0, causes: tuple[IdleCause, ...] = (), **changes: Any) -> TraceReport:
    """``loading_ns`` is of all steps together; the device idles for as long as the causes say and 1% besides."""
    window_ns = steps * STEP_NS
    idle_ns = sum(cause.total_ns for cause in causes) + window_ns // 100
    times = changes.pop("gpu_window", gpu_times(window_ns, idle_ns))
    usual: dict[str, Any] = {
        "file": Path("runs/rank0.pt.trace.json.gz"),
        "rank": None,
        "world_size": None,
        "devices": ("NVIDIA A100-SXM4-80GB",),
        "start_ns": START,
        "end_ns": START + window_ns,
        "events": 5_000,
        "gpu_window": times,
        "step_window": times
        and StepTimes(**msgspec.structs.asdict(times), data_loading_ns=loading_ns, mean_step_ns=STEP_NS),
        "steps": tuple(
            TraceStep(
                number=3 + i,
                start_ns=START + i * STEP_NS,
                duration_ns=STEP_NS,
                busy_ns=None if times is None else STEP_NS * times.busy_ns // window_ns,
                data_loading_ns=loading_ns // steps,
            )
            for i in range(steps)
        ),
        "kernels": (kernel("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_tn", 100 * steps, STEP_NS // 110),),
        "idle": (*causes, idle(Part.IDLE_LAUNCH, window_ns // 100)),
        "runtime_calls": (),
        "collectives": (),
        "copies": (),
        "missing": (),
    }
    return TraceReport(**{**usual, **changes})
