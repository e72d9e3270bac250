"""Memory: peaks, categories, live bytes over time, checkpointing, functions and named moments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.report.document import (
    Cell,
    Chart,
    Column,
    Part,
    Row,
    Section,
    Stack,
    Table,
    Words,
    change,
    code,
    count,
    duration,
    index,
    phrase,
    share,
    size,
    text,
)
from lightning_memprof.report.named import summarize
from lightning_memprof.report.sections.labels import PEAKS, Peak, bars, category, more

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_memprof.analysis.memory.activations import CheckpointedGroup
    from lightning_memprof.analysis.memory.functions import FunctionReport
    from lightning_memprof.analysis.memory.model import DeviceAllocations
    from lightning_memprof.analysis.memory.report import RankMemory
    from lightning_memprof.report.view import View

__all__ = [
    "MAX_ROWS",
    "category_stack",
    "memory_section",
    "peak_allocations",
    "run_peaks",
    "window_name",
]

# More rows are slow to lay out, and their sum is in the footer.
MAX_ROWS: Final = 300
MAX_CHECKPOINTED: Final = 12
# From here on the times of recorded steps mislead.
SLOWER: Final = 1.2
FUNCTION_COLUMNS: Final = (
    ("RSS", "rss_bytes"),
    ("in forwards", "forward_rss_bytes"),
    ("saved activations", "saved_bytes"),
    ("allocated", "allocated_bytes"),
    ("reserved", "reserved_bytes"),
)


def peak_allocations(memory: RankMemory) -> tuple[int | None, DeviceAllocations] | None:
    """Return the window and device with the highest peak of live bytes."""
    found = [(window.window, device) for window in memory.allocations for device in window.devices]
    return max(found, key=lambda item: item[1].peak_bytes, default=None)


def run_peaks(view: View) -> list[tuple[Peak, int]]:
    """Return the known peaks of the lead rank, the widest first, in bytes."""
    lead, memory = view.lead, view.memory.lead
    live = peak_allocations(memory)
    found = {
        "rss": lead.host.peak_rss_bytes or lead.host.max_rss_bytes,
        "device": lead.device.peak_allocated_bytes if lead.device is not None else None,
        "tensors": memory.peak.total_bytes if memory.peak is not None else None,
        "live": live[1].peak_bytes if live is not None else None,
    }
    return [(PEAKS[name], peak) for name, peak in found.items() if peak is not None]


def memory_section(view: View) -> Section:
    """Return the peaks of the lead rank, the peak by category, and the memory that checkpointing would save."""
    memory = view.memory.lead
    if memory.peak is None:
        lead: Words = f"The peak by category is not available: {memory.reasons.get('peak', 'not recorded')}."
    else:
        on = f" on {memory.peak.device}" if memory.peak.device else ""
        lead = phrase(f"Tensors peak at {{}}{on} in step {memory.peak.step}.", size(memory.peak.total_bytes))
    parts: list[Part] = [Chart("memory"), *_peaks(view), *_categories(view), *_over_time(memory)]
    parts += [*_checkpointing(memory, view), *_functions(memory.functions), *_named(view)]
    return Section("memory", "Memory", lead, parts)


def _peaks(view: View) -> Iterator[Table]:
    rows = [
        (text(peak.label), size(peak_bytes), text(peak.counts), text(peak.span)) for peak, peak_bytes in run_peaks(view)
    ]
    columns = (Column("peak"), Column("bytes", "bytes"), Column("counts", priority=1), Column("time span", priority=2))
    if rows:
        yield Table(id="peaks", title="Peaks", columns=columns, rows=rows, is_sortable=False)


def category_stack(view: View) -> Stack | None:
    """Return the peak by category; None where it is not known."""
    if (peak := view.memory.lead.peak) is None:
        return None
    on = f" on {peak.device}" if peak.device else ""
    return Stack(
        f"Peak memory by category{on}, step {peak.step}",
        size(peak.total_bytes),
        bars(peak.categories, peak.total_bytes, "bytes"),
        [(category(name), peak.unknown.get(name, "")) for name, known in peak.categories.items() if known is None],
    )


def _categories(view: View) -> Iterator[Table]:
    if (peak := view.memory.lead.peak) is None:
        return
    rows: list[Row] = [
        (
            text(category(name)),
            size(known, peak.total_bytes),
            share(known / peak.total_bytes if known is not None and peak.total_bytes else None),
            text(peak.unknown.get(name) or "not known" if known is None else ""),
        )
        for name, known in peak.categories.items()
    ]
    notes: list[Words] = [f"{peak.source}: {peak.moment}"]
    notes += [phrase(f"also {{}} on {other.device or '?'}", size(other.total_bytes)) for other in peak.others]
    allocator = view.lead.device.peak_allocated_bytes if view.lead.device else None
    if allocator is not None:
        words, beyond = f"{PEAKS['device'].label} {{}}", allocator - peak.total_bytes
        notes.append(
            phrase(f"{words}, {{}} more than these categories", size(allocator), size(beyond))
            if beyond > 0
            else phrase(words, size(allocator))
        )
    yield Table(
        id="categories",
        title="Peak by category",
        columns=(Column("category"), Column("bytes", "bytes"), Column("share", "share"), Column("not available")),
        rows=rows,
        footer=[(text("sum"), size(peak.total_bytes), share(1.0 if peak.total_bytes else None), text(""))],
        notes=notes,
        is_sortable=False,
    )


def _over_time(memory: RankMemory) -> Iterator[Part]:
    found = peak_allocations(memory)
    if found is not None and len(found[1].curve) > 1:
        window, device = found
        marks = ", ".join(
            f"{mark.point.replace('_', ' ')} {{}}"
            for mark in device.marks
            if mark.step is not None and mark.step == device.peak_step
        )
        sizes = [mark.live_bytes for mark in device.marks if mark.step is not None and mark.step == device.peak_step]
        at = f"; step {device.peak_step}: {marks}" if marks else ""
        first, last = device.curve[0][1], device.curve[-1][1]
        yield Chart(
            "live-bytes",
            f"Live bytes, {window_name(window)} on {device.device}",
            _spread_evenly(device.curve),
            phrase(
                f"{{}} at the start, max {{}}, {{}} at the end{at}",
                *map(size, (first, device.peak_bytes, last, *sizes)),
            ),
        )
    saved = [(step.step, step.activation_bytes) for step in memory.steps if step.activation_bytes is not None]
    if len(saved) > 1:
        values = [value for _, value in saved]
        words = f"steps {saved[0][0]}–{saved[-1][0]}, count {len(saved)}: min {{}}, max {{}}"
        yield Chart("saved-bytes", "Saved activations", values, phrase(words, size(min(values)), size(max(values))))


CURVE_POINTS: Final = 160


def _spread_evenly(curve: Sequence[tuple[int, int]]) -> list[int]:
    """Return the values of a curve of ``(time, value)`` at equal distances in time, each the maximum since the last."""
    start, end = curve[0][0], curve[-1][0]
    places = [min(CURVE_POINTS - 1, (time - start) * CURVE_POINTS // max(1, end - start)) for time, _ in curve]
    values = [0] * CURVE_POINTS
    for (_, value), first, following in zip(curve, places, [*places[1:], CURVE_POINTS - 1], strict=True):
        for place in range(first, following + 1):
            values[place] = max(values[place], value)
    return values


def window_name(window: int | None) -> str:
    """Return the name of a window, None for a trace without one."""
    return "the trace" if window is None else f"window {window}"


def _checkpointing(memory: RankMemory, view: View) -> Iterator[Table]:
    rows = [row for group in memory.checkpointing[:MAX_CHECKPOINTED] for row in _checkpointed(group, memory)]
    if not rows:
        return
    notes = ["recompute peak: the saved bytes of one block exist again while it is recomputed", *_slower(view)]
    if len(memory.checkpointing) > MAX_CHECKPOINTED:
        notes.append(more(len(memory.checkpointing) - MAX_CHECKPOINTED))
    yield Table(
        id="checkpointing",
        title="Activation checkpointing, estimate for one step",
        columns=(
            Column("blocks", "code"),
            Column("saved", "bytes"),
            Column("recompute peak", "bytes", priority=2),
            Column("still held", "bytes", priority=1),
            Column("recompute time", "ns"),
        ),
        rows=rows,
        notes=notes,
        is_sortable=False,
        top=6,
    )


def _checkpointed(group: CheckpointedGroup, memory: RankMemory) -> Iterator[Row]:
    number = len(group.blocks)
    whole = memory.activations.total_bytes if memory.activations else None
    yield (
        code(f"{group.name}, {'all' if number == group.repeats else 'these'} {number}"),
        size(group.saved_bytes, whole),
        size(group.recompute_peak_bytes),
        size(group.still_held_bytes),
        duration(group.recompute_ns),
    )
    if number > 1:
        each = None if group.recompute_ns is None else group.recompute_ns / number
        yield (
            text("  each"),
            size(group.saved_bytes / number),
            size(None),
            size(group.still_held_bytes / number),
            duration(each),
        )


def _slower(view: View) -> Iterator[Words]:
    """Warn where recording slows the forward down: modules are timed in recorded steps."""
    usual = view.lead.statistics.breakdown_ns["forward"] if view.lead.statistics else None
    breakdowns = [step.breakdown_ns for window in view.lead.windows for step in window.steps if step.breakdown_ns]
    recorded = [ns for breakdown in breakdowns if (ns := breakdown["forward"]) is not None]
    if not usual or not recorded:
        return
    mean = sum(recorded) / len(recorded)
    if mean >= SLOWER * usual:
        yield phrase("forward takes {} in recorded steps, {} in the others", duration(mean), duration(usual))


def _functions(functions: Sequence[FunctionReport]) -> Iterator[Table]:
    known = [(name, key) for name, key in FUNCTION_COLUMNS if any(function.changes(key) for function in functions)]
    if not functions:
        return
    rows = [
        (code(function.name), count(len(function.calls)), *(_mean_change(function.changes(key)) for _, key in known))
        for function in functions
    ]
    columns = (
        Column("function", "code"),
        Column("count", "count"),
        *(Column(f"{name}", "bytes", priority=place) for place, (name, _) in enumerate(known)),
    )
    note = "RSS grows on first touch only; reused memory shows 0"
    title = "Mean change of memory per call"
    yield Table(id="functions", title=title, columns=columns, rows=rows, notes=(note,), top=8)


def _mean_change(changes: Sequence[int]) -> Cell:
    return change(round(sum(changes) / len(changes)) if changes else None)


def _named(view: View) -> Iterator[Table]:
    if not view.named:
        return
    columns: tuple[Column, ...] = (
        Column("name", "code"),
        Column("rank", "index", priority=1),
        Column("count", "count"),
        Column("RSS", "bytes"),
        Column("mean change", "bytes"),
        Column("max change", "bytes"),
        Column("unfinished", "count"),
    )
    rows = [
        (
            code(found.name),
            index(found.rank),
            count(found.times),
            size(found.rss_bytes[-1] if found.rss_bytes else None),
            _mean_change(found.changes_bytes),
            change(max(found.changes_bytes, default=None)),
            count(found.unfinished or None),
        )
        for found in summarize(view.named)
    ]
    yield Table(id="named-sums", title="Named regions and snapshots", columns=columns, rows=rows, top=12)
    columns = (
        Column("name", "code"),
        Column("point"),
        Column("rank", "index"),
        Column("step", "index"),
        Column("RSS", "bytes"),
        Column(PEAKS["rss"].label, "bytes"),
    )
    moments = [
        (
            code(moment.name),
            text(moment.point),
            index(moment.rank),
            index(moment.step),
            size(moment.rss_bytes),
            size(moment.peak_rss_bytes),
        )
        for moment in view.named[:MAX_ROWS]
    ]
    yield Table(id="named", title="Each named moment", columns=columns, rows=moments, is_detail=True)
