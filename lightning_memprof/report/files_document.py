"""Traces and snapshots as JSON: numbers in base units (bytes, nanoseconds), null for what is unavailable."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.artifacts.manifest import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_memprof.analysis.findings import Finding, Verdict
    from lightning_memprof.analysis.snapshot.model import DeviceReport, SnapshotReport
    from lightning_memprof.analysis.snapshot.replay import Holder
    from lightning_memprof.analysis.trace.model import TraceReport
    from lightning_memprof.report.files_view import FilesView

__all__ = [
    "files_document",
    "finding_document",
    "plain",
    "snapshots_document",
    "traces_document",
    "verdict_document",
]

# A trace names thousands of kernels, a snapshot thousands of stacks: the rest is one sum.
MAX_ROWS: Final = 100


def files_document(view: FilesView) -> dict[str, Any]:
    """Return a view of files as values that any JSON encoder takes."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "verdict": verdict_document(view.verdict),
        "findings": [finding_document(finding) for finding in view.findings],
        "traces": traces_document(view.traces),
        "snapshots": snapshots_document(view.snapshots),
        "files": [{"file": os.fspath(file), "size_bytes": size} for file, size in view.sizes.items()],
        "problems": [dataclasses.asdict(problem) for problem in view.problems],
        "left_out": view.left_out,
        "commands": [str(command) for command in view.commands],
    }
    return {key: plain(value) for key, value in document.items()}


def traces_document(traces: Iterable[TraceReport]) -> list[dict[str, Any]]:
    """Return what was found in traces; of long lists the first 100, which are the longest times."""
    return [_trace(trace) for trace in traces]


def snapshots_document(snapshots: Iterable[SnapshotReport]) -> list[dict[str, Any]]:
    """Return what was found in snapshots; of the holders the 100 largest, and the sum of the others."""
    return [
        {
            "file": os.fspath(snapshot.file),
            "form": snapshot.form,
            "devices": [_device(device) for device in snapshot.devices],
            "oom": {**dataclasses.asdict(snapshot.oom), "live": snapshot.oom.live._asdict()}
            if snapshot.oom is not None
            else None,
            "missing": list(snapshot.missing),
        }
        for snapshot in snapshots
    ]


def verdict_document(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict, its severity as a word."""
    return {
        "sentence": verdict.sentence,
        "why": verdict.why,
        "next": verdict.next,
        "rule": verdict.rule,
        "severity": verdict.severity.name.lower(),
    }


def finding_document(finding: Finding) -> dict[str, Any]:
    """Return a finding, its severity as a word."""
    return {
        "rule": finding.rule,
        "severity": finding.severity.name.lower(),
        "sentence": finding.sentence,
        "why": finding.why,
        "numbers": finding.numbers,
        "evidence": [dataclasses.asdict(source) for source in finding.evidence],
        "next_steps": list(finding.next_steps),
    }


def plain(value: Any) -> Any:
    """Return a value without what JSON has no word for: a manifest may hold NaN, and Python's reader takes it."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _trace(trace: TraceReport) -> dict[str, Any]:
    return {
        "file": os.fspath(trace.file),
        "rank": trace.rank,
        "world_size": trace.world_size,
        "devices": list(trace.devices),
        "start_ns": trace.start_ns,
        "end_ns": trace.end_ns,
        "events": trace.events,
        "gpu_window": _fields(trace.gpu_window),
        "step_window": _fields(trace.step_window),
        "steps": [dataclasses.asdict(step) for step in trace.steps],
        "idle": [dataclasses.asdict(cause) for cause in trace.idle],
        **{
            key: [dataclasses.asdict(row) for row in getattr(trace, key)[:MAX_ROWS]]
            for key in (
                "kernels",
                "collectives",
                "copies",
                "synchronizations",
                "runtime_calls",
                "profiler_overhead",
                "operators",
            )
        },
        "missing": list(trace.missing),
    }


def _device(device: DeviceReport) -> dict[str, Any]:
    sizes = (
        "reserved_bytes", "allocated_bytes", "requested_bytes", "inactive_bytes", "pending_bytes",
        "peak_requested_bytes", "peak_reserved_bytes", "peak_time_us", "events", "segments", "is_expandable",
        "start_bytes", "start_us", "end_us",
    )  # fmt: skip
    others = device.holders_at_peak[MAX_ROWS:]
    return {
        "device": device.device,
        **{name: getattr(device, name) for name in sizes},
        "holders_at_peak": [_holder(holder) for holder in device.holders_at_peak[:MAX_ROWS]],
        "other_holders_bytes": sum(holder.bytes for holder in others),
        "other_holders": len(others),
        "lines_at_peak": [dataclasses.asdict(site) for site in device.lines_at_peak[:MAX_ROWS]],
        "largest_at_peak": [dataclasses.asdict(block) for block in device.largest_at_peak],
        "oldest": [
            {**dataclasses.asdict(holder), "holder": _holder(holder.holder)} for holder in device.oldest[:MAX_ROWS]
        ],
        "pools": [dataclasses.asdict(pool) for pool in device.pools[:MAX_ROWS]],
        "fragmentation": dataclasses.asdict(device.fragmentation),
        "segments_made": dict(zip(("count", "bytes"), device.segments_made, strict=True)),
        "segments_returned": dict(zip(("count", "bytes"), device.segments_returned, strict=True)),
    }


def _holder(holder: Holder) -> dict[str, Any]:
    return {"site": holder.site, "bytes": holder.bytes, "blocks": holder.blocks, "stack": list(holder.stack)}


def _fields(value: Any) -> dict[str, Any] | None:
    return None if value is None else dataclasses.asdict(value)
