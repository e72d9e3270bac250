"""What an analysis might say of a trace, by hand: a healthy training on a device, and whatever is to be different."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import (
    CollectiveTotals,
    Copies,
    GpuTimes,
    IdleCause,
    Kernel,
    RuntimeCall,
    StepTimes,
    Synchronization,
    TraceReport,
    TraceStep,
)
from lightning_memprof.judge import Finding, examine_files

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


def time_ledger(steps: int, **parts: float) -> TimeLedger:
    """``parts`` are ns of all steps; of copies by kind and memory, ``HtoD_pageable``."""
    lines = []
    for name, ns in parts.items():
        kind, _, memory = name.partition("_")
        is_copy = memory in {"pageable", "pinned"}
        part = Part.COPY if is_copy else next(part for part in Part if part == name)
        lines.append(TimeLine(part=part, name=f"{kind} ({memory})" if is_copy else "", ns=ns / steps))
    kept = tuple(sorted((line for line in lines if line.ns > 0), key=lambda line: -line.ns))
    return TimeLedger(
        step_ns=total(kept),
        median_ns=total(kept),
        steps=steps,
        basis="recorded steps",
        lines=kept,
        communication=tuple(line for line in kept if line.part == Part.COLLECTIVE),
    )


def device_ledger(
    steps: int, times: GpuTimes, causes: Iterable[IdleCause], copies: Iterable[Copies] = ()
) -> TimeLedger:
    copied = {
        f"{each.kind}_{'pageable' if each.is_pageable else 'pinned'}": float(
            each.total_ns if each.exposed_ns is None else each.exposed_ns
        )
        for each in copies
        if each.is_pageable is not None
    }
    idle = {str(cause.cause): float(cause.total_ns) for cause in causes}
    exposed_ns = times.communication_exposed_ns
    idle["idle_unknown"] = times.idle_ns - sum(idle.values())
    return time_ledger(
        steps, compute=times.busy_ns - exposed_ns - sum(copied.values()), collective=exposed_ns, **copied, **idle
    )


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
        "capabilities": ((8, 0),),
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
    usual |= changes
    if usual["gpu_window"] is not None:
        usual.setdefault("device_ledger", device_ledger(steps, usual["gpu_window"], usual["idle"], usual["copies"]))
    else:
        usual.setdefault("host_ledger", time_ledger(steps, data_wait=loading_ns, forward=window_ns - loading_ns))
    return TraceReport(**usual)


def found_in(report: TraceReport) -> dict[str, Finding]:
    return {finding.rule: finding for finding in examine_files((report,), ())}


def copies(**changes: Any) -> Copies:
    usual: dict[str, Any] = {"kind": "HtoD", "is_pageable": True, "count": 10, "total_ns": 40 * MS, "bytes": 400 << 20}
    return Copies(**{**usual, **changes})


def waits(name: str, count: int, gap_ns: int) -> Synchronization:
    return Synchronization(
        name=name,
        count=count,
        total_ns=gap_ns,
        gap_ns=gap_ns,
        longest_gap_ns=gap_ns // count,
        longest_start_ns=START,
        own_ns=gap_ns,
    )
