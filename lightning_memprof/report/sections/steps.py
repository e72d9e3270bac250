"""Steps: time by phase, by event and by callback, and throughput."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from lightning_memprof.account.ledger.model import TimeLedger, grouped
from lightning_memprof.account.parts import PHASE_PARTS, Part, phase_label
from lightning_memprof.account.steps.events import ACTION_PARTS, OWN_WORK, action_name, event_totals
from lightning_memprof.account.steps.statistics import DeviceMemory, HostMemory, StepReport, mean
from lightning_memprof.account.steps.throughput import RankThroughput, Rate
from lightning_memprof.artifacts.series import HangRow
from lightning_memprof.report.document import (
    Cell,
    Chart,
    Column,
    Item,
    Row,
    Section,
    Stack,
    Table,
    Words,
    count,
    duration,
    index,
    phrase,
    rate,
    share,
    size,
    text,
)
from lightning_memprof.report.sections.labels import MORE, PEAKS, bars, compiled_note
from lightning_memprof.report.sections.tables import Field, filled, grid, rest
from lightning_memprof.report.view import View, WindowView
from lightning_memprof.units import format_count, format_steps

# More recorded steps than these are shown as means, one for each window.
MAX_STEPS: Final = 5
MAX_WINDOWS: Final = 8
MAX_ACTIONS: Final = 60
MAXIMA: Final = frozenset({PEAKS["rss"].label, PEAKS["device"].label})
# Recorded steps that are this much slower need a note.
SLOWER: Final = 1.2
MAX_STALLS: Final = 3
# An owner that takes less of a step than this needs no row.
LEAST_SHARE: Final = 0.0005


class StepColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A column of the table by phase: times that sum to ``duration_ns``, bytes by row; None is not available."""

    title: str
    subtitle: str
    duration_ns: int | None
    breakdown_ns: Mapping[str, int | None] | None
    memory: Mapping[str, int | None]


def steps_section(view: View) -> Section:
    """Return the steps of the lead rank."""
    pulse = view.lead.statistics
    lead: Words = "No step was timed." if not view.lead.windows else "Only the steps in windows were timed."
    if pulse is not None:
        lead = phrase(
            "Step time: median {}, p90 {}, max {} ({}, {} clock).",
            duration(pulse.median_ns),
            duration(pulse.p90_ns),
            duration(pulse.max_ns),
            text(pulse.basis),
            text(pulse.clock),
        )
    parts: list[Item] = [
        Chart("steps"),
        Chart("throughput"),
        *_by_phase(view),
        *_ledger(view),
        *_events(view),
        *_throughput(view),
    ]
    return Section("steps", "Steps", lead, parts)


REPORTS: Final = {"hang": "exceeds its limit", "asked": "another rank reported", "exception": "raised"}


def hangs_section(view: View) -> Section | None:
    """Return where each rank was in steps that exceeded their limit, or raised; None without one."""
    rows = [(rank.rank, row) for rank in view.run.ranks if rank.in_full for row in rank.read(HangRow).rows]
    ended = {(rank, row.step): row.waited_ns for rank, row in rows if row.kind == "end"}
    # Of a step the last report: a rank that was asked may exceed its own limit later.
    last = {(rank, row.step): (rank, row) for rank, row in rows if row.kind in REPORTS}
    parts = filled(
        Table("hangs", "Place of each rank", is_sortable=False),
        list(last.values()),
        Field("rank", "index", lambda row: row[0]),
        Field("report", "text", lambda row: REPORTS[row[1].kind or ""]),
        Field("step", "index", lambda row: row[1].step),
        Field("phase", "text", lambda row: phase_label(row[1].phase)),
        Field("worker", "index", lambda row: row[1].worker),
        Field("limit", "ns", lambda row: row[1].limit_ns),
        Field("ended after", "ns", lambda row: ended.get((row[0], row[1].step))),
        Field("line", "code", lambda row: row[1].place),
        Field("source", "code", lambda row: row[1].source, priority=1),
        Field("function", "code", lambda row: row[1].function),
        Field("error", "text", lambda row: row[1].error, priority=1),
    )
    return Section("hangs", "Where it hangs", "", list(parts)) if last else None


def _by_phase(view: View) -> Iterator[Table]:
    columns, left_out = _columns(view)
    if not columns:
        return
    rows = [[text(part.label), *(_phase(column, phase) for column in columns)] for phase, part in PHASE_PARTS.items()]
    names = dict.fromkeys(name for column in columns for name in column.memory)
    footer: list[Row] = [
        [text("step"), *(duration(column.duration_ns) for column in columns)],
        *([text(name), *(size(column.memory.get(name)) for column in columns)] for name in names),
    ]
    pulse = view.lead.statistics
    notes = [
        "RSS, allocated and reserved bytes are those at the end of the steps",
        "times of recorded steps include the cost of recording" if len(columns) > 1 else "",
        "callbacks are part of the phase around them on the device's clock"
        if pulse is not None and pulse.breakdown_ns["callbacks"] is None
        else "",
        *left_out,
        f"device: {view.device_note}" if view.device_note else "",
    ]
    yield Table(
        id="by-phase",
        title="Time by phase, and memory",
        columns=[Column("phase"), *(Column(column.title, "ns", column.subtitle, has_share=True) for column in columns)],
        rows=rows,
        footer=footer,
        notes=[note for note in notes if note],
        is_sortable=False,
    )


def _phase(column: StepColumn, phase: str) -> Cell:
    return duration(column.breakdown_ns[phase] if column.breakdown_ns is not None else None, column.duration_ns)


def _columns(view: View) -> tuple[list[StepColumn], list[str]]:
    """Return the whole run, then recorded steps or, of many, windows; and a note that counts the others."""
    columns = []
    lead = view.lead
    if (pulse := lead.statistics) is not None:
        columns.append(
            StepColumn(
                title="whole run",
                subtitle=f"mean of {format_count(pulse.used, 'step')}",
                duration_ns=pulse.mean_ns,
                breakdown_ns=pulse.breakdown_ns,
                memory=_memory(lead.host, lead.device),
            )
        )
    windows = [window for window in lead.windows if window.steps]
    if sum(len(window.steps) for window in windows) <= MAX_STEPS:
        return columns + [_of_step(window, step) for window in windows for step in window.steps], []
    columns += [_of_window(window) for window in windows[:MAX_WINDOWS]]
    return columns, rest(windows, MAX_WINDOWS, "more windows")


def _of_step(window: WindowView, step: StepReport) -> StepColumn:
    return StepColumn(
        title=f"step {step.step}",
        subtitle=f"window {window.index}{', truncated' if window.truncated else ''}",
        duration_ns=step.duration_ns,
        breakdown_ns=step.breakdown_ns,
        memory=_memory(step.host, step.device),
    )


def _of_window(window: WindowView) -> StepColumn:
    """Return the mean times of a window's steps; memory is the last step's, of maxima the largest."""
    timed = [step.breakdown_ns for step in window.steps if step.breakdown_ns is not None]
    breakdown = {phase: mean(times[phase] for times in timed) for phase in PHASE_PARTS} if timed else None
    memory: dict[str, int | None] = {}
    for step in window.steps:
        for name, found in _memory(step.host, step.device).items():
            before = memory.get(name) if name in MAXIMA else None
            memory[name] = found if before is None or (found is not None and found > before) else before
    return StepColumn(
        title=f"window {window.index}",
        subtitle=format_steps(tuple(step.step for step in window.steps)) + (", truncated" if window.truncated else ""),
        duration_ns=sum(ns or 0 for ns in breakdown.values()) if breakdown else None,
        breakdown_ns=breakdown,
        memory=memory,
    )


def _memory(host: HostMemory, device: DeviceMemory | None) -> dict[str, int | None]:
    found = {"RSS": host.rss_bytes, PEAKS["rss"].label: host.peak_rss_bytes or host.max_rss_bytes}
    if device is None:
        return found
    return found | {
        "device allocated": device.allocated_bytes,
        "device reserved": device.reserved_bytes,
        PEAKS["device"].label: device.peak_allocated_bytes,
    }


def _events(view: View) -> Iterator[Item]:
    steps = view.events
    total = sum(step.duration_ns for step in steps)
    if not total:
        return
    number = len(steps)
    step_ns = total / number
    parts = {part: mean(step.parts_ns[part] for step in steps) for part in ACTION_PARTS}
    basis = f"mean of {number} recorded steps" if number > 1 else "the recorded step"
    if view.lead.statistics is not None and view.lead.statistics.clock == "device":
        basis += ", host clock"
    yield Stack(
        "Recorded step by part",
        duration(step_ns),
        bars(parts, round(step_ns), "ns"),
        notes=(f"{basis}; each instant counts for the innermost event, hooks of the profiler are callbacks",),
    )
    totals = sorted(event_totals(steps), key=lambda event: (-event.self_ns, event.action))
    yield from filled(
        Table("events", "Events", notes=list(_pauses(view))),
        totals,
        Field("event", "code", lambda event: action_name(event.action)),
        Field(
            "part",
            "text",
            lambda event: (Part.PROFILER if event.action.startswith(OWN_WORK) else event.part).label,
            priority=2,
        ),
        Field("self/step", "ns", lambda event: event.self_ns / number, bar=True),
        Field("share", "share", lambda event: event.self_ns / total),
        Field("total/step", "ns", lambda event: event.total_ns / number, priority=1),
        Field("count/step", "count", lambda event: event.count / number),
        Field("max self", "ns", lambda event: event.max_self_ns),
        most=MAX_ACTIONS,
    )


def _ledger(view: View) -> Iterator[Table]:
    """Yield the owners of the mean step's time; blocks of the same kind have one row."""
    ledger = view.ledger
    if ledger is None:
        return
    found = [line for line in grouped(ledger.lines) if line.ns >= LEAST_SHARE * ledger.step_ns]
    yield from filled(
        Table("ledger", "Step time by owner", notes=[*_ledger_notes(ledger), *compiled_note(view.training)], top=12),
        found,
        Field("part", "text", lambda line: line.part.label),
        Field("owner", "code", lambda line: line.module or line.name or ("" if line.module is None else "(the model)")),
        Field("operator", "code", lambda line: line.operator or ""),
        Field("time/step", "ns", lambda line: line.ns, bar=True),
        Field("share", "share", lambda line: line.ns / ledger.step_ns),
        Field("count/step", "count", lambda line: line.count or None, priority=1),
    )


def _ledger_notes(ledger: TimeLedger) -> Iterator[Words]:
    yield phrase("each instant has one owner; mean of {}: {}", text(ledger.basis), duration(ledger.step_ns))
    if ledger.window_factor is not None and ledger.window_factor > SLOWER:
        yield f"recorded steps take {ledger.window_factor:.1f} times the median; this table is without that excess"
    if ledger.communication:
        times = [ledger.communicates("rank_wait"), ledger.communicates("collective")]
        own = ledger.step_ns - sum(times)
        yield phrase("own work {}, waiting for other ranks {}, transfer {}", *map(duration, (own, *times)))
    for stall in ledger.stalls[:MAX_STALLS]:
        values = [index(stall.step), duration(stall.duration_ns), text(f", mostly {stall.owner.label}")]
        if stall.core_wait_ns:
            yield phrase(
                "stall: step {} took {}, with {} of waiting for a core{}",
                *values[:2],
                duration(stall.core_wait_ns),
                values[2],
            )
        else:
            yield phrase("stall: step {} took {}{}", *values)


def _pauses(view: View) -> Iterator[Words]:
    if (found := view.pauses) is None:
        return
    yield phrase(
        "GC pauses in recorded steps: count {}, total {}, max {}",
        count(found.count),
        duration(found.total_ns),
        duration(found.max_ns),
    )
    if found.tensor_bytes:
        largest = "".join(f"; most were {kind.type} {list(kind.shape)} of {kind.dtype}" for kind in found.tensors[:1])
        yield phrase(
            "garbage collection freed {} of tensors in reference cycles{}", size(found.tensor_bytes), text(largest)
        )


def lead_throughput(view: View) -> RankThroughput | None:
    """Return the throughput of the lead rank."""
    return next((found for found in view.throughput if found.rank == view.lead.rank), None)


def main_rate(found: RankThroughput) -> tuple[str, Rate]:
    """Return the rate of tokens, else of samples, else of batches."""
    for name, known in (("tokens", found.tokens_per_s), ("samples", found.samples_per_s)):
        if known is not None:
            return name, known
    return "batches", found.batches_per_s


def _throughput(view: View) -> Iterator[Item]:
    if (found := lead_throughput(view)) is None:
        return
    rates = (
        ("samples", found.samples, found.samples_per_s),
        ("tokens", found.tokens, found.tokens_per_s),
        ("batches", None, found.batches_per_s),
    )
    columns, rows = grid(
        [(name, per_step, known, f"{name}/s") for name, per_step, known in rates if known is not None],
        Field("quantity", "text", lambda row: row[0]),
        Field("mean", "rate", lambda row: rate(row[2].mean, row[3])),
        Field("p10", "rate", lambda row: rate(row[2].p10, row[3]), priority=1),
        Field("p90", "rate", lambda row: rate(row[2].p90, row[3]), priority=1),
        Field("per step", "rate", lambda row: count(row[1]), priority=2),
    )
    notes: list[Words] = [found.basis]
    if found.flops is not None:
        unknown = rate(None, "FLOP/s")
        operations = rate(found.flops_per_s, "FLOP/s"), unknown, unknown, rate(found.flops, "FLOP")
        rows.append((text("operations"), *operations))
        if found.utilization is None or found.peak_flops is None:
            notes.append("utilization: not available, the device's peak is not known")
        else:
            known_peak = rate(found.peak_flops, "FLOP/s")
            notes.append(phrase("utilization: {} of the device's {}", share(found.utilization), known_peak))
    if len(view.ranks) > 1:
        notes.append(f"rank {found.rank} only; other ranks: {MORE}")
    yield Table("rates", "Throughput", columns, rows, notes=notes, is_sortable=False)
