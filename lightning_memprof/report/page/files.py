"""Traces and snapshots: those of a run that were analysed, or files by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.report.labels import BEFORE_RECORDING, PEAKS, called, device_parts, peak_note, reserved_parts
from lightning_memprof.report.page.cells import (
    NONE,
    bars,
    count_cell,
    index_cell,
    name_of,
    share_cell,
    size_cell,
    time_cell,
)
from lightning_memprof.report.page.model import Cell, ChartPlace, Facts, Head, Part, Section, Stack, Table, Words
from lightning_memprof.units import format_bytes, format_count, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_memprof.analysis.snapshot.model import DeviceReport, SnapshotReport
    from lightning_memprof.analysis.trace.model import GpuTimes, TraceReport

__all__ = ["snapshots_section", "traces_section"]

# Of each list; a trace may have thousands of kernels, and the page is looked at.
MAX_ROWS: Final = 100
# More are no page any more; every one of them is in --format json.
MAX_SHOWN: Final = 16
STACK: Final = 6


def traces_section(traces: Sequence[TraceReport]) -> Section | None:
    """Return what the traces say; None where there are none."""
    if not traces:
        return None
    parts: list[Part] = []
    for number, trace in enumerate(traces[:MAX_SHOWN]):
        parts += _trace(number, trace, several=len(traces) > 1)
    lead = f"{len(traces)} operator traces." if len(traces) > 1 else "The operator trace."
    if len(traces) > MAX_SHOWN:
        parts.append(Words(f"{len(traces) - MAX_SHOWN} more traces: --format json."))
    return Section("traces", "Traces", lead, parts)


def _trace(number: int, trace: TraceReport, *, several: bool) -> Iterator[Part]:
    name = f", trace {number + 1}" if several else ""
    rank = "unknown" if trace.rank is None else str(trace.rank)
    rows = [
        ("file", str(trace.file)),
        ("rank", rank if trace.world_size is None else f"{rank} of {trace.world_size}"),
        ("devices", ", ".join(trace.devices) or "none: nothing ran on an accelerator"),
        ("events", f"{trace.events:,}".replace(",", " ")),
        ("from start to end", format_ns(trace.end_ns - trace.start_ns)),
        ("steps", str(len(trace.steps))),
    ]
    if trace.step_window is not None:
        rows.append(("a step, mean", format_ns(trace.step_window.mean_step_ns)))
        rows.append((f"{called('data_loading')}, in all steps", format_ns(trace.step_window.data_loading_ns)))
    yield Facts(f"Trace {number + 1}" if several else "Trace", rows, trace.missing, is_wide=True)
    yield ChartPlace("timeline" if number == 0 else f"timeline-{number + 1}")
    for times, title in (
        (trace.gpu_window, "The device, first to last event"),
        (trace.step_window, "The device in steps"),
    ):
        if times is not None:
            yield _gpu(times, f"{title}{name}")
    yield from _idle(number, trace, name)
    yield from _kernels(number, trace, name)
    yield from _operators(number, trace, name)
    yield from _communication(number, trace, name)
    yield from _copies(number, trace, name)
    yield from _host(number, trace, name)


def _gpu(times: GpuTimes, title: str) -> Stack:
    notes = [
        f"busy {percent(times.busy_ns / times.window_ns)}" if times.window_ns else "nothing ran",
        f"{called('memory_copy')} and fills {format_ns(times.memory_copy_ns)} in all",
    ]
    if times.communication_ns:
        hidden = format_ns(times.communication_overlapped_ns)
        notes.append(f"communication {format_ns(times.communication_ns)} in all, {hidden} of it behind computation")
    return Stack(
        title, format_ns(times.window_ns), bars(device_parts(times), times.window_ns, are_bytes=False), notes=notes
    )


def _idle(number: int, trace: TraceReport, name: str) -> Iterator[Part]:
    if not trace.idle or trace.gpu_window is None:
        return
    total = sum(cause.total_ns for cause in trace.idle)
    rows = [
        (
            Cell(called(cause.cause)), time_cell(cause.total_ns, trace.idle[0].total_ns),
            share_cell(cause.total_ns / total if total else None), count_cell(cause.count), time_cell(cause.longest_ns),
            Cell(cause.example),
        )
        for cause in trace.idle
    ]  # fmt: skip
    heads = (
        Head("the host was in"), Head("idle", "number"), Head("share", "number"), Head("gaps", "number"),
        Head("longest", "number"), Head("most of it in", "code"),
    )  # fmt: skip
    yield Table(f"idle-{number}", f"Why the device was idle{name}", heads, rows)


def _kernels(number: int, trace: TraceReport, name: str) -> Iterator[Part]:
    if not trace.kernels:
        return
    total = sum(kernel.total_ns for kernel in trace.kernels)
    rows = [
        (
            Cell(kernel.name.removeprefix("void ")), Cell(name_of(kernel.kind)),
            time_cell(kernel.total_ns, trace.kernels[0].total_ns),
            share_cell(kernel.total_ns / total if total else None), count_cell(kernel.count),
            time_cell(kernel.total_ns / kernel.count if kernel.count else None), time_cell(kernel.max_ns),
        )
        for kernel in trace.kernels[:MAX_ROWS]
    ]  # fmt: skip
    heads = (
        Head("kernel", "code"), Head("kind"), Head("total", "number"), Head("share", "number"), Head("times", "number"),
        Head("mean", "number"), Head("longest", "number"),
    )  # fmt: skip
    yield Table(f"kernels-{number}", f"Kernels{name}", heads, rows, notes=_more(len(trace.kernels)))


def _operators(number: int, trace: TraceReport, name: str) -> Iterator[Part]:
    if not trace.operators:
        return
    total = sum(found.self_ns for found in trace.operators)
    rows = [
        (
            Cell(found.name), time_cell(found.self_ns, trace.operators[0].self_ns),
            share_cell(found.self_ns / total if total else None), time_cell(found.total_ns), count_cell(found.count),
            time_cell(found.max_ns),
        )
        for found in trace.operators[:MAX_ROWS]
    ]  # fmt: skip
    heads = (
        Head("operator", "code"), Head("own", "number", "without the operators that it called"),
        Head("share", "number"), Head("total", "number"), Head("times", "number"), Head("longest", "number"),
    )  # fmt: skip
    yield Table(f"operators-{number}", f"Operators on the host{name}", heads, rows, notes=_more(len(trace.operators)))


def _communication(number: int, trace: TraceReport, name: str) -> Iterator[Part]:
    if trace.collectives:
        rows = [
            (
                Cell(found.name), Cell(found.group or NONE), size_cell(found.bytes_each), count_cell(found.count),
                time_cell(found.total_ns, trace.collectives[0].total_ns), time_cell(found.exposed_ns),
                time_cell(found.median_ns), time_cell(found.max_ns),
            )
            for found in trace.collectives[:MAX_ROWS]
        ]  # fmt: skip
        heads = (
            Head("collective", "code"), Head("group", "code"), Head("size", "number"), Head("times", "number"),
            Head("total", "number"), Head("exposed", "number", "while nothing was computed"), Head("median", "number"),
            Head("longest", "number"),
        )  # fmt: skip
        yield Table(f"comm-{number}", f"Collectives{name}", heads, rows, notes=_more(len(trace.collectives)))


def _copies(number: int, copies: TraceReport, name: str) -> Iterator[Part]:
    if copies.copies:
        rows = [
            (
                Cell(found.kind), Cell(NONE if found.is_pageable is None else "yes" if found.is_pageable else "no"),
                count_cell(found.count), time_cell(found.total_ns, copies.copies[0].total_ns), size_cell(found.bytes),
            )
            for found in copies.copies[:MAX_ROWS]
        ]  # fmt: skip
        heads = (
            Head("copy"), Head("pageable"), Head("times", "number"), Head("total", "number"), Head("bytes", "number")
        )  # fmt: skip
        yield Table(f"copies-{number}", f"Memory copies{name}", heads, rows)


def _host(number: int, trace: TraceReport, name: str) -> Iterator[Part]:
    if trace.runtime_calls:
        rows = [
            (
                Cell(call.name), count_cell(call.count), time_cell(call.total_ns, trace.runtime_calls[0].total_ns),
                time_cell(call.max_ns),
            )
            for call in trace.runtime_calls[:MAX_ROWS]
        ]  # fmt: skip
        heads = (Head("call", "code"), Head("times", "number"), Head("total", "number"), Head("longest", "number"))
        title = f"Calls of the driver and its runtime{name}"
        yield Table(f"runtime-{number}", title, heads, rows, notes=_more(len(trace.runtime_calls)))
    if trace.steps:
        longest = max(step.duration_ns for step in trace.steps)
        rows = [
            (
                index_cell(step.number), time_cell(step.duration_ns, longest), time_cell(step.busy_ns),
                time_cell(step.data_loading_ns),
            )
            for step in trace.steps[:MAX_ROWS]
        ]  # fmt: skip
        heads = (
            Head("step", "number"), Head("time", "number"), Head("device busy", "number"),
            Head(called("data_loading"), "number"),
        )  # fmt: skip
        yield Table(f"steps-{number}", f"Steps{name}", heads, rows, notes=_more(len(trace.steps)))


def _frame(frame: str) -> str:
    """Write a frame with the last two parts of its path; they tell more than where things are installed."""
    parts = frame.split("/")
    return frame if len(parts) < 3 else "/".join(parts[-2:])


def _more(count: int) -> list[str]:
    return [f"{count - MAX_ROWS} more: --format json"] if count > MAX_ROWS else []


def snapshots_section(snapshots: Sequence[SnapshotReport]) -> Section | None:
    """Return what the snapshots say; None where there are none."""
    if not snapshots:
        return None
    parts: list[Part] = []
    for number, snapshot in enumerate(snapshots[:MAX_SHOWN]):
        parts += _snapshot(number, snapshot, several=len(snapshots) > 1)
    if len(snapshots) > MAX_SHOWN:
        parts.append(Words(f"{len(snapshots) - MAX_SHOWN} more snapshots: --format json."))
    lead = f"{len(snapshots)} snapshots" if len(snapshots) > 1 else "A snapshot"
    return Section("snapshots", "Snapshots", f"{lead} of the CUDA allocator.", parts)


def _snapshot(number: int, snapshot: SnapshotReport, *, several: bool) -> Iterator[Part]:
    name = f", snapshot {number + 1}" if several else ""
    rows = [
        ("file", str(snapshot.file)),
        ("devices", ", ".join(str(device.device) for device in snapshot.devices) or "none"),
    ]
    if (failed := snapshot.oom) is not None:
        rows.append(("out of memory", f"{format_bytes(failed.requested_bytes)} were asked for on {failed.device}"))
        if failed.device_free_bytes is not None:
            rows.append(("free then", format_bytes(failed.device_free_bytes)))
        rows.append(("allocated then", format_bytes(failed.live.allocated_bytes)))
        rows.append(("reserved then", format_bytes(failed.live.reserved_bytes)))
    yield Facts(f"Snapshot {number + 1}" if several else "Snapshot", rows, snapshot.missing, is_wide=True)
    yield ChartPlace("allocations" if number == 0 else f"allocations-{number + 1}")
    for device in snapshot.devices:
        yield from _device(number, device, name, several=len(snapshot.devices) > 1)


def _device(number: int, device: DeviceReport, name: str, *, several: bool) -> Iterator[Part]:
    on = f", device {device.device}" if several else ""
    lost = device.fragmentation
    made, returned = device.segments_made, device.segments_returned
    churn = f"{made[0]} made with {format_bytes(made[1])}, {returned[0]} returned with {format_bytes(returned[1])}"
    notes = (
        f"{format_bytes(device.peak_requested_bytes)} {peak_note('requested')}",
        f"{format_bytes(device.peak_reserved_bytes)} {peak_note('reserved')}; {format_count(device.events, 'event')}",
        f"largest free block: {format_bytes(lost.largest_free_block)}; {device.segments} segments",
        f"segments in the ring: {churn}",
    )
    reserved = format_bytes(device.reserved_bytes)
    yield Stack(
        f"Reserved at the end{on}{name}",
        reserved,
        bars(reserved_parts(device), device.reserved_bytes, are_bytes=True),
        (),
        notes,
    )
    if not device.holders_at_peak:
        return
    most = device.holders_at_peak[0].bytes
    rows = [
        (
            Cell(_frame(holder.site) or BEFORE_RECORDING), size_cell(holder.bytes, most), count_cell(holder.blocks),
            Cell(" ← ".join(map(_frame, holder.stack[:STACK]))),
        )
        for holder in device.holders_at_peak[:MAX_ROWS]
    ]  # fmt: skip
    heads = (Head("line", "code"), Head("bytes", "number"), Head("blocks", "number"), Head("stack", "code"))
    title = f"Holders at the {PEAKS['requested'].label}{on}{name}"
    yield Table(f"holders-{number}-{device.device}", title, heads, rows, notes=_more(len(device.holders_at_peak)))
