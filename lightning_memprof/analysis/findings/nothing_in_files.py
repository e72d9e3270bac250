"""No rule applies to traces and snapshots: what they show all the same."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from lightning_memprof.analysis.findings.model import NOTHING_FOUND, Evidence, Finding, Severity
from lightning_memprof.analysis.run.locate import shown_path
from lightning_memprof.units import format_bytes, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprof.analysis.snapshot.model import HeldLine, SnapshotReport
    from lightning_memprof.analysis.trace.model import TraceReport

__all__ = ["nothing_in_files"]


def nothing_in_files(traces: Sequence[TraceReport], snapshots: Sequence[SnapshotReport]) -> Finding:
    """Say how busy the device was, or how full the memory, and the command that shows more."""
    on_device = [trace for trace in traces if trace.gpu_window is not None]
    if on_device:
        return _of_device(min(on_device, key=_busy))
    used = [snapshot for snapshot in snapshots if snapshot.devices]
    if used:
        return _of_memory(
            max(used, key=lambda snapshot: max(device.peak_requested_bytes for device in snapshot.devices))
        )
    if traces:
        return _of_host(traces[0])
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        sentence="Nothing was recorded.",
        why="The snapshot has no device: nothing was allocated in its process."
        if snapshots
        else "No trace and no snapshot could be read.",
        next_steps=("Record a training: Trainer(callbacks=[MemProfilerCallback()], profiler='fts_extended').",),
    )


def _busy(trace: TraceReport) -> float:
    window = trace.gpu_window
    return window.busy_ns / window.window_ns if window is not None and window.window_ns else 1.0


def _of_device(trace: TraceReport) -> Finding:
    window = trace.gpu_window
    if window is None:
        raise ValueError(f"{trace.file}: has no device event")
    parts = {
        "compute": window.compute_ns,
        "communication": window.communication_ns,
        "copies": window.memory_copy_ns,
    }
    length = max(window.window_ns, 1)
    named = ", ".join(f"{name} {percent(ns / length)}" for name, ns in parts.items() if ns)
    steps = trace.step_window
    of_steps = f", a step {format_ns(steps.mean_step_ns)}" if steps is not None else ""
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        sentence=f"No bottleneck found: the device is busy {percent(_busy(trace))} of the time.",
        why=f"{format_ns(window.window_ns)} were recorded{of_steps}: {named or 'nothing ran'}.",
        next_steps=(_look(trace),),
        numbers={"busy_share": _busy(trace), "window_ns": window.window_ns},
        evidence=(Evidence(artifact=str(trace.file), rank=trace.rank),),
    )


def _of_host(trace: TraceReport) -> Finding:
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        sentence="Nothing can be said of a device: the trace has the host only.",
        why=f"In {format_ns(trace.end_ns - trace.start_ns)} {_recorded(trace.events)} on the host.",
        next_steps=(_look(trace),),
        evidence=(Evidence(artifact=str(trace.file), rank=trace.rank),),
    )


def _recorded(events: int) -> str:
    return "1 event was recorded" if events == 1 else f"{events:,} events were recorded"


def _of_memory(snapshot: SnapshotReport) -> Finding:
    device = max(snapshot.devices, key=lambda device: device.peak_requested_bytes)
    holder = next((site for site in device.lines_at_peak if site.site), None)
    most = "" if holder is None else f"; {format_bytes(holder.bytes)} of it were allocated by {holder.site}"
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        sentence=f"No fault found: {format_bytes(device.peak_requested_bytes)} were requested at the peak.",
        why=f"The allocator had at most {format_bytes(device.peak_reserved_bytes)} of device {device.device}{most}.",
        next_steps=(_less_at_peak(holder),),
        numbers={
            "device": device.device,
            "peak_requested_bytes": device.peak_requested_bytes,
            "peak_reserved_bytes": device.peak_reserved_bytes,
        },
        evidence=(Evidence(artifact=str(snapshot.file)),),
    )


def _less_at_peak(holder: HeldLine | None) -> str:
    if holder is None:
        return "Record who allocates: AllocatorHistory(), or torch.cuda.memory._record_memory_history(stacks='python')."
    return f"To need less at the peak, begin with {holder.site}: it holds most of what has a stack."


def _look(trace: TraceReport) -> str:
    return f"See every operator on a time line: lightning-memprof view {_quoted(trace.file)}"


def _quoted(path: object) -> str:
    from pathlib import Path

    return shlex.quote(shown_path(Path(str(path))))
