"""Events of a trace in us, of a host and a device, and the report of a trace of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kineto import write_trace
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.account.trace.report import trace_report

HOST, AUTOGRAD, STREAM, OTHER_STREAM = 1, 2, 7, 9


def event(cat: str, name: str, start: float, end: float, tid: int = HOST, **args: Any) -> dict[str, Any]:
    pid = 0 if cat in {"kernel", "gpu_memcpy", "gpu_user_annotation"} else 99
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args}


def kernel(start: float, end: float, launch: int = 0, tid: int = STREAM, name: str = "gemm") -> dict[str, Any]:
    return event("kernel", name, start, end, tid, correlation=launch)


def call(start: float, end: float, launch: int = 0, tid: int = HOST, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return event("cuda_runtime", name, start, end, tid, correlation=launch)


def report(path: Path, *events: dict[str, Any], **metadata: Any) -> TraceReport:
    return trace_report(write_trace(path / "made.json", events, **metadata))


def causes(path: Path, *events: dict[str, Any]) -> dict[str, int]:
    return {each.cause: each.total_ns // 1000 for each in report(path, *events).idle}
