"""Memory: categories at the peak, what happened over time, who holds it, and each module's part."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from lightning_memprof.report.labels import PEAKS, called, peak_note
from lightning_memprof.report.memory import peak_allocations
from lightning_memprof.report.page.cells import NONE, bars, count_cell, index_cell, size_cell, time_cell
from lightning_memprof.report.page.model import Cell, ChartPlace, Head, Part, Section, Stack, Table, Words
from lightning_memprof.report.peaks import run_peaks
from lightning_memprof.units import format_bytes, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_memprof.analysis.memory.allocations import Site
    from lightning_memprof.analysis.memory.functions import FunctionReport
    from lightning_memprof.analysis.memory.report import Activations, CategoryPeak, RankMemory
    from lightning_memprof.report.view import View

__all__ = ["holders_section", "memory_section", "modules_section"]

# More rows are slow to lay out, and their sum is in the footer.
MAX_SITES: Final = 300
MAX_MODULES: Final = 1000
ROOT: Final = "(the model)"


def memory_section(view: View) -> Section:
    """Return the peak of the lead rank by category, its course, and what could be freed."""
    memory = view.memory.lead
    parts: list[Part] = [ChartPlace("memory"), *_peaks(view), *_peak(memory.peak, view)]
    parts += [*_checkpointing(memory), *_functions(memory.functions), *_named(view)]
    if memory.peak is None:
        lead = f"The peak by category is not known: {memory.reasons.get('peak', 'not recorded')}."
    else:
        on = f" on {memory.peak.device}" if memory.peak.device else ""
        lead = f"At most {format_bytes(memory.peak.total_bytes)} of tensors were seen{on}, in step {memory.peak.step}."
    return Section("memory", "Memory", lead, parts)


def _peaks(view: View) -> Iterator[Part]:
    """Say what each of the peaks counts: beside each other they look like one figure with several values."""
    rows = [
        (Cell(peak.label), size_cell(size), Cell(peak.counts), Cell(peak.span)) for peak, size in run_peaks(view)
    ]  # fmt: skip
    heads = (Head("peak"), Head("bytes", "number"), Head("counts"), Head("over which time"))
    if rows:
        yield Table("peaks", "Peaks, and what each of them counts", heads, rows, is_sortable=False)


def _peak(peak: CategoryPeak | None, view: View) -> Iterator[Part]:
    if peak is None:
        return
    notes = [f"source: {peak.source}, {peak.moment}"]
    notes += [
        f"beside it {format_bytes(device_peak.total_bytes)} on {device_peak.device or '?'}"
        for device_peak in peak.others
    ]
    own = view.lead.device.peak_allocated_bytes if view.lead.device else None
    if own is not None:
        beyond = f", {format_bytes(own - peak.total_bytes)} more than these" if own > peak.total_bytes else ""
        notes.append(f"{PEAKS['device'].label} {format_bytes(own)}{beyond}")
    unknown = [(called(name), peak.unknown.get(name, "")) for name, size in peak.categories.items() if size is None]
    yield Stack(
        f"{PEAKS['tensors'].label[0].upper()}{PEAKS['tensors'].label[1:]}, by category",
        format_bytes(peak.total_bytes),
        bars(peak.categories, peak.total_bytes, are_bytes=True),
        unknown,
        notes,
    )


def _checkpointing(memory: RankMemory) -> Iterator[Part]:
    if not memory.checkpointing:
        return
    heads = (
        Head("blocks", "code"), Head("frees", "number"), Head("back", "number", "there again while one is recomputed"),
        Head("keeps", "number", "the inputs of the blocks"), Head("recomputes", "number", "in one step"),
    )  # fmt: skip
    rows = [
        (
            Cell(f"{group.name}, {'all' if len(group.blocks) == group.repeats else 'these'} {len(group.blocks)}"),
            size_cell(group.freed_bytes, memory.activations.total_bytes if memory.activations else None),
            size_cell(group.back_bytes),
            size_cell(group.kept_bytes),
            time_cell(group.recompute_ns),
        )
        for group in memory.checkpointing
    ]
    yield Table("what-if", "What if these blocks were checkpointed", heads, rows)


def _functions(functions: Sequence[FunctionReport]) -> Iterator[Part]:
    columns = (
        ("rss", "rss_bytes"),
        ("in forwards", "forward_rss_bytes"),
        ("saved", "saved_bytes"),
        ("allocated", "allocated_bytes"),
        ("reserved", "reserved_bytes"),
    )
    known = [(name, key) for name, key in columns if any(function.changes(key) for function in functions)]
    if not functions:
        return
    rows = [
        (
            Cell(function.name),
            count_cell(len(function.calls)),
            *(_mean_change(function.changes(key)) for _, key in known),
        )
        for function in functions
    ]
    heads = (Head("function", "code"), Head("calls", "number"), *(Head(name, "number") for name, _ in known))
    note = "rss grows only where memory is touched for the first time: what is used again shows 0"
    yield Table("functions", "What a call changes, on average", heads, rows, notes=(note,))


def _mean_change(changes: Sequence[int]) -> Cell:
    if not changes:
        return Cell(NONE, style="dim")
    mean = round(sum(changes) / len(changes))
    return Cell(f"{'+' if mean >= 0 else ''}{format_bytes(mean)}", sort=mean, style="" if mean else "dim")


def _named(view: View) -> Iterator[Part]:
    if not view.named:
        return
    heads = (
        Head("name", "code"), Head("point"), Head("rank", "number"), Head("step", "number"), Head("rss", "number"),
        Head(PEAKS["rss"].label, "number"),
    )  # fmt: skip
    rows = [
        (
            Cell(summary.name), Cell(summary.point), index_cell(summary.rank), index_cell(summary.step),
            size_cell(summary.rss_bytes), size_cell(summary.peak_rss_bytes),
        )
        for summary in view.named[:MAX_SITES]
    ]  # fmt: skip
    yield Table("named", "Moments that the program named", heads, rows)


def holders_section(view: View) -> Section | None:
    """Return who held the memory at the peak of the window in which it rose highest; None where nobody looked."""
    memory = view.memory.lead
    found = peak_allocations(memory)
    if found is None or not found[1].sites:
        reason = memory.reasons.get("sites")
        if reason is None or not memory.allocations:
            return None
        return Section("holders", "Holders", f"Who held the memory is not known: {reason}.")
    window, device = found
    step = "" if device.peak_step is None else f", in step {device.peak_step}"
    where = "the trace" if window is None else f"window {window}"
    lead = f"{format_bytes(device.peak_bytes)} on {device.device} above the start of {where} at its peak{step}."
    most = device.sites[0].bytes
    rows = [_site(site, most) for site in device.sites[:MAX_SITES]]
    rest = device.sites[MAX_SITES:]
    footer = [
        *(
            [_rest(f"{len(rest)} more", sum(site.bytes for site in rest), sum(site.blocks for site in rest))]
            if rest
            else []
        ),
        *([_rest("freed of before", -device.freed_outside_bytes)] if device.freed_outside_bytes else []),
        _rest("unattributed", device.unattributed_bytes),
    ]
    heads = (
        Head("operator", "code"), Head("bytes", "number"), Head("blocks", "number"), Head("module", "code"),
        Head("line", "code"), Head("phase"), Head("step", "number"),
    )  # fmt: skip
    return Section(
        "holders",
        "Holders at the peak",
        lead,
        [
            ChartPlace("holders"),
            Words(f"{peak_note('live')}."),
            Table("sites", "By operator, module and line", heads, rows, footer),
        ],
    )


def _site(site: Site, most: int) -> tuple[Cell, ...]:
    return (
        Cell(site.operator.removeprefix("aten::")),
        size_cell(site.bytes, most),
        count_cell(site.blocks),
        Cell(site.module or NONE, style="" if site.module else "dim"),
        Cell(site.line or NONE, style="" if site.line else "dim"),
        Cell(called(site.phase or NONE), style="" if site.phase else "dim"),
        index_cell(site.step),
    )


def _rest(name: str, size: int, blocks: int | None = None) -> tuple[Cell, ...]:
    filled = Cell("") if blocks is None else count_cell(blocks)
    return (Cell(name), size_cell(size), filled, *[Cell("")] * 4)


def modules_section(view: View) -> Section:
    """Return each module's activations, parameters, gradients and time."""
    kept = view.memory.lead.activations
    if kept is None:
        reason = view.memory.lead.reasons.get("modules", "not recorded")
        return Section("modules", "Modules", f"What each module keeps is not known: {reason}.")
    lead = f"{format_bytes(kept.total_bytes)} were kept for backward in step {kept.step}."
    parts: list[Part] = [_modules(kept)]
    types = [
        f"{name} {format_bytes(size)} ({percent(size / kept.total_bytes)})"
        for name, size in sorted(kept.dtypes.items(), key=lambda dtype: -dtype[1])
        if kept.total_bytes
    ]
    if types:
        parts.append(Words(f"By data type: {', '.join(types)}."))
    if kept.attribution:
        parts.append(Words(f"{format_bytes(kept.unattributed_bytes)} are unattributed: {kept.attribution}."))
    if kept.uncounted:
        words = (
            "values more are kept in a form whose size is not known: by a scripted module, or by the program's hooks"
        )
        parts.append(Words(f"{kept.uncounted} {words}."))
    return Section("modules", "Modules", lead, parts)


def _modules(kept: Activations) -> Table:
    shown, rest = kept.modules[:MAX_MODULES], kept.modules[MAX_MODULES:]
    most: Callable[[Sequence[int | None]], int] = lambda sizes: max((size or 0 for size in sizes), default=0)  # noqa: E731
    own = most([module.own_activation_bytes for module in shown])
    inclusive = most([module.inclusive_activation_bytes for module in shown])
    longest = most([module.forward_ns for module in shown])
    heads = (
        Head("module", "code"),
        Head("own", "number", "saved while it was the innermost"),
        Head("inclusive", "number", "with its sub-modules"),
        Head("parameters", "number"),
        Head("gradients", "number"),
        Head("forward", "number", "of this step, recorded"),
        Head("calls", "number"),
    )
    rows = [
        (
            Cell(module.name or ROOT, sort=module.name),
            size_cell(module.own_activation_bytes, own),
            size_cell(module.inclusive_activation_bytes, inclusive),
            size_cell(module.parameter_bytes),
            size_cell(module.gradient_bytes),
            time_cell(module.forward_ns if module.calls else None, longest),
            count_cell(module.calls or None),
        )
        for module in shown
    ]
    empty = [Cell("")] * 5
    footer = [[Cell("unattributed"), size_cell(kept.unattributed_bytes), *empty]]
    if rest:
        footer.insert(
            0, [Cell(f"{len(rest)} more"), size_cell(sum(module.own_activation_bytes for module in rest)), *empty]
        )  # fmt: skip
    return Table("module-table", "By module", heads, rows, footer)
