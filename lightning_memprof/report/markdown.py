"""A view as Markdown (GitHub's): for an issue, a merge request or a wiki."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings import Severity
from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.report.columns import step_columns
from lightning_memprof.report.files_lines import files_rows
from lightning_memprof.report.files_view import FilesView
from lightning_memprof.report.kernel_names import kernel_names
from lightning_memprof.report.labels import BEFORE_RECORDING, PEAKS, called
from lightning_memprof.report.peaks import run_peaks
from lightning_memprof.report.words import about, clean, cost, ending, file_rows, trouble
from lightning_memprof.units import format_bytes, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lightning_memprof.analysis.findings import Finding, Verdict
    from lightning_memprof.analysis.snapshot.model import SnapshotReport
    from lightning_memprof.analysis.trace.model import TraceReport
    from lightning_memprof.report.columns import Column
    from lightning_memprof.report.view import Command, View

__all__ = ["to_markdown"]

MAX_ROWS: Final = 10
MAX_RANKS: Final = 16
NONE: Final = "-"
# What Markdown or HTML would read: text from outside is inert.
_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>#!|~&@$])")
_BREAKS: Final = re.compile(r"\s+")
_WORDS: Final = {Severity.NONE: "", Severity.INFO: "info", Severity.WARNING: "warning", Severity.CRITICAL: "critical"}


def to_markdown(view: View | FilesView) -> str:
    """Return a view as Markdown: the verdict, the findings, then tables of time, memory, ranks and files."""
    parts = list(_files(view) if isinstance(view, FilesView) else _run(view))
    return "\n\n".join(part for part in parts if part) + "\n"


def _run(view: View) -> Iterator[str]:
    status, exception = ending(view)
    yield _verdict(view.verdict)
    yield f"{_safe(about(view))} · {_safe(status)}" + (f": {_safe(exception)}" if exception else "")
    yield from _findings(view.findings)
    columns, left_out = step_columns(view)
    if columns:
        yield "## Time"
        yield _steps(columns)
        yield _safe(left_out or "")
        yield "## Memory"
        yield _memory(columns)
        yield "\n".join(
            f"- {peak.label} {format_bytes(size)}: {peak.counts}; {peak.span}" for peak, size in run_peaks(view)
        )
    if len(view.ranks) > 1:
        yield "## Ranks"
        yield _ranks(view)
    yield from _traces([trace for trace in view.traces if trace.gpu_window is not None])
    yield from _snapshots(view.snapshots)
    yield "## Artifacts"
    yield _table(("type", "size", "name"), [(kind, size, _code(name)) for kind, size, name in file_rows(view)])
    lines = trouble(view)
    if lines:
        yield "## What is missing"
        yield "\n".join(f"- {label}: {_safe(message)}" for label, message in lines)
    if (words := cost(view)) is not None:
        yield f"Our own cost: {_safe(words)}"
    yield _commands(view.commands)


def _files(view: FilesView) -> Iterator[str]:
    yield _verdict(view.verdict)
    yield from _findings(view.findings)
    yield from _traces(view.traces)
    yield from _snapshots(view.snapshots)
    yield "## Artifacts"
    yield _table(("type", "size", "name"), [(kind, size, _code(name)) for kind, size, name in files_rows(view)])
    if view.problems:
        yield "\n".join(f"- damaged: {_safe(problem.piece)}: {_safe(problem.message)}" for problem in view.problems)
    yield _commands(view.commands)


def _verdict(verdict: Verdict) -> str:
    return f"**{_safe(verdict.sentence)}**\n\n{_safe(verdict.why)}\n\nNext: {_safe(verdict.next)}"


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    if len(findings) < 2:
        return
    yield "## Findings"
    yield "\n".join(
        f"- {_WORDS[finding.severity] or 'note'}: {_safe(finding.sentence)} {_safe(finding.why)}"
        + "".join(f"\n  - {_safe(step)}" for step in finding.next_steps)
        for finding in findings
    )


def _steps(columns: Sequence[Column]) -> str:
    rows = []
    for phase in PHASES:
        cells = []
        for column in columns:
            ns = column.breakdown_ns[phase] if column.breakdown_ns is not None else None
            known = ns is not None and bool(column.duration_ns)
            cells.append(f"{format_ns(ns or 0)} ({percent((ns or 0) / (column.duration_ns or 1))})" if known else NONE)
        rows.append((called(phase), *cells))
    rows.append(
        ("a step", *(NONE if column.duration_ns is None else format_ns(column.duration_ns) for column in columns))
    )
    return _table(("", *(_safe(column.title) for column in columns)), rows)


def _memory(columns: Sequence[Column]) -> str:
    rows = [
        ("host rss", *(_bytes(column.host.rss_bytes) for column in columns)),
        (PEAKS["rss"].label, *(_bytes(column.host.peak_rss_bytes or column.host.max_rss_bytes) for column in columns)),
    ]
    if any(column.device is not None for column in columns):
        rows += [
            (name, *(_bytes(getattr(column.device, field, None)) for column in columns))
            for name, field in (
                ("device allocated", "allocated_bytes"),
                ("device reserved", "reserved_bytes"),
                (PEAKS["device"].label, "peak_allocated_bytes"),
            )
        ]
    return _table(("", *(_safe(column.title) for column in columns)), rows)


def _ranks(view: View) -> str:
    rows = []
    for rank in view.ranks[:MAX_RANKS]:
        pulse = rank.statistics
        rows.append(
            (
                str(rank.rank),
                _safe(rank.host_name or NONE),
                rank.status,
                str(rank.steps),
                format_ns(pulse.median_ns) if pulse else NONE,
                percent(pulse.share("data_wait")) if pulse else NONE,
                _bytes(rank.host.peak_rss_bytes),
            )
        )
    table = _table(("rank", "host", "status", "steps", "median", called("data_wait"), PEAKS["rss"].label), rows)
    more = len(view.ranks) - MAX_RANKS
    return f"{table}\n\n{more} more ranks: `--format json`" if more > 0 else table


def _traces(traces: Sequence[TraceReport]) -> Iterator[str]:
    if not traces:
        return
    yield "## Traces"
    rows = []
    for trace in traces[:MAX_ROWS]:
        window, steps = trace.gpu_window, trace.step_window
        cells = [NONE] * 5
        if window is not None and window.window_ns:
            times = (
                window.busy_ns, window.compute_ns, window.communication_exposed_ns, window.memory_copy_ns,
            )  # fmt: skip
            cells = [format_ns(window.window_ns), *(percent(ns / window.window_ns) for ns in times)]
        rows.append(
            (
                _code(trace.file.name),
                NONE if trace.rank is None else str(trace.rank),
                *cells,
                format_ns(steps.mean_step_ns) if steps is not None else NONE,
                percent(steps.data_loading_ns / steps.window_ns) if steps is not None and steps.window_ns else NONE,
            )
        )
    heads = (
        "file",
        "rank",
        "window",
        "busy",
        "compute",
        "exposed",
        called("memory_copy"),
        "a step",
        called("data_loading"),
    )
    yield _table(heads, rows)
    missing = [f"- {_code(trace.file.name)}: {_safe(lack)}" for trace in traces[:MAX_ROWS] for lack in trace.missing]
    yield "\n".join(missing)
    for trace in traces[:1]:
        if trace.kernels:
            kernels = [
                (_code(name), format_ns(k.total_ns), f"{k.count:,}")
                for name, k in zip(kernel_names(k.name for k in trace.kernels[:MAX_ROWS]), trace.kernels, strict=False)
            ]
            yield _table(("kernel", "total", "times"), kernels)


def _snapshots(snapshots: Sequence[SnapshotReport]) -> Iterator[str]:
    if not snapshots:
        return
    yield "## Snapshots"
    rows = [
        (
            _code(snapshot.file.name),
            str(device.device),
            format_bytes(device.reserved_bytes),
            format_bytes(device.allocated_bytes),
            format_bytes(device.peak_requested_bytes),
            f"{device.events:,}",
        )
        for snapshot in snapshots[:MAX_ROWS]
        for device in snapshot.devices
    ]
    yield _table(("file", "device", "reserved", "allocated", PEAKS["requested"].label, "events"), rows)
    first = max(
        snapshots, key=lambda snapshot: max((device.peak_requested_bytes for device in snapshot.devices), default=0)
    )
    for device in first.devices[:1]:
        lines = device.lines_at_peak[:MAX_ROWS]
        if lines:
            held = [
                (_code(line.site or BEFORE_RECORDING), format_bytes(line.bytes), f"{line.blocks:,}") for line in lines
            ]
            yield _table(("held at the peak by", "bytes", "blocks"), held)


def _commands(commands: Iterable[Command]) -> str:
    # No fence can be closed from within: a command is one line, and its backticks stand behind four blanks.
    return "Type:\n\n" + "\n".join(f"    {clean(str(command))}" for command in commands)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _bytes(value: int | None) -> str:
    return NONE if value is None else format_bytes(value)


def _safe(text: str) -> str:
    """Return text from outside so that it is shown as it is."""
    return _SPECIAL.sub(r"\\\1", _BREAKS.sub(" ", clean(text)))


def _code(text: str) -> str:
    """Return a name as code; where it has a backtick or a bar of its own, as plain text."""
    return _safe(text) if "`" in text or "|" in text else f"`{clean(text)}`"
