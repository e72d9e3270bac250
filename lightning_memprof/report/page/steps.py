"""Steps: where their time goes, phase by phase and event by event, and how much data they work through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.actions import action_name
from lightning_memprof.analysis.steps.events import PARTS, event_totals
from lightning_memprof.analysis.steps.phases import OWN_WORK
from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.report.columns import Column, step_columns
from lightning_memprof.report.labels import PEAKS, called
from lightning_memprof.report.page.cells import NONE, bars, count_cell, size_cell, time_cell
from lightning_memprof.report.page.model import Cell, ChartPlace, Facts, Head, Part, Section, Stack, Table
from lightning_memprof.report.throughput import amount
from lightning_memprof.units import format_bytes, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_memprof.analysis.steps.throughput import RankThroughput, Rate
    from lightning_memprof.report.view import View

__all__ = ["steps_section"]

MAX_ACTIONS: Final = 60


def steps_section(view: View) -> Section:
    """Return the steps of the lead rank."""
    parts: list[Part] = [ChartPlace("steps"), ChartPlace("throughput")]
    parts += [*_columns(view), *_events(view), *_throughput(view)]
    pulse = view.lead.statistics
    if pulse is None:
        lead = "No step was timed." if not view.lead.windows else "Only the steps in windows were timed."
    else:
        lead = (
            f"A step takes {format_ns(pulse.median_ns)} in the median, {format_ns(pulse.p90_ns)} or more in 1 of 10, "
            f"{format_ns(pulse.max_ns)} at most."
        )
    return Section("steps", "Steps", lead, parts)


def _columns(view: View) -> Iterator[Part]:
    columns, left_out = step_columns(view)
    if not columns:
        return
    heads = [Head(""), *(Head(column.title, "number", column.subtitle) for column in columns)]
    rows = [[Cell(called(phase)), *(_phase(column, phase) for column in columns)] for phase in PHASES]
    total = [Cell("a step"), *(time_cell(column.duration_ns) for column in columns)]
    memory = [
        [Cell("host rss"), *(size_cell(column.host.rss_bytes) for column in columns)],
        [
            Cell(PEAKS["rss"].label),
            *(size_cell(column.host.peak_rss_bytes or column.host.max_rss_bytes) for column in columns),
        ],
    ]
    if any(column.device is not None for column in columns):
        for title, name in (
            ("device allocated", "allocated_bytes"),
            ("device reserved", "reserved_bytes"),
            (PEAKS["device"].label, "peak_allocated_bytes"),
        ):
            memory.append([Cell(title), *(size_cell(getattr(column.device, name, None)) for column in columns)])
    notes = [
        *(["steps in windows include the cost of recording them"] if len(columns) > 1 else []),
        *([left_out] if left_out else []),
        *([f"device: {view.device_note}"] if view.device_note else []),
    ]
    yield Table("by-phase", "By phase", heads, rows, [total, *memory], notes, is_sortable=False)


def _phase(column: Column, phase: str) -> Cell:
    ns = column.breakdown_ns[phase] if column.breakdown_ns is not None else None
    cell = time_cell(ns, column.duration_ns)
    if ns is None or not column.duration_ns:
        return cell
    return Cell(f"{cell.text} · {percent(ns / column.duration_ns)}", cell.sort, cell.share)


def _events(view: View) -> Iterator[Part]:
    steps = view.events
    if not steps or not (total := sum(step.duration_ns for step in steps)):
        return
    count = len(steps)
    parts: dict[str, int | None] = {part: round(sum(step.parts_ns[part] for step in steps) / count) for part in PARTS}
    words = f"mean of {count} recorded steps" if count > 1 else "the recorded step"
    yield Stack(
        "A recorded step, event by event",
        format_ns(total / count),
        bars(parts, round(total / count), are_bytes=False),
        notes=(f"{words}; each instant counts for the innermost event, our own hooks are callbacks",),
    )
    heads = (
        Head("event", "code"), Head("part"), Head("itself, a step", "number", "without what lies in it"),
        Head("share", "number"), Head("with what is in it", "number"), Head("times a step", "number"),
        Head("longest", "number", "without what lies in it"),
    )  # fmt: skip
    totals = sorted(event_totals(steps), key=lambda total: (-total.self_ns, total.action))
    rows = [
        (
            Cell(action_name(action_total.action)),
            Cell("our own" if action_total.action.startswith(OWN_WORK) else called(action_total.part)),
            time_cell(action_total.self_ns / count, totals[0].self_ns / count),
            Cell(percent(action_total.self_ns / total), sort=action_total.self_ns / total),
            time_cell(action_total.total_ns / count),
            count_cell(action_total.count / count, f"{action_total.count / count:.1f}".removesuffix(".0")),
            time_cell(action_total.max_self_ns),
        )
        for action_total in totals[:MAX_ACTIONS]
    ]
    more = len(totals) - len(rows)
    notes = [*([f"{more} more: --format json"] if more > 0 else []), *_pauses(view)]
    yield Table("events", "Events", heads, rows, notes=notes)


def _pauses(view: View) -> Iterator[str]:
    if (found := view.pauses) is None:
        return
    times = "once" if found.count == 1 else f"{found.count} times"
    words = f"Python's garbage collector ran {times} in recorded steps, {format_ns(found.total_ns)} in all"
    words += f", at most {format_ns(found.max_ns)}" if found.count > 1 else ""
    if found.tensor_bytes:
        words += f"; tensors that only reference cycles kept alive gave back {format_bytes(found.tensor_bytes)}"
    yield words


def _throughput(view: View) -> Iterator[Part]:
    found = next((rate for rate in view.throughput if rate.rank == view.lead.rank), None)
    if found is None:
        return
    rows = [row for name, size, rate in _rates(found) for row in _rate(name, size, rate)]
    if found.flops is not None:
        rows.append(("operations a step", f"{amount(found.flops, 'FLOP')}, {amount(found.flops_per_s or 0, 'FLOP/s')}"))
        if found.utilization is not None and found.peak_flops is not None:
            of_peak = f"{percent(found.utilization)} of {amount(found.peak_flops, 'FLOP/s')}"
            rows.append(("of the device's peak", of_peak))
    yield Facts("Throughput", rows, (found.basis,), is_wide=True)


def _rates(found: RankThroughput) -> Sequence[tuple[str, float | None, Rate | None]]:
    return (
        ("samples", found.samples, found.samples_per_s),
        ("tokens", found.tokens, found.tokens_per_s),
        ("batches", None, found.batches_per_s),
    )


def _rate(name: str, size: float | None, rate: Rate | None) -> Iterator[tuple[str, str]]:
    if rate is not None:
        each = f", {amount(size)} a step" if size is not None else ""
        yield (
            f"{name} a second",
            f"{amount(rate.mean)} ({amount(rate.p10)} to {amount(rate.p90)} in 8 of 10 steps{each})",
        )
    elif name != "tokens":
        yield f"{name} a second", NONE
