"""Tables for export: one row per step, kernel, module, ...; values in bytes and nanoseconds, without formatting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lightning_memprof.account.memory.allocations import run_allocations, window_allocations
from lightning_memprof.account.memory.model import DeviceAllocations
from lightning_memprof.account.memory.report import memory_report
from lightning_memprof.account.snapshot.report import SnapshotReport
from lightning_memprof.account.steps.statistics import window_steps
from lightning_memprof.account.trace.key_averages import collect_rows
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.artifacts.files import read_plain
from lightning_memprof.artifacts.rows import decode_rows
from lightning_memprof.errors import ArtifactError
from lightning_memprof.judge import Facts, Finding, examine, examine_files
from lightning_memprof.read.run.model import Run

Row = Mapping[str, Any]
Table = tuple[str, Iterable[Row]]
"""A name and rows, which may lack columns; a table without rows is not written."""

# Fields of a trace report that hold rows of device activity.
_DEVICE_PARTS: Final = ("kernels", "idle", "runtime_calls", "collectives", "copies", "synchronizations")


def _fields(value: Any, **before: Any) -> dict[str, Any]:
    """Return the fields of a struct, after others."""
    return before | {name: getattr(value, name) for name in value.__struct_fields__}


def run_tables(run: Run) -> Iterator[Table]:
    """Yield the tables of a run: of all its ranks that were read in full."""
    yield "pulse", (_fields(row, rank=rank.rank) for rank in run.ranks for row in rank.pulse)
    yield "steps", _steps(run)
    yield "ranks", _ranks(run)
    yield "findings", _findings(examine(Facts.of(run)))
    yield "artifacts", map(_fields, run.artifacts)
    allocations = run_allocations(run)
    ranks = memory_report(run.in_full, allocations).ranks
    yield (
        "modules",
        (
            _fields(module, rank=rank.rank, window=rank.activations.window, step=rank.activations.step)
            for rank in ranks
            if rank.activations is not None
            for module in rank.activations.modules
        ),
    )
    yield (
        "categories",
        (
            {"rank": rank.rank, "window": peak.window, "step": peak.step, "device": peak.device, "category": name}
            | {"bytes": size, "source": peak.source, "moment": peak.moment}
            for rank in ranks
            if rank.peak is not None
            for peak in (rank.peak, *rank.peak.others)
            for name, size in peak.categories.items()
        ),
    )
    yield from _of_devices(
        ({"rank": window.rank, "window": window.window}, device) for window in allocations for device in window.devices
    )
    problems: list[Row] = [_fields(problem) for problem in (*run.problems, *run.series_problems)]
    problems += [
        {"rank": allocation.rank, "piece": str(allocation.trace), "message": allocation.problem}
        for allocation in allocations
        if allocation.problem
    ]
    yield from _traced(run, problems)
    yield from _series(run)
    yield "problems", problems


def _traced(run: Run, problems: list[Row]) -> Iterator[Table]:
    """Yield the tables of a run's operator traces; an unreadable trace is a problem and hides no other."""
    from lightning_memprof.account.trace.report import trace_report

    parts: dict[str, list[Row]] = {part: [] for part in ("operators", *_DEVICE_PARTS)}
    for artifact in run.files("trace"):
        try:
            report = trace_report(artifact.file)
            parts["operators"] += _operators(artifact.file, rank=artifact.rank, window=artifact.window)
        except ArtifactError as error:
            problems.append({"rank": artifact.rank, "piece": artifact.path, "message": str(error)})
            continue
        for part in _DEVICE_PARTS:
            rows = getattr(report, part)
            parts[part] += [_fields(row, rank=artifact.rank, window=artifact.window) for row in rows]
    yield from parts.items()


def _steps(run: Run) -> Iterator[Row]:
    for rank in run.in_full.ranks:
        for window in rank.windows:
            for step in window_steps(rank, window):
                yield {
                    "rank": rank.rank,
                    "window": window.index,
                    "step": step.step,
                    "global_step": step.global_step,
                    "duration_ns": step.duration_ns,
                    **{f"{phase}_ns": ns for phase, ns in (step.breakdown_ns or {}).items()},
                    "clock": step.clock,
                    "source": step.source,
                    **_fields(step.host),
                    **(_fields(step.device) if step.device else {}),
                }


def _ranks(run: Run) -> Iterator[Row]:
    facts = Facts.of(run)
    across = {rank.rank: rank for rank in facts.ranks.ranks} if facts.ranks else {}
    for rank in run.ranks:
        statistics = facts.statistics.get(rank.rank)
        summary = across.get(rank.rank)
        yield {
            "rank": rank.rank,
            "host": rank.facts.host,
            "device": rank.facts.device,
            "status": rank.status,
            "steps": rank.steps,
            "median_step_ns": statistics.median_ns if statistics else None,
            "mean_step_ns": statistics.mean_ns if statistics else summary.step_ns if summary else None,
            "wait_ns": summary.wait_ns if summary else None,
            "rss_peak_bytes": summary.rss_peak_bytes if summary else None,
            "device_peak_bytes": summary.device_peak_bytes if summary else None,
        }


def _findings(findings: Iterable[Finding]) -> Iterator[Row]:
    for finding in findings:
        yield {
            "rule": finding.rule,
            "severity": finding.severity.name.lower(),
            "title": finding.title,
            "why": finding.why,
            "remedies": list(finding.steps),
            "numbers": dict(finding.numbers),
            "evidence": [msgspec.structs.asdict(evidence) for evidence in finding.evidence],
        }


def _of_devices(devices: Iterable[tuple[Row, DeviceAllocations]]) -> Iterator[Table]:
    """Yield the tables of allocations over time; each device comes with the columns before its own."""
    found = list(devices)
    sites = ((site, before, device.device) for before, device in found for site in device.sites)
    yield "holders", (_fields(site, **before, device=device) for site, before, device in sites)
    yield "memory", (row for before, device in found for row in _curve(device, before))


def _curve(device: DeviceAllocations, before: Row) -> Iterator[Row]:
    for time_ns, live in device.curve:
        total = None if device.start_bytes is None else device.start_bytes + live
        yield {**before, "device": device.device, "time_ns": time_ns, "live_bytes": live, "allocated_bytes": total}


def _operators(trace: Path, **before: Any) -> list[Row]:
    return [_fields(row, **before) for row in collect_rows([trace], group_by_input_shapes=False).rows]


def _series(run: Run) -> Iterator[Table]:
    """Yield the series of the collectors unchanged, one table each."""
    names = dict.fromkeys(name for rank in run.ranks for window in rank.windows for name in window.series)
    for name in names:
        yield (
            f"series_{name}",
            [
                {"rank": rank.rank, "window": window.index, **row}
                for rank in run.ranks
                for window in rank.windows
                if name in window.series
                for row in decode_rows(read_plain(window.series[name]), dict)[0]
            ],
        )


def trace_tables(reports: Sequence[TraceReport]) -> Iterator[Table]:
    """Yield the tables of traces."""
    yield "traces", map(_trace, reports)
    for part in ("steps", *_DEVICE_PARTS):
        yield part, [_fields(row, file=str(report.file)) for report in reports for row in getattr(report, part)]
    yield "operators", (row for trace in reports for row in _operators(trace.file, file=str(trace.file)))
    yield from _of_devices(
        ({"file": str(trace.file)}, device) for trace in reports for device in window_allocations(trace.file)
    )
    yield "findings", _findings(examine_files(reports, ()))


def _trace(report: TraceReport) -> Row:
    row: dict[str, Any] = {
        name: getattr(report, name)
        for name in ("file", "rank", "world_size", "devices", "start_ns", "end_ns", "events", "missing")
    }
    for name, times in (("gpu", report.gpu_window), ("steps", report.step_window)):
        if times is not None:
            row |= {f"{name}_{key}": value for key, value in msgspec.structs.asdict(times).items()}
    return row


def snapshot_tables(reports: Sequence[SnapshotReport]) -> Iterator[Table]:
    """Yield the tables of snapshots."""
    sizes = ("reserved_bytes", "allocated_bytes", "requested_bytes", "inactive_bytes", "pending_bytes")
    peaks = ("peak_requested_bytes", "peak_reserved_bytes", "peak_time_us", "events")
    devices = [(str(snapshot.file), device) for snapshot in reports for device in snapshot.devices]
    yield (
        "devices",
        (
            {"file": file, "device": device.device}
            | {name: getattr(device.snapshot, name) for name in sizes}
            | {name: getattr(device, name) for name in peaks}
            | {"segments": len(device.snapshot.segments)}
            for file, device in devices
        ),
    )
    held = ((file, device.device, holder) for file, device in devices for holder in device.holders_at_peak)
    yield "holders", (_fields(holder, file=file, device=device) for file, device, holder in held)
    histories = [(file, device.device, device.snapshot) for file, device in devices]
    yield (
        "events",
        (
            _fields(event, file=file, device=device) | {"stack": _stack(history.stacks[event.stack])}
            for file, device, history in histories
            for event in history.events
        ),
    )
    yield (
        "blocks",
        (
            _fields(block, file=file, device=device, segment=segment.address, pool=list(segment.pool))
            | {"stack": _stack(history.stacks[block.stack])}
            for file, device, history in histories
            for segment in history.segments
            for block in segment.blocks
        ),
    )
    yield "findings", _findings(examine_files((), reports))


def _stack(frames: Iterable[object]) -> str:
    return ";".join(map(str, frames))
