"""Traces: device time, idle causes, kernels, operators, collectives, copies and steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import GpuTimes, StepTimes, TraceReport
from lightning_memprof.judge.device_bound import busy
from lightning_memprof.read.trace.kernel_names import kernel_names
from lightning_memprof.report.document import Cell, Chart, Facts, Item, Paragraph, Section, Stack, Table, Words, phrase
from lightning_memprof.report.sections.labels import bars, device_parts
from lightning_memprof.report.sections.tables import MAX_ROWS, Field, filled, ratio, rest

# A run may have hundreds of traces.
MAX_SHOWN: Final = 16
PINNED: Final = {None: None, True: "pageable", False: "pinned"}


def traces_section(traces: Sequence[TraceReport]) -> Section | None:
    """Return the traces, of several first those whose device is least busy; None where there are none."""
    if not traces:
        return None
    ordered = sorted(traces, key=busy)
    parts: list[Item] = list(_overview(ordered)) if len(traces) > 1 else []
    for number, trace in enumerate(ordered[:MAX_SHOWN]):
        parts += _trace(number, trace, several=len(traces) > 1)
    lead = f"{len(traces)} operator traces." if len(traces) > 1 else "The operator trace."
    parts += map(Paragraph, rest(traces, MAX_SHOWN, "more traces"))
    return Section("traces", "Traces", lead, parts)


def _overview(traces: Sequence[TraceReport]) -> Iterator[Table]:
    return filled(
        Table("traces-table", "Traces", top=MAX_SHOWN),
        [(trace, _shares(trace.gpu_window), trace.work_window) for trace in traces],
        Field("file", "code", lambda row: row[0].file.name),
        Field("rank", "index", lambda row: row[0].rank),
        Field("device window", "ns", lambda row: row[0].gpu_window.window_ns or None if row[0].gpu_window else None),
        Field("busy", "share", lambda row: row[1][0]),
        Field("compute", "share", lambda row: row[1][1], priority=2),
        Field(f"exposed {Part.COLLECTIVE.label}", "share", lambda row: row[1][2], priority=3),
        Field(Part.RANK_WAIT.label, "share", lambda row: _met(row[0], Part.RANK_WAIT), priority=2),
        Field("transfer", "share", lambda row: _met(row[0], Part.COLLECTIVE), priority=2),
        Field(Part.COPY.label, "share", lambda row: row[1][3], priority=1),
        Field("mean step", "ns", lambda row: row[2].mean_step_ns if row[2] else None),
        Field(Part.IDLE_DATA.label, "share", lambda row: _waits(row[2]) if row[2] else None, priority=4),
        most=None,
    )


def _met(trace: TraceReport, part: Part) -> float | None:
    """Return the share of the steps that a part of the collectives has, of traces whose collectives are in a ledger."""
    ledger = trace.device_ledger or trace.host_ledger
    return ratio(ledger.communicates(part), ledger.step_ns) if ledger is not None and ledger.communication else None


def _shares(times: GpuTimes | None) -> Sequence[float | None]:
    """Return the shares of a window that are busy, compute, exposed collectives and memory copies."""
    if times is None:
        return [None] * 4
    parts = (times.busy_ns, times.compute_ns, times.communication_exposed_ns, times.memory_copy_ns)
    return [ratio(ns, times.window_ns) for ns in parts]


def _waits(steps: StepTimes) -> float | None:
    """Return the share of the steps' time that waits for data."""
    return ratio(steps.data_loading_ns, steps.window_ns)


def _trace(number: int, trace: TraceReport, *, several: bool) -> Iterator[Item]:
    name = f", trace {number + 1}" if several else ""
    rank = "unknown" if trace.rank is None else str(trace.rank)
    rows: list[tuple[str, Cell | Words]] = [
        ("file", Cell(str(trace.file), "path")),
        ("rank", rank if trace.world_size is None else f"{rank} of {trace.world_size}"),
        ("devices", ", ".join(dict.fromkeys(trace.devices)) or "none: no device activity in this trace"),
        ("events", Cell(trace.events, "count")),
        ("duration", Cell(trace.end_ns - trace.start_ns, "ns")),
        ("steps", Cell(len(trace.steps), "count")),
    ]
    if (steps := trace.work_window) is not None:
        rows.append(("mean step", Cell(steps.mean_step_ns, "ns")))
        rows.append((Part.IDLE_DATA.label, phrase("{ns} of the steps ({share})", steps.data_loading_ns, _waits(steps))))
    yield Facts(f"Trace {number + 1}" if several else "Trace", rows, trace.missing, is_wide=True)
    yield Chart(f"timeline-{number}")
    for times, title in ((trace.gpu_window, "Device time, first to last event"), (steps, "Device time in steps")):
        if times is not None:
            yield device_stack(times, f"{title}{name}")
    if len(trace.steps) > 1:
        durations = [step.duration_ns for step in trace.steps]
        words = phrase("count {}, min {ns}, max {ns}", len(durations), min(durations), max(durations))
        yield Chart(f"step-times-{number}", f"Step times{name}", durations, words)
    yield from _computation(number, trace, name)
    yield from _transfers(number, trace, name)
    yield from _host(number, trace, name)


def device_stack(times: GpuTimes, title: str) -> Stack:
    """Return the parts of a device's time."""
    notes: list[Words] = [
        phrase("busy {share}", times.busy_ns / times.window_ns) if times.window_ns else "no device activity",
        phrase("{} and fills: total {ns}", Part.COPY.label, times.memory_copy_ns),
    ]
    if times.communication_ns:
        parts = (times.communication_ns, times.communication_exposed_ns, times.communication_overlapped_ns)
        notes.append(phrase("{}: total {ns}, {ns} exposed, {ns} overlapped by compute", Part.COLLECTIVE.label, *parts))
    whole = times.window_ns
    return Stack(title, Cell(whole, "ns"), bars(device_parts(times), whole, "ns"), notes=notes)


def _computation(number: int, trace: TraceReport, name: str) -> Iterator[Table]:
    idle_ns = sum(cause.total_ns for cause in trace.idle)
    yield from filled(
        Table(f"idle-{number}", f"Idle device, by host activity{name}"),
        trace.idle if trace.gpu_window is not None else (),
        Field("host activity", "text", lambda cause: cause.cause.label),
        Field("idle", "ns", lambda cause: cause.total_ns, bar=True),
        Field("share", "share", lambda cause: ratio(cause.total_ns, idle_ns)),
        Field("count", "count", lambda cause: cause.count, priority=1),
        Field("max", "ns", lambda cause: cause.longest_ns, priority=2),
        Field("longest in", "code", lambda cause: cause.example, priority=3),
    )
    kernels_ns = sum(kernel.total_ns for kernel in trace.kernels)
    names = kernel_names(kernel.name for kernel in trace.kernels[:MAX_ROWS])
    names += [""] * (len(trace.kernels) - len(names))
    yield from filled(
        Table(f"kernels-{number}", f"Kernels{name}", top=6),
        list(zip(names, trace.kernels, strict=True)),
        Field("kernel", "code", lambda row: row[0]),
        Field("kind", "text", lambda row: row[1].kind.replace("_", " "), priority=3),
        Field("total", "ns", lambda row: row[1].total_ns, bar=True),
        Field("share", "share", lambda row: ratio(row[1].total_ns, kernels_ns)),
        Field("count", "count", lambda row: row[1].count),
        Field("mean", "ns", lambda row: ratio(row[1].total_ns, row[1].count), priority=1),
        Field("max", "ns", lambda row: row[1].max_ns, priority=2),
    )
    self_ns = sum(operator.self_ns for operator in trace.operators)
    yield from filled(
        Table(f"operators-{number}", f"Operators on the host{name}", top=6),
        trace.operators,
        Field("operator", "code", lambda operator: operator.name),
        Field("self", "ns", lambda operator: operator.self_ns, "without the operators that it called", bar=True),
        Field("share", "share", lambda operator: ratio(operator.self_ns, self_ns)),
        Field("total", "ns", lambda operator: operator.total_ns, priority=1),
        Field("count", "count", lambda operator: operator.count),
        Field("max", "ns", lambda operator: operator.max_ns, priority=2),
    )


def _transfers(number: int, trace: TraceReport, name: str) -> Iterator[Table]:
    yield from filled(
        Table(f"comm-{number}", f"Collectives{name}", top=6),
        trace.collectives,
        Field("collective", "code", lambda kind: kind.name),
        Field("group", "code", lambda kind: kind.group or None, priority=4),
        Field("size", "bytes", lambda kind: kind.bytes_each),
        Field("count", "count", lambda kind: kind.count),
        Field("total", "ns", lambda kind: kind.total_ns, bar=True),
        Field("exposed", "ns", lambda kind: kind.exposed_ns, "with no compute running"),
        Field("median", "ns", lambda kind: kind.median_ns, priority=1),
        Field("max", "ns", lambda kind: kind.max_ns, priority=2),
        Field("bus bandwidth", "bytes/s", lambda kind: kind.bus_bytes_per_s, "of the fastest", priority=3),
    )
    yield from filled(
        Table(f"copies-{number}", f"Memory copies{name}"),
        trace.copies,
        Field("copy", "text", lambda copies: copies.kind),
        Field("host memory", "text", lambda copies: PINNED[copies.is_pageable]),
        Field("count", "count", lambda copies: copies.count),
        Field("total", "ns", lambda copies: copies.total_ns, bar=True),
        Field("bytes", "bytes", lambda copies: copies.bytes),
    )


def _host(number: int, trace: TraceReport, name: str) -> Iterator[Table]:
    yield from filled(
        Table(f"runtime-{number}", f"CUDA runtime and driver calls{name}", top=4),
        trace.runtime_calls,
        Field("call", "code", lambda call: call.name),
        Field("count", "count", lambda call: call.count),
        Field("total", "ns", lambda call: call.total_ns, bar=True),
        Field("max", "ns", lambda call: call.max_ns),
    )
