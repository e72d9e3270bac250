"""Traces: device time, idle causes, kernels, operators, collectives, copies and steps."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from lightning_memprof.report.document import (
    Cell,
    Chart,
    Column,
    Facts,
    Paragraph,
    Part,
    Section,
    Stack,
    Table,
    Words,
    code,
    count,
    duration,
    index,
    phrase,
    share,
    size,
    text,
)
from lightning_memprof.report.sections.labels import bars, called, device_parts, more

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lightning_memprof.analysis.trace.model import GpuTimes, TraceReport

__all__ = ["busy_share", "device_stack", "kernel_names", "traces_section"]

# A trace may have thousands of kernels, a run hundreds of traces: --format json has all.
MAX_ROWS: Final = 100
MAX_SHOWN: Final = 16
PINNED: Final = {None: None, True: "pageable", False: "pinned"}


def traces_section(traces: Sequence[TraceReport]) -> Section | None:
    """Return the traces, of several first those whose device is least busy; None where there are none."""
    if not traces:
        return None
    ordered = sorted(traces, key=busy_share)
    parts: list[Part] = [_overview(ordered)] if len(traces) > 1 else []
    for number, trace in enumerate(ordered[:MAX_SHOWN]):
        parts += _trace(number, trace, several=len(traces) > 1)
    lead = f"{len(traces)} operator traces." if len(traces) > 1 else "The operator trace."
    if len(traces) > MAX_SHOWN:
        parts.append(Paragraph(more(len(traces) - MAX_SHOWN, "more traces")))
    return Section("traces", "Traces", lead, parts)


def busy_share(trace: TraceReport) -> float:
    """Return the share of the window in which the device was busy, 2 for a trace without a device."""
    window = trace.gpu_window
    return window.busy_ns / window.window_ns if window is not None and window.window_ns else 2.0


def _overview(traces: Sequence[TraceReport]) -> Table:
    rows = []
    for trace in traces:
        window, steps = trace.gpu_window, trace.step_window
        whole = window.window_ns if window is not None and window.window_ns else None
        parts = (
            [window.busy_ns, window.compute_ns, window.communication_exposed_ns, window.memory_copy_ns]
            if window is not None
            else []
        )
        shares = [share(ns / whole) for ns in parts] if whole else [share(None)] * 4
        waits = steps.data_loading_ns / steps.window_ns if steps is not None and steps.window_ns else None
        rows.append(
            (
                code(trace.file.name),
                index(trace.rank),
                duration(whole),
                *shares,
                duration(steps.mean_step_ns if steps is not None else None),
                share(waits),
            )
        )
    columns = (
        Column("file", "code"),
        Column("rank", "index"),
        Column("device window", "ns"),
        Column("busy", "share"),
        Column("compute", "share", priority=2),
        Column("exposed communication", "share", priority=3),
        Column(called("memory_copy"), "share", priority=1),
        Column("mean step", "ns"),
        Column(called("data_loading"), "share", priority=4),
    )
    return Table(id="traces-table", title="Traces", columns=columns, rows=rows, top=MAX_SHOWN)


def _trace(number: int, trace: TraceReport, *, several: bool) -> Iterator[Part]:
    name = f", trace {number + 1}" if several else ""
    rank = "unknown" if trace.rank is None else str(trace.rank)
    rows: list[tuple[str, Cell | Words]] = [
        ("file", Cell(str(trace.file), "path")),
        ("rank", rank if trace.world_size is None else f"{rank} of {trace.world_size}"),
        ("devices", ", ".join(dict.fromkeys(trace.devices)) or "none: no device activity in this trace"),
        ("events", count(trace.events)),
        ("duration", duration(trace.end_ns - trace.start_ns)),
        ("steps", count(len(trace.steps))),
    ]
    if (steps := trace.step_window) is not None:
        rows.append(("mean step", duration(steps.mean_step_ns)))
        part = share(steps.data_loading_ns / steps.window_ns if steps.window_ns else None)
        rows.append((called("data_loading"), phrase("{} of the steps ({})", duration(steps.data_loading_ns), part)))
    yield Facts(f"Trace {number + 1}" if several else "Trace", rows, trace.missing, is_wide=True)
    yield Chart("timeline" if number == 0 else f"timeline-{number + 1}")
    for times, title in ((trace.gpu_window, "Device time, first to last event"), (steps, "Device time in steps")):
        if times is not None:
            yield device_stack(times, f"{title}{name}")
    if len(trace.steps) > 1:
        durations = [step.duration_ns for step in trace.steps]
        words = phrase("count {}, min {}, max {}", len(durations), *map(duration, (min(durations), max(durations))))
        yield Chart(f"step-times-{number}", f"Step times{name}", durations, words)
    yield from _idle(number, trace, name)
    yield from _kernels(number, trace, name)
    yield from _operators(number, trace, name)
    yield from _collectives(number, trace, name)
    yield from _copies(number, trace, name)
    yield from _host(number, trace, name)


def device_stack(times: GpuTimes, title: str) -> Stack:
    """Return the parts of a device's time."""
    notes: list[Words] = [
        phrase("busy {}", share(times.busy_ns / times.window_ns)) if times.window_ns else "no device activity",
        phrase(f"{called('memory_copy')} and fills: total {{}}", duration(times.memory_copy_ns)),
    ]
    if times.communication_ns:
        words = "communication: total {}, {} exposed, {} overlapped by compute"
        parts = (times.communication_ns, times.communication_exposed_ns, times.communication_overlapped_ns)
        notes.append(phrase(words, *map(duration, parts)))
    whole = times.window_ns
    return Stack(title, duration(whole), bars(device_parts(times), whole, "ns"), notes=notes)


def _idle(number: int, trace: TraceReport, name: str) -> Iterator[Table]:
    if not trace.idle or trace.gpu_window is None:
        return
    total = sum(cause.total_ns for cause in trace.idle)
    rows = [
        (
            text(called(cause.cause)),
            duration(cause.total_ns, trace.idle[0].total_ns),
            share(cause.total_ns / total if total else None),
            count(cause.count),
            duration(cause.longest_ns),
            code(cause.example),
        )
        for cause in trace.idle
    ]
    columns = (
        Column("host activity"),
        Column("idle", "ns"),
        Column("share", "share"),
        Column("count", "count", priority=1),
        Column("max", "ns", priority=2),
        Column("longest in", "code", priority=3),
    )
    yield Table(id=f"idle-{number}", title=f"Idle device, by host activity{name}", columns=columns, rows=rows)


def _kernels(number: int, trace: TraceReport, name: str) -> Iterator[Table]:
    if not trace.kernels:
        return
    total = sum(kernel.total_ns for kernel in trace.kernels)
    shown = trace.kernels[:MAX_ROWS]
    rows = [
        (
            code(short),
            text(kernel.kind.replace("_", " ")),
            duration(kernel.total_ns, trace.kernels[0].total_ns),
            share(kernel.total_ns / total if total else None),
            count(kernel.count),
            duration(kernel.total_ns / kernel.count if kernel.count else None),
            duration(kernel.max_ns),
        )
        for short, kernel in zip(kernel_names(kernel.name for kernel in shown), shown, strict=True)
    ]
    columns = (
        Column("kernel", "code"),
        Column("kind", priority=3),
        Column("total", "ns"),
        Column("share", "share"),
        Column("count", "count"),
        Column("mean", "ns", priority=1),
        Column("max", "ns", priority=2),
    )
    others = trace.kernels[MAX_ROWS:]
    yield Table(
        id=f"kernels-{number}",
        title=f"Kernels{name}",
        columns=columns,
        rows=rows,
        notes=[more(len(others))] * bool(others),
        top=6,
    )


def _operators(number: int, trace: TraceReport, name: str) -> Iterator[Table]:
    total = sum(operator.self_ns for operator in trace.operators)
    if not trace.operators:
        return
    rows = [
        (
            code(operator.name),
            duration(operator.self_ns, trace.operators[0].self_ns),
            share(operator.self_ns / total if total else None),
            duration(operator.total_ns),
            count(operator.count),
            duration(operator.max_ns),
        )
        for operator in trace.operators[:MAX_ROWS]
    ]
    columns = (
        Column("operator", "code"),
        Column("self", "ns", "without the operators that it called"),
        Column("share", "share"),
        Column("total", "ns", priority=1),
        Column("count", "count"),
        Column("max", "ns", priority=2),
    )
    others = trace.operators[MAX_ROWS:]
    yield Table(
        id=f"operators-{number}",
        title=f"Operators on the host{name}",
        columns=columns,
        rows=rows,
        notes=[more(len(others))] * bool(others),
        top=6,
    )


def _collectives(number: int, trace: TraceReport, name: str) -> Iterator[Table]:
    if not trace.collectives:
        return
    rows = [
        (
            code(kind.name),
            code(kind.group or None),
            size(kind.bytes_each),
            count(kind.count),
            duration(kind.total_ns, trace.collectives[0].total_ns),
            duration(kind.exposed_ns),
            duration(kind.median_ns),
            duration(kind.max_ns),
        )
        for kind in trace.collectives[:MAX_ROWS]
    ]
    columns = (
        Column("collective", "code"),
        Column("group", "code", priority=4),
        Column("size", "bytes"),
        Column("count", "count"),
        Column("total", "ns"),
        Column("exposed", "ns", "with no compute running"),
        Column("median", "ns", priority=1),
        Column("max", "ns", priority=2),
    )
    yield Table(id=f"comm-{number}", title=f"Collectives{name}", columns=columns, rows=rows, top=6)


def _copies(number: int, trace: TraceReport, name: str) -> Iterator[Table]:
    if not trace.copies:
        return
    rows = [
        (
            text(copies.kind),
            text(PINNED[copies.is_pageable]),
            count(copies.count),
            duration(copies.total_ns, trace.copies[0].total_ns),
            size(copies.bytes),
        )
        for copies in trace.copies[:MAX_ROWS]
    ]
    columns = (
        Column("copy"),
        Column("host memory"),
        Column("count", "count"),
        Column("total", "ns"),
        Column("bytes", "bytes"),
    )
    yield Table(id=f"copies-{number}", title=f"Memory copies{name}", columns=columns, rows=rows)


def _host(number: int, trace: TraceReport, name: str) -> Iterator[Table]:
    if trace.runtime_calls:
        calls = [
            (
                code(call.name),
                count(call.count),
                duration(call.total_ns, trace.runtime_calls[0].total_ns),
                duration(call.max_ns),
            )
            for call in trace.runtime_calls[:MAX_ROWS]
        ]
        columns = (Column("call", "code"), Column("count", "count"), Column("total", "ns"), Column("max", "ns"))
        title = f"CUDA runtime and driver calls{name}"
        yield Table(id=f"runtime-{number}", title=title, columns=columns, rows=calls, top=4)
    if trace.steps:
        longest = max(step.duration_ns for step in trace.steps)
        steps = [
            (
                index(step.number),
                duration(step.duration_ns, longest),
                duration(step.busy_ns),
                duration(step.data_loading_ns),
            )
            for step in trace.steps[:MAX_ROWS]
        ]
        columns = (
            Column("step", "index"),
            Column("duration", "ns"),
            Column("device busy", "ns"),
            Column(called("data_loading"), "ns"),
        )
        yield Table(id=f"steps-{number}", title=f"Steps{name}", columns=columns, rows=steps, is_detail=True)


def kernel_names(names: Iterable[str]) -> list[str]:
    """Return each kernel's name without its template's arguments.

    Kernels that would then share a name keep the part of their arguments that differs: ``Kernel2<…256x128…>``.
    """
    full = [name.removeprefix("void ") for name in names]
    groups: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(full):
        groups[name.partition("<")[0] or name].append(name)
    shown = {name: short for base, alike in groups.items() for name, short in _distinct(base, alike).items()}
    return [shown[name] for name in full]


def _distinct(base: str, alike: list[str]) -> dict[str, str]:
    if len(alike) == 1:
        return {alike[0]: base}
    rests = [_arguments(name[len(base) :]) for name in alike]
    if len(set(rests)) < len(rests):
        rests = [name[len(base) :] for name in alike]
    front = _common(rests)
    ends = [rest[front:][::-1] for rest in rests]
    back = max(min(_common(ends), *(len(end) - 1 for end in ends)), 0)
    parts = [rest[front : len(rest) - back] for rest in rests]
    before = "" if not front else "<" if front == 1 else "<…"
    after = "" if not back else f"{'…' * (back > 1)}{rests[0][-1]}"
    return {name: f"{base}{before}{part}{after}" for name, part in zip(alike, parts, strict=True)}


def _common(texts: list[str]) -> int:
    """Return the length of the common beginning of some texts, up to the end of a word or a number."""
    least, most = min(texts), max(texts)
    length = next((place for place, letter in enumerate(least) if letter != most[place]), len(least))
    while length and least[length - 1].isalnum():
        length -= 1
    return length


def _arguments(rest: str) -> str:
    """Return the arguments of a template, without those of the function behind them."""
    depth = 0
    for place, letter in enumerate(rest):
        depth += (letter == "<") - (letter == ">" and rest[place - 1] != "-")
        if not depth:
            return rest[: place + 1]
    return rest
