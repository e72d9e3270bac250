"""The memory page in lines of styled text, for whoever draws them: where the bytes were, and what could be freed."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from lightning_memprof.report.labels import PEAKS, called
from lightning_memprof.report.memory_tables import (
    DIM,
    NONE,
    Line,
    bar,
    cut,
    module_rows,
    notes,
    over_time,
    site_rows,
    sparkline,
    table,
    tops,
)
from lightning_memprof.report.words import clean
from lightning_memprof.units import format_bytes, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_memprof.analysis.memory.allocations import DeviceAllocations
    from lightning_memprof.analysis.memory.checkpointing import CheckpointedGroup
    from lightning_memprof.analysis.memory.functions import FunctionReport
    from lightning_memprof.analysis.memory.report import CategoryPeak, RankMemory
    from lightning_memprof.report.view import View

__all__ = ["memory_sections", "peak_allocations"]

LABEL: Final = 10
CATEGORY_WIDTH: Final = 22
TOP: Final = 10
MAX_GROUPS: Final = 3
MAX_FUNCTIONS: Final = 8
# Below this the gradients' column would leave no room for names.
NARROW: Final = 72
# Narrower lines than these are broken by whoever draws them.
NARROWEST: Final = 40
# From here on the times of recorded steps mislead.
SLOWER: Final = 1.2
STYLES: Final = {
    "parameter": "cyan",
    "gradient": "blue",
    "optimizer_state": "magenta",
    "activation": "yellow",
    "input": "green",
    "temporary": "red",
}


def memory_sections(view: View, width: int, *, ascii_only: bool) -> Iterator[list[Line]]:
    """Yield the sections of the lead rank's memory, each in lines of at most ``width`` characters (at least 40).

    What was not recorded has no section; why it was not is in the document of ``--format json``.
    """
    memory, width = view.memory.lead, max(width, NARROWEST)
    sections = (
        _peak(memory.peak, view, width, ascii_only=ascii_only),
        _modules(memory, width),
        _sites(memory, width),
        _over_time(memory, width, ascii_only=ascii_only),
        _functions(memory.functions, width),
        _what_if(memory.checkpointing, view, width),
    )
    for lines in sections:
        if lines:
            yield lines


def peak_allocations(memory: RankMemory) -> tuple[int | None, DeviceAllocations] | None:
    """Return the window and device whose live bytes rose highest."""
    found = [(allocation.window, device) for allocation in memory.allocations for device in allocation.devices]
    return max(found, key=lambda entry: entry[1].peak_bytes, default=None)


def _heading(label: str, words: str, width: int) -> list[Line]:
    first, *more = textwrap.wrap(clean(words), width - LABEL) or [""]
    return [((f"{label:<{LABEL}}", "bold"), (first, "")), *(((f"{'':<{LABEL}}{text}", ""),) for text in more)]


def _peak(peak: CategoryPeak | None, view: View, width: int, *, ascii_only: bool) -> list[Line]:
    if peak is None:
        return []
    on = f" on {peak.device}" if peak.device else ""
    lines = _heading("memory", f"{format_bytes(peak.total_bytes)}{on} in step {peak.step}, by category", width)
    most = max((abs(size) for size in peak.categories.values() if size is not None), default=0)
    names = {name: clean(called(name)) for name in peak.categories}
    left = min(max(map(len, names.values())) + 1, CATEGORY_WIDTH)
    room = width - 2 - left - 9 - 6 - 1
    below: list[Line] = []
    for name, size in peak.categories.items():
        words = f"  {cut(names[name], left - 1):<{left}}"
        if size is None:
            reason = clean(peak.unknown.get(name, ""))
            if len(reason) > room:
                below += notes(f"{names[name]}: {reason}", width)
                reason = "see below"
            lines.append(((f"{words}{NONE:>9}", ""), (f"{'':<6} {reason}", DIM)))
            continue
        share = percent(size / peak.total_bytes) if peak.total_bytes else ""
        drawn = bar(size / most if most else 0, room, ascii_only=ascii_only)
        lines.append(((f"{words}{format_bytes(size):>9}{share:>6} ", ""), (drawn, STYLES.get(name, DIM))))
    lines.append(((f"  {'sum':<{left}}{format_bytes(peak.total_bytes):>9}{'100%':>6}", "bold"),))
    lines += [*below, *notes(f"{peak.source}: {peak.moment}", width)]
    for device_peak in peak.others:
        lines += notes(f"beside it {format_bytes(device_peak.total_bytes)} on {device_peak.device or '?'}", width)
    allocator = view.lead.device.peak_allocated_bytes if view.lead.device else None
    if allocator is not None:
        over = allocator - peak.total_bytes
        beyond = f", {format_bytes(over)} more than these" if over > 0 else ""
        lines += notes(f"{PEAKS['device'].label} {format_bytes(allocator)}{beyond}", width)
    return lines


def _modules(memory: RankMemory, width: int) -> list[Line]:
    kept = memory.activations
    if kept is None:
        return []
    words = f"{format_bytes(kept.total_bytes)} kept for backward in step {kept.step}, by module"
    lines = _heading("modules", words, width)
    rows = module_rows(kept)
    names = ["module", "own", "inclusive", "parameter", "gradient", "calls"]
    cells = [
        [
            row.name,
            format_bytes(row.own_bytes),
            format_bytes(row.inclusive_bytes),
            *(NONE if size is None else format_bytes(size) for size in (row.parameter_bytes, row.gradient_bytes)),
            str(row.calls) if row.calls else NONE,
        ]
        for row in rows[:TOP]
    ]
    if len(rows) > TOP:
        rest = sum(row.own_bytes for row in rows[TOP:])
        cells.append([f"{len(rows) - TOP} more", format_bytes(rest), "", "", "", ""])
    cells.append(["unattributed", format_bytes(kept.unattributed_bytes), "", "", "", ""])
    if width < NARROW:
        names, *cells = [[*column[:4], *column[5:]] for column in (names, *cells)]
    if rows:
        lines += table(names, cells, width, dim=len(cells) - min(len(rows), TOP))
    if kept.attribution:
        lines += notes(f"{format_bytes(kept.unattributed_bytes)} unattributed: {kept.attribution}", width)
    if kept.uncounted:
        words = "more are kept in a form whose size is not known: by a scripted module, or by hooks of the program's"
        lines += notes(f"{kept.uncounted} {words}", width)
    return lines


def _sites(memory: RankMemory, width: int) -> list[Line]:
    found = peak_allocations(memory)
    if found is None or not found[1].sites:
        # Where the traces were not read, the page at the end of training, there is nothing to say.
        problem = any(allocation.problem for allocation in memory.allocations)
        return _heading("sites", memory.reasons["sites"], width) if problem else []
    window, device = found
    step = "" if device.peak_step is None else f", step {device.peak_step}"
    words = (
        f"{format_bytes(device.peak_bytes)} on {device.device} above the start of {_window(window)} at its peak{step}"
    )
    lines = _heading("sites", words, width)
    rows = site_rows(device.sites, memory.activations.parameters if memory.activations else {})
    cells = [[row.operator, format_bytes(row.bytes), str(row.blocks), row.line, row.place] for row in rows[:TOP]]
    rest = sum(row.bytes for row in rows[TOP:])
    if rest:
        cells.append(
            [f"{len(rows) - TOP} more", format_bytes(rest), str(sum(row.blocks for row in rows[TOP:])), "", ""]
        )
    if device.freed_outside_bytes:
        cells.append(["freed of before", format_bytes(-device.freed_outside_bytes), "", "", ""])
    cells.append(["unattributed", format_bytes(device.unattributed_bytes), "", "", ""])
    dim = len(cells) - min(len(rows), TOP)
    names = ["operator", "bytes", "blocks", "line", "module"]
    if not any(row.line for row in rows[:TOP]):
        names, *cells = [[*column[:3], column[4]] for column in (names, *cells)]
    return lines + table(names, cells, width, dim=dim, tail=True)


def _over_time(memory: RankMemory, width: int, *, ascii_only: bool) -> list[Line]:
    lines: list[Line] = []
    found = peak_allocations(memory)
    if found is not None and len(found[1].curve) > 1:
        window, device = found
        drawn = sparkline(over_time(device.curve, width - LABEL), ascii_only=ascii_only)
        lines.append(((f"{'live':<{LABEL}}", "bold"), (drawn, "yellow")))
        first, last = (format_bytes(device.curve[place][1]) for place in (0, -1))
        words = f"{_window(window)} on {device.device}: {first}, at most {format_bytes(device.peak_bytes)}, then {last}"
        lines += notes(words, width, LABEL)
        at = [f"{mark.point.replace('_', ' ')} {format_bytes(mark.live_bytes)}"
              for mark in device.marks if mark.step is not None and mark.step == device.peak_step]  # fmt: skip
        if at:
            lines += notes(f"step {device.peak_step}: {', '.join(at)}", width, LABEL)
    kept = [(step.step, step.activation_bytes) for step in memory.steps if step.activation_bytes is not None]
    if len(kept) > 1:
        sizes = [size for _, size in kept]
        drawn = sparkline(tops(sizes, width - LABEL), ascii_only=ascii_only)
        lines.append(((f"{'kept':<{LABEL}}", "bold"), (drawn, "yellow")))
        span = format_bytes(min(sizes))
        span += f" to {format_bytes(max(sizes))}" if max(sizes) > min(sizes) else " in each"
        words = f"for backward, in {len(kept)} recorded steps from {kept[0][0]} to {kept[-1][0]}: {span}"
        lines += notes(words, width, LABEL)
    return lines


def _window(window: int | None) -> str:
    return "the trace" if window is None else f"window {window}"


def _functions(functions: Sequence[FunctionReport], width: int) -> list[Line]:
    if not functions:
        return []
    columns = (
        ("rss", "rss_bytes"),
        ("in forwards", "forward_rss_bytes"),
        ("saved", "saved_bytes"),
        ("allocated", "allocated_bytes"),
        ("reserved", "reserved_bytes"),
    )
    known = [(name, key) for name, key in columns if any(function.changes(key) for function in functions)]
    cells = []
    for function in functions[:MAX_FUNCTIONS]:
        changes = [function.changes(key) for _, key in known]
        means = [_signed(round(sum(found) / len(found))) if found else NONE for found in changes]
        cells.append([function.name, str(len(function.calls)), *means])
    if len(functions) > MAX_FUNCTIONS:
        cells.append([f"{len(functions) - MAX_FUNCTIONS} more", *[""] * (1 + len(known))])
    heading = _heading("functions", "what a call changes from its start to its end, on average", width)
    lines = [*heading, *table(["function", "calls", *(name for name, _ in known)], cells, width)]
    return [
        *lines,
        *notes("rss grows only where memory is touched for the first time: what is used again shows 0", width),
    ]


def _what_if(groups: Sequence[CheckpointedGroup], view: View, width: int) -> list[Line]:
    if not groups:
        return []
    cells = []
    for group in groups[:MAX_GROUPS]:
        count = len(group.blocks)
        sums = (group.freed_bytes, group.back_bytes, group.kept_bytes)
        cells.append(
            [
                f"{group.name}, {'all' if count == group.repeats else 'these'} {count}",
                *map(format_bytes, sums),
                _time(group.recompute_ns),
            ]
        )
        if count > 1:
            each = None if group.recompute_ns is None else group.recompute_ns / count
            means = (group.freed_bytes / count, group.kept_bytes / count)
            cells.append(["  each", format_bytes(means[0]), "", format_bytes(means[1]), _time(each)])
    heading = _heading("what if", "these were checkpointed: bytes for time, in one step", width)
    note = "back: while a block is recomputed, its bytes are there again"
    lines = [*heading, *table(["blocks", "frees", "back", "keeps", "recomputes"], cells, width)]
    if len(groups) > MAX_GROUPS:
        note += f"; {len(groups) - MAX_GROUPS} more: --format json"
    return [*lines, *notes(f"{note}{_slower(view)}", width)]


def _slower(view: View) -> str:
    """Say by how much recording slows the forward down, where it does: modules are timed in recorded steps."""
    usual = view.lead.statistics.breakdown_ns["forward"] if view.lead.statistics else None
    breakdowns = [step.breakdown_ns for window in view.lead.windows for step in window.steps if step.breakdown_ns]
    recorded = [ns for breakdown in breakdowns if (ns := breakdown["forward"]) is not None]
    if not usual or not recorded:
        return ""
    mean = sum(recorded) / len(recorded)
    if mean < SLOWER * usual:
        return ""
    return f"; a forward takes {format_ns(mean)} in recorded steps and {format_ns(usual)} in others"


def _time(ns: float | None) -> str:
    return NONE if ns is None else format_ns(ns)


def _signed(value: int) -> str:
    return f"{'+' if value >= 0 else ''}{format_bytes(value)}"
