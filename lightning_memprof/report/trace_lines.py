"""Traces in lines of styled text, for whoever draws them: what the devices did, and why they did nothing."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from lightning_memprof.report.kernel_names import kernel_names
from lightning_memprof.report.labels import called
from lightning_memprof.report.memory_tables import DIM, Line, bar, cut, notes, sparkline, table, tops
from lightning_memprof.report.words import clean
from lightning_memprof.units import format_bytes, format_count, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_memprof.analysis.trace.model import CollectiveTotals, GpuTimes, TraceReport

__all__ = ["trace_sections"]

LABEL: Final = 10
NAME: Final = 16
COLUMN: Final = 17
# Narrower lines than these are broken by whoever draws them.
NARROWEST: Final = 40
# Below this there is room for one column.
TWO_COLUMNS: Final = 64
MAX_IN_FULL: Final = 2
MAX_LISTED: Final = 16
MAX_KERNELS: Final = 6
MAX_COLLECTIVES: Final = 4
MAX_CAUSES: Final = 5
MAX_CALLS: Final = 4
LEAST_SHARE: Final = 0.0005
# A runtime call that takes less of the window than this is no news.
NOTABLE_CALL: Final = 0.01
STYLES: Final = {
    "compute": "cyan",
    "communication": "magenta",
    "exposed": "red",
    "memory copies": "blue",
    "idle": "yellow",
    "busy": "green",
}


def trace_sections(traces: Sequence[TraceReport], width: int, *, ascii_only: bool) -> Iterator[list[Line]]:
    """Yield the sections of traces, each in lines of at most ``width`` characters (at least 40).

    Of several there is a table, and in full are those whose device is busy least.
    """
    width = max(width, NARROWEST)
    if len(traces) > 1:
        yield _beside_each_other(traces, width)
    for trace in sorted(traces, key=_busy_share)[:MAX_IN_FULL]:
        yield from _sections(trace, width, ascii_only=ascii_only)


def _sections(trace: TraceReport, width: int, *, ascii_only: bool) -> Iterator[list[Line]]:
    sections = (
        [*_about(trace, width), *_times(trace, width, ascii_only=ascii_only)],
        _steps(trace, width, ascii_only=ascii_only),
        _idle(trace, width, ascii_only=ascii_only),
        _kernels(trace, width),
        _operators(trace, width),
        _collectives(trace, width),
        _copies(trace, width),
        _calls(trace, width),
    )
    for lines in sections:
        if lines:
            yield lines


def _busy_share(trace: TraceReport) -> float:
    window = trace.gpu_window
    return window.busy_ns / window.window_ns if window is not None and window.window_ns else 2.0


def _heading(label: str, words: str, width: int) -> list[Line]:
    first, *more = textwrap.wrap(clean(words), max(width - LABEL, 20)) or [""]
    return [((f"{label:<{LABEL}}", "bold"), (first, "")), *(((f"{'':<{LABEL}}{text}", ""),) for text in more)]


def _beside_each_other(traces: Sequence[TraceReport], width: int) -> list[Line]:
    rows = []
    for trace in traces[:MAX_LISTED]:
        window, steps = trace.gpu_window, trace.step_window
        length = window.window_ns if window is not None else 0
        shares = [
            percent(ns / length) if length else "-"
            for ns in (
                (window.busy_ns, window.communication_exposed_ns, window.memory_copy_ns) if window else (0, 0, 0)
            )
        ]
        rows.append(
            (
                trace.file.name,
                "-" if trace.rank is None else str(trace.rank),
                format_ns(length) if length else "-",
                *shares,
                format_ns(steps.mean_step_ns) if steps is not None else "-",
            )
        )
    lines = _heading("traces", f"{len(traces)} of them", width)
    lines += table(("file", "rank", "window", "busy", "exposed", called("memory_copy"), "a step"), rows, width)
    if len(traces) > MAX_LISTED:
        lines += notes(f"{len(traces) - MAX_LISTED} more: --format json", width)
    return lines


def _about(trace: TraceReport, width: int) -> list[Line]:
    rank = None if trace.rank is None else f"rank {trace.rank}"
    if rank is not None and trace.world_size is not None:
        rank += f" of {trace.world_size}"
    words = [rank, ", ".join(dict.fromkeys(trace.devices)) or None, format_count(trace.events, "event")]
    lines: list[Line] = [((f"{'trace':<{LABEL}}", "bold"), (cut(clean(trace.file.name), width - LABEL), ""))]
    lines += notes(" · ".join(word for word in words if word), width, LABEL)
    for text in trace.missing:
        lines += notes(text, width, LABEL)
    return lines


def _times(trace: TraceReport, width: int, *, ascii_only: bool) -> list[Line]:
    """Return the device's time from its first event to its last one, and beside it that of the steps."""
    window, steps = trace.gpu_window, trace.step_window
    if window is None:
        return []
    columns: list[GpuTimes] = [window]
    if steps is not None and width >= TWO_COLUMNS:
        columns.append(steps)
    heads = ["all that was recorded", "the steps"][: len(columns)]
    lines: list[Line] = [((f"{'device':<{NAME}}" + "".join(f"{head:<{COLUMN + 9}}" for head in heads), "bold"),)]
    for name, ns in _rows(window):
        values = [dict(_rows(total))[name] for total in columns]
        if not ns and not any(values):
            continue
        pieces = [(f"{name:<{NAME}}", "")]
        for value, total in zip(values, columns, strict=True):
            share = value / total.window_ns if total.window_ns else 0.0
            drawn = bar(share, COLUMN - 9, ascii_only=ascii_only) if name.strip() != "window" else ""
            pieces.append((f"{format_ns(value):>8} {percent(share):>6} ", ""))
            pieces.append((f"{drawn:<{COLUMN - 7}}", STYLES.get(name.strip(), "")))
        lines.append(tuple(pieces))
    if steps is not None:
        part = percent(steps.data_loading_ns / steps.window_ns) if steps.window_ns else "-"
        words = f"{called('data_loading')}: {format_ns(steps.data_loading_ns)} of the steps ({part})"
        lines += notes(words, width, NAME) if steps.data_loading_ns else []
    return lines


def _rows(times: GpuTimes) -> list[tuple[str, int]]:
    return [
        ("window", times.window_ns),
        ("busy", times.busy_ns),
        ("  compute", times.compute_ns),
        ("  communication", times.communication_ns),
        ("    exposed", times.communication_exposed_ns),
        (f"  {called('memory_copy')}", times.memory_copy_ns),
        ("idle", times.idle_ns),
    ]


def _steps(trace: TraceReport, width: int, *, ascii_only: bool) -> list[Line]:
    durations = [step.duration_ns for step in trace.steps]
    if not durations:
        return []
    least, most = min(durations), max(durations)
    mean = sum(durations) // len(durations)
    words = f"{len(durations)} of {format_ns(mean)}"
    if len(durations) > 1:
        words += f", from {format_ns(least)} to {format_ns(most)} "
    drawn = sparkline(tops(durations, max(width - LABEL - len(words), 1)), ascii_only=ascii_only)
    return [((f"{'steps':<{LABEL}}", "bold"), (words, ""), (drawn if len(durations) > 1 else "", "cyan"))]


def _idle(trace: TraceReport, width: int, *, ascii_only: bool) -> list[Line]:
    window = trace.gpu_window
    if window is None or not trace.idle or not window.idle_ns:
        return []
    head = f"{format_ns(window.idle_ns)} of the device, by what the host was in meanwhile"
    lines = _heading("idle", head, width)
    names = {cause.cause: called(cause.cause) for cause in trace.idle}
    left = max(map(len, names.values())) + 1
    room = max(width - 2 - left - 9 - 6 - 1, 8)
    for cause in trace.idle[:MAX_CAUSES]:
        share = cause.total_ns / window.idle_ns
        if share < LEAST_SHARE:
            continue
        drawn = bar(share, room // 3, ascii_only=ascii_only)
        words = f"at most {format_ns(cause.longest_ns)} {clean(cause.example)}"
        line = f"  {names[cause.cause]:<{left}}{format_ns(cause.total_ns):>8}{percent(share):>6} "
        example = _shortened(words, max(room - room // 3 - 1, 1))
        lines.append(((line, ""), (f"{drawn:<{room // 3 + 1}}", "yellow"), (example, DIM)))
    return lines


def _shortened(words: str, width: int) -> str:
    return words if len(words) <= width else f"{words[: width - 1]}…"


def _kernels(trace: TraceReport, width: int) -> list[Line]:
    whole = sum(kernel.total_ns for kernel in trace.kernels)
    if not whole:
        return []
    shown = trace.kernels if len(trace.kernels) == MAX_KERNELS + 1 else trace.kernels[:MAX_KERNELS]
    rows = [
        (name, format_ns(kernel.total_ns), percent(kernel.total_ns / whole), f"{kernel.count:,}")
        for name, kernel in zip(kernel_names(kernel.name for kernel in shown), shown, strict=True)
    ]
    others = trace.kernels[len(shown) :]
    if others:
        total = sum(kernel.total_ns for kernel in others)
        count = sum(kernel.count for kernel in others)
        rows.append((f"{len(others):,} others", format_ns(total), percent(total / whole), f"{count:,}"))
    lines = _heading(
        "kernels", f"{sum(kernel.count for kernel in trace.kernels):,} of {len(trace.kernels):,} kinds", width
    )
    return [*lines, *table(("name", "total", "share", "times"), rows, width, dim=bool(others))]


def _operators(trace: TraceReport, width: int) -> list[Line]:
    whole = sum(operator.self_ns for operator in trace.operators)
    if not whole:
        return []
    rows = [
        (
            clean(operator.name),
            format_ns(operator.self_ns),
            percent(operator.self_ns / whole),
            format_ns(operator.total_ns),
            f"{operator.count:,}",
        )
        for operator in trace.operators[:MAX_KERNELS]
    ]
    lines = _heading("operators", "on the host, by the time of their own", width)
    lines += table(("name", "own", "share", "total", "times"), rows, width)
    if (more := len(trace.operators) - MAX_KERNELS) > 0:
        lines += notes(f"{more} more: --format json", width)
    return lines


def _collectives(trace: TraceReport, width: int) -> list[Line]:
    window = trace.gpu_window
    if not trace.collectives or window is None:
        return []
    rows = [
        (
            _collective(collective),
            f"{collective.count:,}",
            format_ns(collective.total_ns),
            format_ns(collective.exposed_ns),
            format_ns(collective.median_ns),
            format_ns(collective.max_ns),
        )
        for collective in trace.collectives[:MAX_COLLECTIVES]
    ]
    share = percent(window.communication_exposed_ns / window.communication_ns) if window.communication_ns else "-"
    lines = _heading("exchange", f"collectives, {share} of their time with nothing computed meanwhile", width)
    lines += table(("collective", "times", "total", "exposed", "median", "longest"), rows, width)
    if more := len(trace.collectives) - MAX_COLLECTIVES:
        lines += notes(f"{more} more kinds: --format json", width) if more > 0 else []
    return lines


def _collective(collective: CollectiveTotals) -> str:
    size = f" of {format_bytes(collective.bytes_each)}" if collective.bytes_each is not None else ""
    return f"{collective.name}{size}" + (f", {collective.group}" if collective.group else "")


def _copies(trace: TraceReport, width: int) -> list[Line]:
    if not trace.copies:
        return []
    pinned = {None: "-", True: "pageable", False: "pinned"}
    rows = [
        (
            copies.kind,
            f"{copies.count:,}",
            format_ns(copies.total_ns),
            "-" if copies.bytes is None else format_bytes(copies.bytes),
            pinned[copies.is_pageable],
        )
        for copies in trace.copies
    ]
    return [
        *_heading("copies", "of the device's memory", width),
        *table(("kind", "times", "total", "bytes", "host memory"), rows, width),
    ]


def _calls(trace: TraceReport, width: int) -> list[Line]:
    window = trace.gpu_window
    if window is None or not window.window_ns:
        return []
    notable = [call for call in trace.runtime_calls if call.total_ns >= NOTABLE_CALL * window.window_ns][:MAX_CALLS]
    if not notable:
        return []
    rows = [(call.name, f"{call.count:,}", format_ns(call.total_ns), format_ns(call.max_ns)) for call in notable]
    return [
        *_heading("host", "calls of the driver that took the longest", width),
        *table(("call", "times", "total", "longest"), rows, width),
    ]
