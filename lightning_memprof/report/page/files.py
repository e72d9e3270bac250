"""Traces and snapshots: those of a run that were analysed, or files by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings import percent
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
from lightning_memprof.units import format_bytes, format_count, format_ns

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
    for number, one in enumerate(traces[:MAX_SHOWN]):
        parts += _trace(number, one, several=len(traces) > 1)
    lead = f"{len(traces)} operator traces." if len(traces) > 1 else "The operator trace."
    if len(traces) > MAX_SHOWN:
        parts.append(Words(f"{len(traces) - MAX_SHOWN} more traces: --format json."))
    return Section("traces", "Traces", lead, parts)


def _trace(number: int, one: TraceReport, *, several: bool) -> Iterator[Part]:
    name = f", trace {number + 1}" if several else ""
    rank = "unknown" if one.rank is None else str(one.rank)
    rows = [
        ("file", str(one.file)),
        ("rank", rank if one.world_size is None else f"{rank} of {one.world_size}"),
        ("devices", ", ".join(one.devices) or "none: nothing ran on an accelerator"),
        ("events", f"{one.events:,}".replace(",", " ")),
        ("from start to end", format_ns(one.end_ns - one.start_ns)),
        ("steps", str(len(one.steps))),
    ]
    if one.step_window is not None:
        rows.append(("a step, mean", format_ns(one.step_window.mean_step_ns)))
        rows.append((f"{called('data_loading')}, in all steps", format_ns(one.step_window.data_loading_ns)))
    yield Facts(f"Trace {number + 1}" if several else "Trace", rows, one.missing, is_wide=True)
    yield ChartPlace("timeline" if number == 0 else f"timeline-{number + 1}")
    for times, title in ((one.gpu_window, "The device, first to last event"), (one.step_window, "The device in steps")):
        if times is not None:
            yield _gpu(times, f"{title}{name}")
    yield from _idle(number, one, name)
    yield from _kernels(number, one, name)
    yield from _operators(number, one, name)
    yield from _communication(number, one, name)
    yield from _copies(number, one, name)
    yield from _host(number, one, name)


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


def _idle(number: int, one: TraceReport, name: str) -> Iterator[Part]:
    if not one.idle or one.gpu_window is None:
        return
    total = sum(cause.total_ns for cause in one.idle)
    rows = [
        (
            Cell(called(cause.cause)), time_cell(cause.total_ns, one.idle[0].total_ns),
            share_cell(cause.total_ns / total if total else None), count_cell(cause.count), time_cell(cause.longest_ns),
            Cell(cause.example),
        )
        for cause in one.idle
    ]  # fmt: skip
    heads = (
        Head("the host was in"), Head("idle", "number"), Head("share", "number"), Head("gaps", "number"),
        Head("longest", "number"), Head("most of it in", "code"),
    )  # fmt: skip
    yield Table(f"idle-{number}", f"Why the device was idle{name}", heads, rows)


def _kernels(number: int, one: TraceReport, name: str) -> Iterator[Part]:
    if not one.kernels:
        return
    total = sum(kernel.total_ns for kernel in one.kernels)
    rows = [
        (
            Cell(kernel.name.removeprefix("void ")), Cell(name_of(kernel.kind)),
            time_cell(kernel.total_ns, one.kernels[0].total_ns),
            share_cell(kernel.total_ns / total if total else None), count_cell(kernel.count),
            time_cell(kernel.total_ns / kernel.count if kernel.count else None), time_cell(kernel.max_ns),
        )
        for kernel in one.kernels[:MAX_ROWS]
    ]  # fmt: skip
    heads = (
        Head("kernel", "code"), Head("kind"), Head("total", "number"), Head("share", "number"), Head("times", "number"),
        Head("mean", "number"), Head("longest", "number"),
    )  # fmt: skip
    yield Table(f"kernels-{number}", f"Kernels{name}", heads, rows, notes=_more(len(one.kernels)))


def _operators(number: int, one: TraceReport, name: str) -> Iterator[Part]:
    if not one.operators:
        return
    total = sum(found.own_ns for found in one.operators)
    rows = [
        (
            Cell(found.name), time_cell(found.own_ns, one.operators[0].own_ns),
            share_cell(found.own_ns / total if total else None), time_cell(found.total_ns), count_cell(found.count),
            time_cell(found.max_ns),
        )
        for found in one.operators[:MAX_ROWS]
    ]  # fmt: skip
    heads = (
        Head("operator", "code"), Head("own", "number", "without the operators that it called"),
        Head("share", "number"), Head("total", "number"), Head("times", "number"), Head("longest", "number"),
    )  # fmt: skip
    yield Table(f"operators-{number}", f"Operators on the host{name}", heads, rows, notes=_more(len(one.operators)))


def _communication(number: int, one: TraceReport, name: str) -> Iterator[Part]:
    if one.collectives:
        rows = [
            (
                Cell(found.name), Cell(found.group or NONE), size_cell(found.bytes_each), count_cell(found.count),
                time_cell(found.total_ns, one.collectives[0].total_ns), time_cell(found.exposed_ns),
                time_cell(found.median_ns), time_cell(found.max_ns),
            )
            for found in one.collectives[:MAX_ROWS]
        ]  # fmt: skip
        heads = (
            Head("collective", "code"), Head("group", "code"), Head("size", "number"), Head("times", "number"),
            Head("total", "number"), Head("exposed", "number", "while nothing was computed"), Head("median", "number"),
            Head("longest", "number"),
        )  # fmt: skip
        yield Table(f"comm-{number}", f"Collectives{name}", heads, rows, notes=_more(len(one.collectives)))


def _copies(number: int, one: TraceReport, name: str) -> Iterator[Part]:
    if one.copies:
        rows = [
            (
                Cell(found.kind), Cell(NONE if found.is_pageable is None else "yes" if found.is_pageable else "no"),
                count_cell(found.count), time_cell(found.total_ns, one.copies[0].total_ns), size_cell(found.bytes),
            )
            for found in one.copies[:MAX_ROWS]
        ]  # fmt: skip
        heads = (
            Head("copy"), Head("pageable"), Head("times", "number"), Head("total", "number"), Head("bytes", "number")
        )  # fmt: skip
        yield Table(f"copies-{number}", f"Memory copies{name}", heads, rows)


def _host(number: int, one: TraceReport, name: str) -> Iterator[Part]:
    if one.runtime_calls:
        rows = [
            (
                Cell(call.name), count_cell(call.count), time_cell(call.total_ns, one.runtime_calls[0].total_ns),
                time_cell(call.max_ns),
            )
            for call in one.runtime_calls[:MAX_ROWS]
        ]  # fmt: skip
        heads = (Head("call", "code"), Head("times", "number"), Head("total", "number"), Head("longest", "number"))
        title = f"Calls of the driver and its runtime{name}"
        yield Table(f"runtime-{number}", title, heads, rows, notes=_more(len(one.runtime_calls)))
    if one.steps:
        longest = max(step.duration_ns for step in one.steps)
        rows = [
            (
                index_cell(step.number), time_cell(step.duration_ns, longest), time_cell(step.busy_ns),
                time_cell(step.data_loading_ns),
            )
            for step in one.steps[:MAX_ROWS]
        ]  # fmt: skip
        heads = (
            Head("step", "number"), Head("time", "number"), Head("device busy", "number"),
            Head(called("data_loading"), "number"),
        )  # fmt: skip
        yield Table(f"steps-{number}", f"Steps{name}", heads, rows, notes=_more(len(one.steps)))


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
    for number, one in enumerate(snapshots[:MAX_SHOWN]):
        parts += _snapshot(number, one, several=len(snapshots) > 1)
    if len(snapshots) > MAX_SHOWN:
        parts.append(Words(f"{len(snapshots) - MAX_SHOWN} more snapshots: --format json."))
    lead = f"{len(snapshots)} snapshots" if len(snapshots) > 1 else "A snapshot"
    return Section("snapshots", "Snapshots", f"{lead} of the CUDA allocator.", parts)


def _snapshot(number: int, one: SnapshotReport, *, several: bool) -> Iterator[Part]:
    name = f", snapshot {number + 1}" if several else ""
    rows = [("file", str(one.file)), ("devices", ", ".join(str(device.device) for device in one.devices) or "none")]
    if (failed := one.oom) is not None:
        rows.append(("out of memory", f"{format_bytes(failed.requested_bytes)} were asked for on {failed.device}"))
        if failed.device_free_bytes is not None:
            rows.append(("free then", format_bytes(failed.device_free_bytes)))
        rows.append(("allocated then", format_bytes(failed.live.allocated_bytes)))
        rows.append(("reserved then", format_bytes(failed.live.reserved_bytes)))
    yield Facts(f"Snapshot {number + 1}" if several else "Snapshot", rows, one.missing, is_wide=True)
    yield ChartPlace("allocations" if number == 0 else f"allocations-{number + 1}")
    for device in one.devices:
        yield from _device(number, device, name, several=len(one.devices) > 1)


def _device(number: int, one: DeviceReport, name: str, *, several: bool) -> Iterator[Part]:
    on = f", device {one.device}" if several else ""
    lost = one.fragmentation
    made, returned = one.segments_made, one.segments_returned
    churn = f"{made[0]} made with {format_bytes(made[1])}, {returned[0]} returned with {format_bytes(returned[1])}"
    notes = (
        f"{format_bytes(one.peak_requested_bytes)} {peak_note('requested')}",
        f"{format_bytes(one.peak_reserved_bytes)} {peak_note('reserved')}; {format_count(one.events, 'event')}",
        f"largest free block: {format_bytes(lost.largest_free_block)}; {one.segments} segments",
        f"segments in the ring: {churn}",
    )
    reserved = format_bytes(one.reserved_bytes)
    yield Stack(
        f"Reserved at the end{on}{name}",
        reserved,
        bars(reserved_parts(one), one.reserved_bytes, are_bytes=True),
        (),
        notes,
    )
    if not one.holders_at_peak:
        return
    most = one.holders_at_peak[0].bytes
    rows = [
        (
            Cell(_frame(holder.site) or BEFORE_RECORDING), size_cell(holder.bytes, most), count_cell(holder.blocks),
            Cell(" ← ".join(map(_frame, holder.stack[:STACK]))),
        )
        for holder in one.holders_at_peak[:MAX_ROWS]
    ]  # fmt: skip
    heads = (Head("line", "code"), Head("bytes", "number"), Head("blocks", "number"), Head("stack", "code"))
    title = f"Holders at the {PEAKS['requested'].label}{on}{name}"
    yield Table(f"holders-{number}-{one.device}", title, heads, rows, notes=_more(len(one.holders_at_peak)))
