"""Memory: peaks, categories, live bytes, allocation sites, modules, checkpointing, functions and named moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from lightning_memprof.account.ledger.memory import UNATTRIBUTED, grouped_bytes
from lightning_memprof.account.memory.activations import Activations, CheckpointedGroup, ModuleBytes, patterns
from lightning_memprof.account.memory.functions import FunctionReport
from lightning_memprof.account.memory.model import DeviceAllocations, Site
from lightning_memprof.account.memory.report import TRACKERS, RankMemory
from lightning_memprof.account.steps.statistics import mean
from lightning_memprof.report.document import Cell, Chart, Item, Paragraph, Section, Stack, Table, Words, joined, phrase
from lightning_memprof.report.named import summarize
from lightning_memprof.report.sections.labels import PEAKS, Peak, bars, called, compiled_note, peak_note
from lightning_memprof.report.sections.tables import Field, filled, ratio
from lightning_memprof.report.view import View

# More rows are slow to lay out, and their sum is in the footer.
MAX_SITES: Final = 300
ROOT: Final = "(the model)"
MAX_CHECKPOINTED: Final = 12
# From here on the times of recorded steps mislead.
SLOWER: Final = 1.2
FIRST_TOUCH: Final = "RSS grows on first touch only; reused memory shows 0"
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
    if memory.peak is None and (ledger := view.byte_ledger) is not None and ledger.has_tensors:
        lead: Words = phrase("Memory peaks at {bytes} on {}.", ledger.peak_bytes, ledger.place)
    elif memory.peak is None:
        lead = f"The peak by category is not available: {memory.reasons.get('peak', 'not recorded')}."
    else:
        on = f" on {memory.peak.device}" if memory.peak.device else ""
        lead = phrase("Tensors peak at {bytes}{} in step {index}.", memory.peak.total_bytes, on, memory.peak.step)
    parts: list[Item] = [
        Chart("memory-run"),
        Chart("memory"),
        *_peaks(view),
        *_owners(view),
        *_categories(view),
        *_estimated(view),
        *_over_time(memory),
    ]
    parts += [*_checkpointing(memory, view), *_functions(memory.functions), *_named(view)]
    return Section("memory", "Memory", lead, parts)


def _peaks(view: View) -> Iterator[Table]:
    return filled(
        Table("peaks", "Peaks", is_sortable=False),
        run_peaks(view),
        Field("peak", "text", lambda row: row[0].label),
        Field("bytes", "bytes", lambda row: row[1]),
        Field("counts", "text", lambda row: row[0].counts, priority=1),
        Field("time span", "text", lambda row: row[0].span, priority=2),
    )


def peak_stack(view: View) -> Stack | None:
    """Return the peak by the categories of its ledger; None where no peak was measured."""
    ledger, peak = view.byte_ledger, view.memory.lead.peak
    if ledger is None:
        return None
    unknown = peak.unknown if peak is not None else {}
    notes: list[Words] = [ledger.basis]
    if ledger.outside_bytes:
        notes.append(phrase("other processes and CUDA contexts: at least {bytes}", ledger.outside_bytes))
    if ledger.limit_bytes is not None:
        notes.append(phrase("limit {bytes}", ledger.limit_bytes))
    return Stack(
        f"Peak memory by owner, {ledger.place}{view.rank_suffix}",
        Cell(ledger.peak_bytes, "bytes"),
        bars(ledger.categories, ledger.peak_bytes, "bytes"),
        [(called(name), reason) for name, reason in unknown.items()],
        notes,
    )


def _owners(view: View) -> Iterator[Table]:
    ledger = view.byte_ledger
    if ledger is None:
        return
    whole = ledger.peak_bytes
    notes: list[Words] = [ledger.basis]
    if ledger.step is not None:
        notes.append(f"tensors: step {ledger.step}; memory that nothing recorded owns is unattributed")
    if 0 < ledger.workspace_bytes <= ledger.bytes(UNATTRIBUTED):
        kept = Cell(ledger.workspace_bytes, "bytes")
        notes.append(phrase("unattributed: cuBLAS keeps {} by default for each thread that multiplies matrices", kept))
    owned = [line for line in ledger.lines if line.category != UNATTRIBUTED]
    sums = {UNATTRIBUTED: ledger.bytes(UNATTRIBUTED) if owned else 0, "sum": whole}
    footer = [
        (Cell(name), Cell(""), Cell(""), Cell(total, "bytes", whole), Cell(ratio(total, whole), "share"))
        for name, total in sums.items()
        if total
    ]
    yield from filled(
        Table("peak-owners", "Peak memory by owner", footer=footer, notes=notes, is_sortable=False),
        grouped_bytes(owned or ledger.lines),
        Field("category", "text", lambda line: called(line.category)),
        Field("owner", "code", lambda line: line.name or (ROOT if line.module == "" else line.module)),
        Field("dtype", "code", lambda line: line.dtype, priority=1),
        Field("bytes", "bytes", lambda line: Cell(line.bytes, "bytes", whole)),
        Field("share", "share", lambda line: ratio(line.bytes, whole)),
    )


def _categories(view: View) -> Iterator[Table]:
    if (peak := view.memory.lead.peak) is None:
        return
    whole = peak.total_bytes
    notes: list[Words] = [f"{peak.source}: {peak.moment}"]
    notes += [phrase("also {bytes} on {}", other.total_bytes, other.device or "?") for other in peak.others]
    allocator = view.lead.device.peak_allocated_bytes if view.lead.device else None
    if allocator is not None:
        beyond = phrase(", {bytes} more than these categories", allocator - whole) if allocator > whole else ""
        notes.append(phrase("{} {bytes}{}", PEAKS["device"].label, allocator, beyond))
    footer = [(Cell("sum"), Cell(whole, "bytes"), Cell(ratio(whole, whole), "share"))]
    yield from filled(
        Table("categories", "Peak by category", footer=footer, notes=notes, is_sortable=False),
        list(peak.categories.items()),
        Field("category", "text", lambda row: called(row[0])),
        Field("bytes", "bytes", lambda row: Cell(row[1], "bytes", whole)),
        Field("share", "share", lambda row: ratio(row[1], whole)),
        Field("not available", "text", lambda row: (peak.unknown.get(row[0]) or "not known") * (row[1] is None)),
    )


def _estimated(view: View) -> Iterator[Table]:
    """Yield the estimate that was made for the run, beside its peak."""
    estimate, peak, device = view.memory.estimate, view.memory.lead.peak, view.lead.device
    if estimate is None or peak is None:
        return
    measured = {name: found for name, found in peak.categories.items() if found is not None}
    is_one_moment = peak.source in TRACKERS
    most = {name: max(values, default=0) for name, values in estimate.live.items()}
    estimated = estimate.categories if is_one_moment else {name: most.get(name, 0) for name in measured}
    rows: list[tuple[str, int | None, int | None]] = [
        (called(name), estimated.get(name, 0), measured.get(name)) for name in dict.fromkeys([*measured, *estimated])
    ]
    if is_one_moment:
        rows.append(("all tensors", estimate.allocated_bytes, peak.total_bytes))
    if device is not None:
        rows.append(("allocated", estimate.allocated_bytes, device.peak_allocated_bytes))
        rows.append(("reserved, at the end", estimate.reserved.likely_bytes, device.reserved_bytes))
    yield from filled(
        Table(
            "estimated",
            "Estimated and measured peak",
            notes=[peak.moment if is_one_moment else "maximum of each category in a step"],
            is_sortable=False,
        ),
        rows,
        Field("memory", "text", lambda row: row[0]),
        Field("estimated", "bytes", lambda row: row[1]),
        Field("measured", "bytes", lambda row: row[2]),
        Field("difference", "bytes change", lambda row: None if None in row[1:] else (row[1] or 0) - (row[2] or 0)),
    )


def _over_time(memory: RankMemory) -> Iterator[Item]:
    found = peak_allocations(memory)
    if found is not None and len(found[1].curve) > 1:
        window, device = found
        marks = [
            phrase("{} {bytes}", mark.point.replace("_", " "), mark.live_bytes)
            for mark in device.marks
            if mark.step is not None and mark.step == device.peak_step
        ]
        at = phrase("; step {index}: {}", device.peak_step, joined(", ", marks)) if marks else ""
        first, last = device.curve[0][1], device.curve[-1][1]
        yield Chart(
            "live-bytes",
            f"Live bytes, {_window_name(window)} on {device.device}",
            _spread_evenly(device.curve),
            phrase("{bytes} at the start, max {bytes}, {bytes} at the end{}", first, device.peak_bytes, last, at),
        )
    saved = [(step.step, step.activation_bytes) for step in memory.steps if step.activation_bytes is not None]
    if len(saved) > 1:
        values = [value for _, value in saved]
        covered = f"steps {saved[0][0]}–{saved[-1][0]}, count {len(saved)}"
        words = phrase("{}: min {bytes}, max {bytes}", covered, min(values), max(values))
        yield Chart("saved-bytes", "Saved activations", values, words)


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


def _window_name(window: int | None) -> str:
    """Return the name of a window, None for a trace without one."""
    return "the trace" if window is None else f"window {window}"


def _checkpointing(memory: RankMemory, view: View) -> Iterator[Table]:
    whole = memory.activations.total_bytes if memory.activations else None
    shown = memory.checkpointing[:MAX_CHECKPOINTED]
    notes = [
        "recompute peak: the saved bytes of one block exist again while it is recomputed",
        *_slower(view),
    ]
    left_out = len(memory.checkpointing) - len(shown)
    title = "Activation checkpointing, estimate for one step"
    return filled(
        Table("checkpointing", title, notes=notes, is_sortable=False, top=6, left_out=left_out),
        [(group, number) for group in shown for number in sorted({1, len(group.blocks)})],
        Field("blocks", "code", lambda row: Cell("  each") if row[1] > 1 else _blocks(row[0])),
        Field("saved", "bytes", lambda row: Cell(row[0].saved_bytes / row[1], "bytes", None if row[1] > 1 else whole)),
        Field("recompute peak", "bytes", lambda row: None if row[1] > 1 else row[0].recompute_peak_bytes, priority=2),
        Field("still held", "bytes", lambda row: row[0].still_held_bytes / row[1], priority=1),
        Field("recompute time", "ns", lambda row: ratio(row[0].recompute_ns, row[1])),
    )


def _blocks(group: CheckpointedGroup) -> str:
    number = len(group.blocks)
    return f"{group.name}, {'all' if number == group.repeats else 'these'} {number}"


def _slower(view: View) -> Iterator[Words]:
    """Warn where recording slows the forward down: modules are timed in recorded steps."""
    usual = view.lead.statistics.breakdown_ns["forward"] if view.lead.statistics else None
    breakdowns = [step.breakdown_ns for window in view.lead.windows for step in window.steps if step.breakdown_ns]
    recorded_ns = mean(breakdown["forward"] for breakdown in breakdowns)
    if not usual or not recorded_ns:
        return
    if recorded_ns >= SLOWER * usual:
        yield phrase("forward takes {ns} in recorded steps, {ns} in the others", recorded_ns, usual)


def _functions(functions: Sequence[FunctionReport]) -> Iterator[Table]:
    known = [(name, key) for name, key in FUNCTION_COLUMNS if any(function.changes(key) for function in functions)]
    yield from filled(
        Table("functions", "Mean change of memory per call", notes=[FIRST_TOUCH], top=8),
        functions,
        Field("function", "code", lambda function: function.name),
        Field("count", "count", lambda function: len(function.calls)),
        *(_change_of(name, key, place) for place, (name, key) in enumerate(known)),
    )


def _change_of(heading: str, key: str, priority: int) -> Field[FunctionReport]:
    return Field(heading, "bytes change", lambda function: mean(function.changes(key)), priority=priority)


def _named(view: View) -> Iterator[Table]:
    yield from filled(
        Table("named-sums", "Named regions and snapshots", top=12),
        summarize(view.named),
        Field("name", "code", lambda found: found.name),
        Field("rank", "index", lambda found: found.rank, priority=1),
        Field("count", "count", lambda found: found.count),
        Field("RSS", "bytes", lambda found: found.rss_bytes[-1] if found.rss_bytes else None),
        Field("mean change", "bytes change", lambda found: mean(found.changes_bytes)),
        Field("max change", "bytes change", lambda found: max(found.changes_bytes, default=None)),
        Field("unfinished", "count", lambda found: found.unfinished or None),
    )


def sites_section(view: View) -> Section | None:
    """Return the allocation sites at the highest peak of live bytes; None where no allocations were recorded."""
    memory = view.memory.lead
    found = peak_allocations(memory)
    if found is None or not found[1].sites:
        reason = memory.reasons.get("sites")
        if reason is None or not memory.allocations:
            return None
        return Section("sites", "Allocation sites", f"Allocation sites are not available: {reason}.")
    window, device = found
    step = "" if device.peak_step is None else f" in step {device.peak_step}"
    when = f"{step}, {_window_name(window)}"
    lead = phrase("Live bytes on {} peak at {bytes}{}.", device.device, device.peak_bytes, when)
    parameters = memory.activations.parameters if memory.activations else {}
    footer = [(Cell("unattributed"), Cell(device.unattributed_bytes, "bytes"))]
    if device.freed_outside_bytes:
        footer.insert(0, (Cell("freed, allocated before the window"), Cell(-device.freed_outside_bytes, "bytes")))
    parts: list[Item] = [
        Chart("holders"),
        Paragraph(f"{peak_note('live')}."),
        *_site_table(Table("sites", "Allocation sites at the peak", footer=footer), device.sites, parameters),
    ]
    return Section("sites", "Allocation sites", lead, parts)


def _site_table(empty: Table, sites: Sequence[Site], parameters: Mapping[str, int]) -> Iterator[Table]:
    """Yield a table of the sites, repeated blocks as one row, the largest first; whatever their step and phase."""
    shared = patterns({site.module for site in sites if site.module}, parameters)
    sums: dict[tuple[str, str, str | None], list[int]] = {}
    for site in sites:
        where = shared[site.module] if site.module else f"({site.phase})" if site.phase else ""
        row = sums.setdefault((site.operator.removeprefix("aten::"), where, _short_line(site.line)), [0, 0])
        row[0] += site.bytes
        row[1] += site.blocks
    ordered = sorted(sums.items(), key=lambda item: (-item[1][0], *(part or "" for part in item[0])))
    return filled(
        empty,
        ordered[:MAX_SITES],
        Field("operator", "code", lambda row: row[0][0]),
        Field("bytes", "bytes", lambda row: row[1][0], bar=True),
        Field("blocks", "count", lambda row: row[1][1], priority=2),
        Field("module", "code", lambda row: row[0][1] or None),
        Field("line", "code", lambda row: row[0][2], priority=1),
        most=MAX_SITES,
    )


def _short_line(line: str | None) -> str | None:
    """Return ``file.py(12)`` of ``directory/file.py(12): function``."""
    return None if line is None else line.rpartition(": ")[0].rpartition("/")[2] or line


def modules_section(view: View) -> Section:
    """Return the saved activations, parameters, gradients and forward time of each module."""
    saved = view.memory.lead.activations
    if saved is None:
        reason = view.memory.lead.reasons.get("modules", "not recorded")
        return Section("modules", "Modules", f"Saved activations by module are not available: {reason}.")
    parts: list[Item] = list(_module_patterns(saved))
    types = sorted(saved.dtypes.items(), key=lambda item: -item[1])
    if types and saved.total_bytes:
        words = [phrase("{} {bytes} ({share})", name, total, total / saved.total_bytes) for name, total in types]
        parts.append(Paragraph(phrase("By data type: {}.", joined(", ", words))))
    parts += [Paragraph(f"{note[0].upper()}{note[1:]}.") for note in compiled_note(view.run.lead.training)]
    if saved.attribution:
        parts.append(Paragraph(phrase("{bytes} are unattributed: {}.", saved.unattributed_bytes, saved.attribution)))
    if saved.uncounted:
        unknown = "more values have an unknown size: a scripted module or hooks of the program saved them."
        parts.append(Paragraph(f"{saved.uncounted} {unknown}"))
    lead = phrase("Saved activations in step {index}: {bytes}.", saved.step, saved.total_bytes)
    return Section("modules", "Modules", lead, parts)


def _alike(saved: Activations) -> list[tuple[str, list[ModuleBytes]]]:
    """Return the modules by name, repeated blocks together, the largest total first."""
    shared = patterns((module.name for module in saved.modules), saved.parameters)
    groups: dict[str, list[ModuleBytes]] = {}
    for module in saved.modules:
        groups.setdefault(shared[module.name] or ROOT, []).append(module)
    return sorted(groups.items(), key=lambda row: (-_total(row[1]), -_self(row[1]), row[0]))


def _self(alike: Sequence[ModuleBytes]) -> int:
    return sum(module.own_activation_bytes for module in alike)


def _total(alike: Sequence[ModuleBytes]) -> int:
    return sum(module.inclusive_activation_bytes for module in alike)


def _sum(sizes: Iterable[int | None]) -> int | None:
    """Return a sum, None where a part is not known."""
    found = list(sizes)
    known = [part for part in found if part is not None]
    return sum(known) if len(known) == len(found) else None


def _forward_ns(row: tuple[str, list[ModuleBytes]]) -> int | None:
    return sum(module.forward_ns or 0 for module in row[1]) or None


def _module_patterns(saved: Activations) -> Iterator[Table]:
    footer = [(Cell("unattributed"), Cell(saved.unattributed_bytes, "bytes"))]
    return filled(
        Table("modules-alike", "Saved activations by module, repeated blocks together", footer=footer),
        _alike(saved)[:MAX_SITES],
        Field("module", "code", lambda row: row[0]),
        Field("self", "bytes", lambda row: _self(row[1])),
        Field("total", "bytes", lambda row: _total(row[1]), bar=True),
        Field("parameters", "bytes", lambda row: _sum(module.parameter_bytes for module in row[1]), priority=1),
        Field("gradients", "bytes", lambda row: _sum(module.gradient_bytes for module in row[1]), priority=2),
        Field("forward", "ns", _forward_ns, "in the recorded step", priority=3),
        Field("count", "count", lambda row: sum(module.calls for module in row[1]) or None, priority=3),
        most=MAX_SITES,
    )
