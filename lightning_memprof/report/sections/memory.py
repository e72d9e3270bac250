"""Memory: peaks, categories, allocation sites, modules, checkpointing, functions and named moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.memory.checkpointing import patterns
from lightning_memprof.report.document import (
    Cell,
    Chart,
    Column,
    Paragraph,
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
from lightning_memprof.report.sections.labels import PEAKS, Peak, bars, called, more, peak_note

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lightning_memprof.analysis.memory.allocations import DeviceAllocations, Site
    from lightning_memprof.analysis.memory.checkpointing import CheckpointedGroup
    from lightning_memprof.analysis.memory.functions import FunctionReport
    from lightning_memprof.analysis.memory.report import Activations, ModuleBytes, RankMemory
    from lightning_memprof.report.view import View

__all__ = [
    "category_stack",
    "memory_section",
    "modules_section",
    "peak_allocations",
    "run_peaks",
    "sites_section",
]

# More rows are slow to lay out, and their sum is in the footer.
MAX_SITES: Final = 300
MAX_MODULES: Final = 1000
MAX_CHECKPOINTED: Final = 12
# From here on the times of recorded steps mislead.
SLOWER: Final = 1.2
ROOT: Final = "(the model)"
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
        [(called(name), peak.unknown.get(name, "")) for name, known in peak.categories.items() if known is None],
    )


def _categories(view: View) -> Iterator[Table]:
    if (peak := view.memory.lead.peak) is None:
        return
    rows: list[Row] = [
        (
            text(called(name)),
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
            f"Live bytes, {_window(window)} on {device.device}",
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


def _window(window: int | None) -> str:
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
        size(group.freed_bytes, whole),
        size(group.back_bytes),
        size(group.kept_bytes),
        duration(group.recompute_ns),
    )
    if number > 1:
        each = None if group.recompute_ns is None else group.recompute_ns / number
        yield (
            text("  each"),
            size(group.freed_bytes / number),
            size(None),
            size(group.kept_bytes / number),
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
        for moment in view.named[:MAX_SITES]
    ]
    yield Table(id="named", title="Each named moment", columns=columns, rows=moments, is_detail=True)


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
    lead = phrase(f"Live bytes on {device.device} peak at {{}}{step}, {_window(window)}.", size(device.peak_bytes))
    footer = [
        *(
            [_rest("freed, allocated before the window", -device.freed_outside_bytes)]
            if device.freed_outside_bytes
            else []
        ),
        _rest("unattributed", device.unattributed_bytes),
    ]
    parameters = memory.activations.parameters if memory.activations else {}
    columns = (
        Column("operator", "code"),
        Column("bytes", "bytes"),
        Column("blocks", "count", priority=2),
        Column("module", "code"),
        Column("line", "code", priority=1),
    )
    rows = site_rows(device.sites, parameters)
    parts: list[Part] = [
        Chart("holders"),
        Paragraph(f"{peak_note('live')}."),
        Table(id="sites", title="Allocation sites at the peak", columns=columns, rows=rows, footer=footer),
        _every_site(device),
    ]
    return Section("sites", "Allocation sites", lead, parts)


def site_rows(sites: Sequence[Site], parameters: Mapping[str, int]) -> list[Row]:
    """Return the sites, repeated blocks as one row, the largest first; whatever their step and phase."""
    shared = patterns({site.module for site in sites if site.module}, parameters)
    sums: dict[tuple[str, str, str | None], list[int]] = {}
    for site in sites:
        where = shared[site.module] if site.module else f"({site.phase})" if site.phase else ""
        row = sums.setdefault((site.operator.removeprefix("aten::"), where, short_line(site.line)), [0, 0])
        row[0] += site.bytes
        row[1] += site.blocks
    ordered = sorted(sums.items(), key=lambda item: (-item[1][0], *(part or "" for part in item[0])))
    most = ordered[0][1][0] if ordered else None
    return [
        (code(operator), size(total, most), count(blocks), code(where or None), code(line))
        for (operator, where, line), (total, blocks) in ordered[:MAX_SITES]
    ]


def short_line(line: str | None) -> str | None:
    """Return ``file.py(12)`` of ``directory/file.py(12): function``."""
    return None if line is None else line.rpartition(": ")[0].rpartition("/")[2] or line


def _every_site(device: DeviceAllocations) -> Table:
    most = device.sites[0].bytes
    rows = [
        (
            code(site.operator.removeprefix("aten::")),
            size(site.bytes, most),
            count(site.blocks),
            code(site.module),
            code(site.line),
            text(called(site.phase) if site.phase else None),
            index(site.step),
        )
        for site in device.sites[:MAX_SITES]
    ]
    columns = (
        Column("operator", "code"),
        Column("bytes", "bytes"),
        Column("blocks", "count"),
        Column("module", "code"),
        Column("line", "code"),
        Column("phase"),
        Column("step", "index"),
    )
    rest = device.sites[MAX_SITES:]
    footer = []
    if rest:
        sums = sum(site.bytes for site in rest), sum(site.blocks for site in rest)
        footer = [(text(f"{len(rest)} more"), size(sums[0]), count(sums[1]), *[text("")] * 4)]
    return Table(
        id="every-site",
        title="By module, line, phase and step",
        columns=columns,
        rows=rows,
        footer=footer,
        is_detail=True,
    )


def _rest(name: str, rest: int) -> Row:
    return text(name), size(rest), text(""), text(""), text("")


def modules_section(view: View) -> Section:
    """Return the saved activations, parameters, gradients and forward time of each module."""
    saved = view.memory.lead.activations
    if saved is None:
        reason = view.memory.lead.reasons.get("modules", "not recorded")
        return Section("modules", "Modules", f"Saved activations by module are not available: {reason}.")
    parts: list[Part] = [_module_patterns(saved), _every_module(saved)]
    types = sorted(saved.dtypes.items(), key=lambda item: -item[1])
    if types and saved.total_bytes:
        words = ", ".join(f"{name} {{}} ({{}})" for name, _ in types)
        values = [cell for _, total in types for cell in (size(total), share(total / saved.total_bytes))]
        parts.append(Paragraph(phrase(f"By data type: {words}.", *values)))
    if saved.attribution:
        parts.append(Paragraph(phrase(f"{{}} are unattributed: {saved.attribution}.", size(saved.unattributed_bytes))))
    if saved.uncounted:
        words = "more values have an unknown size: a scripted module or hooks of the program saved them."
        parts.append(Paragraph(f"{saved.uncounted} {words}"))
    lead = phrase(f"Saved activations in step {saved.step}: {{}}.", size(saved.total_bytes))
    return Section("modules", "Modules", lead, parts)


@dataclass(frozen=True, kw_only=True)
class ModuleSums:
    """The sums of modules that are alike; None where one of them is not known."""

    name: str
    self_bytes: int
    total_bytes: int
    parameter_bytes: int | None
    gradient_bytes: int | None
    calls: int


def module_sums(saved: Activations) -> list[ModuleSums]:
    """Return the modules, repeated blocks as one, the largest total first."""
    shared = patterns((module.name for module in saved.modules), saved.parameters)
    groups: dict[str, list[ModuleBytes]] = {}
    for module in saved.modules:
        groups.setdefault(shared[module.name], []).append(module)
    sums = [
        ModuleSums(
            name=name or ROOT,
            self_bytes=sum(module.own_activation_bytes for module in alike),
            total_bytes=sum(module.inclusive_activation_bytes for module in alike),
            parameter_bytes=_sum([module.parameter_bytes for module in alike]),
            gradient_bytes=_sum([module.gradient_bytes for module in alike]),
            calls=sum(module.calls for module in alike),
        )
        for name, alike in groups.items()
    ]
    return sorted(sums, key=lambda found: (-found.total_bytes, -found.self_bytes, found.name))


def _sum(sizes: Sequence[int | None]) -> int | None:
    known = [known for known in sizes if known is not None]
    return sum(known) if len(known) == len(sizes) else None


def _module_patterns(saved: Activations) -> Table:
    sums = module_sums(saved)[:MAX_SITES]
    most = max((found.total_bytes for found in sums), default=None)
    rows = [
        (
            code(found.name),
            size(found.self_bytes),
            size(found.total_bytes, most),
            size(found.parameter_bytes),
            size(found.gradient_bytes),
            count(found.calls or None),
        )
        for found in sums
    ]
    columns = (
        Column("module", "code"),
        Column("self", "bytes"),
        Column("total", "bytes"),
        Column("parameters", "bytes", priority=1),
        Column("gradients", "bytes", priority=2),
        Column("count", "count", priority=3),
    )
    footer = [(text("unattributed"), size(saved.unattributed_bytes), *[text("")] * 4)]
    title = "Saved activations by module, repeated blocks together"
    return Table(id="modules-alike", title=title, columns=columns, rows=rows, footer=footer)


def _every_module(saved: Activations) -> Table:
    shown, rest = saved.modules[:MAX_MODULES], saved.modules[MAX_MODULES:]
    self_most = max((module.own_activation_bytes for module in shown), default=None)
    total_most = max((module.inclusive_activation_bytes for module in shown), default=None)
    longest = max((module.forward_ns or 0 for module in shown), default=None)
    rows = [
        (
            Cell(module.name or ROOT, "code", sort=module.name),
            size(module.own_activation_bytes, self_most),
            size(module.inclusive_activation_bytes, total_most),
            size(module.parameter_bytes),
            size(module.gradient_bytes),
            duration(module.forward_ns if module.calls else None, longest),
            count(module.calls or None),
        )
        for module in shown
    ]
    columns = (
        Column("module", "code"),
        Column("self", "bytes", "saved while it was the innermost module"),
        Column("total", "bytes", "with its submodules"),
        Column("parameters", "bytes"),
        Column("gradients", "bytes"),
        Column("forward", "ns", "in the recorded step"),
        Column("count", "count"),
    )
    empty = [text("")] * 5
    footer = [(text("unattributed"), size(saved.unattributed_bytes), *empty)]
    if rest:
        sums = sum(module.own_activation_bytes for module in rest)
        footer.insert(0, (text(f"{len(rest)} more"), size(sums), *empty))
    return Table(id="modules-each", title="By module", columns=columns, rows=rows, footer=footer, is_detail=True)
