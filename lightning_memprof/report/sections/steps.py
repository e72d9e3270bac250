"""Steps: time by phase, by event and by callback, and throughput."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from lightning_memprof.account.ledger.model import TimeLedger, grouped
from lightning_memprof.account.parts import PHASE_PARTS, Part, phase_label
from lightning_memprof.account.steps.events import ACTION_PARTS, OWN_WORK, action_name, event_totals
from lightning_memprof.account.steps.statistics import DeviceMemory, HostMemory, StepReport, mean
from lightning_memprof.account.steps.throughput import RankThroughput, Rate
from lightning_memprof.artifacts.series import HangRow
from lightning_memprof.report.document import Cell, Chart, Item, Row, Section, Stack, Table, Words, joined, phrase
from lightning_memprof.report.sections.labels import MORE, PEAKS, bars, compiled_note
from lightning_memprof.report.sections.tables import Field, filled, rest
from lightning_memprof.report.view import View
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


class StepColumn(msgspec.Struct, frozen=True):
    """A column of the table by phase: times that sum to the step, bytes by row; None is not available."""

    title: str
    subtitle: str
    times_ns: Mapping[str, int | None]
    memory: Mapping[str, int | None]

    @property
    def step_ns(self) -> int | None:
        """The step; None without times."""
        return sum(ns or 0 for ns in self.times_ns.values()) if self.times_ns else None


def steps_section(view: View) -> Section:
    """Return the steps of the lead rank."""
    pulse = view.lead.statistics
    lead: Words = "No step was timed." if not view.lead.windows else "Only the steps in windows were timed."
    if pulse is not None:
        times = (pulse.median_ns, pulse.p90_ns, pulse.max_ns)
        lead = phrase("Step time: median {ns}, p90 {ns}, max {ns} ({}, {} clock).", *times, pulse.basis, pulse.clock)
    parts: list[Item] = [
        Chart("steps"),
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
    names = dict.fromkeys(name for column in columns for name in column.memory)
    footer: list[Row] = [
        [Cell("step"), *(Cell(column.step_ns, "ns") for column in columns)],
        *([Cell(name), *(Cell(column.memory.get(name), "bytes") for column in columns)] for name in names),
    ]
    pulse = view.lead.statistics
    notes: list[Words] = [
        *_waits(view.ledger),
        "RSS, allocated and reserved bytes are those at the end of the steps",
        "times of recorded steps include the cost of recording" if len(columns) > 1 else "",
        "callbacks are part of the phase around them on the device's clock"
        if pulse is not None and pulse.breakdown_ns["callbacks"] is None
        else "",
        *left_out,
        f"device: {view.device_note}" if view.device_note else "",
    ]
    known = [note for note in notes if note]
    yield from filled(
        Table("by-phase", "Time by phase, and memory", footer=footer, notes=known, is_sortable=False),
        list(PHASE_PARTS.items()),
        Field("phase", "text", lambda row: row[1].label),
        *map(_times, columns),
    )


def _waits(ledger: TimeLedger | None) -> Iterator[Words]:
    """Yield the note that names the waits inside the phases, which are separate parts of the ledger."""
    parts = [] if ledger is None else [part for part in (Part.CORE_WAIT, Part.RANK_WAIT) if ledger.ns(part)]
    if ledger is not None and parts:
        waits = [phrase("{} ({ns})", part.label, ledger.ns(part)) for part in parts]
        yield phrase("phases include {}, which Mean step by part shows separately", joined(" and ", waits))


def _times(column: StepColumn) -> Field[tuple[str, Part]]:
    times, whole = column.times_ns, column.step_ns
    return Field(column.title, "ns", lambda row: Cell(times.get(row[0]), "ns", whole), column.subtitle, has_share=True)


def _columns(view: View) -> tuple[list[StepColumn], list[str]]:
    """Return the whole run, then recorded steps or, of many, windows; and a note that counts the others."""
    columns = []
    lead = view.lead
    if (pulse := lead.statistics) is not None:
        steps = f"mean of {format_count(pulse.used, 'step')}"
        columns.append(StepColumn("whole run", steps, pulse.breakdown_ns, _memory(lead.host, lead.device)))
    windows = [window for window in lead.windows if window.steps]
    if sum(len(window.steps) for window in windows) <= MAX_STEPS:
        for window in windows:
            name = f"window {window.index}" + ", truncated" * window.truncated
            columns += [_column(f"step {step.step}", name, [step]) for step in window.steps]
        return columns, []
    for window in windows[:MAX_WINDOWS]:
        steps = format_steps(tuple(step.step for step in window.steps)) + ", truncated" * window.truncated
        columns.append(_column(f"window {window.index}", steps, window.steps))
    return columns, rest(windows, MAX_WINDOWS, "more windows")


def _column(title: str, subtitle: str, steps: Sequence[StepReport]) -> StepColumn:
    """Return the mean times of recorded steps; memory is the last step's, of maxima the largest."""
    timed = [step.breakdown_ns for step in steps if step.breakdown_ns is not None]
    memory: dict[str, int | None] = {}
    for step in steps:
        for name, found in _memory(step.host, step.device).items():
            before = memory.get(name) if name in MAXIMA else None
            memory[name] = found if before is None or (found is not None and found > before) else before
    times = {phase: mean(breakdown[phase] for breakdown in timed) for phase in PHASE_PARTS} if timed else {}
    return StepColumn(title, subtitle, times, memory)


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
        f"Recorded step by part{view.rank_suffix}",
        Cell(step_ns, "ns"),
        bars(parts, round(step_ns), "ns"),
        notes=(f"{basis}; each instant counts for the innermost event, hooks of the profiler are callbacks",),
    )
    totals = sorted(event_totals(steps), key=lambda event: (-event.self_ns, event.action))
    notes: list[Words] = []
    if (found := view.pauses) is not None:
        times = (found.total_ns, found.max_ns)
        notes.append(phrase("GC pauses in recorded steps: count {}, total {ns}, max {ns}", found.count, *times))
    yield from filled(
        Table("events", "Events", notes=notes),
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
    notes = [*_ledger_notes(ledger), *compiled_note(view.run.lead.training)]
    yield from filled(
        Table("ledger", "Step time by owner", notes=notes, top=12),
        found,
        Field("part", "text", lambda line: line.part.label),
        Field("owner", "code", lambda line: line.module or line.name or ("" if line.module is None else "(the model)")),
        Field("operator", "code", lambda line: line.operator or ""),
        Field("time/step", "ns", lambda line: line.ns, bar=True),
        Field("share", "share", lambda line: line.ns / ledger.step_ns),
        Field("count/step", "count", lambda line: line.count or None, priority=1),
    )


def _ledger_notes(ledger: TimeLedger) -> Iterator[Words]:
    yield phrase("each instant has one owner; mean of {}: {ns}", ledger.basis, ledger.step_ns)
    if ledger.window_factor is not None and ledger.window_factor > SLOWER:
        yield f"recorded steps take {ledger.window_factor:.1f} times the median; this table is without that excess"
    if ledger.communication:
        times = [ledger.communicates("rank_wait"), ledger.communicates("collective")]
        own = ledger.step_ns - sum(times)
        yield phrase("own work {ns}, waiting for other ranks {ns}, transfer {ns}", own, *times)
    for stall in ledger.stalls[:MAX_STALLS]:
        waited = phrase(", with {ns} of waiting for a core", stall.core_wait_ns) if stall.core_wait_ns else ""
        yield phrase(
            "stall: step {index} took {ns}{}, mostly {}", stall.step, stall.duration_ns, waited, stall.owner.label
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
    rows: list[tuple[str | Cell, ...]] = [
        (name, *(Cell(value, f"{name}/s") for value in (known.mean, known.p10, known.p90)), Cell(per_step, "count"))
        for name, per_step, known in rates
        if known is not None
    ]
    notes: list[Words] = [found.basis]
    if found.flops is not None:
        unknown = Cell(None, "FLOP/s")
        rows.append(("operations", Cell(found.flops_per_s, "FLOP/s"), unknown, unknown, Cell(found.flops, "FLOP")))
        if found.utilization is None or found.peak_flops is None:
            notes.append("utilization: not available, the device's peak is not known")
        else:
            notes.append(phrase("utilization: {share} of the device's {FLOP/s}", found.utilization, found.peak_flops))
    if len(view.ranks) > 1:
        notes.append(f"rank {found.rank} only; other ranks: {MORE}")
    yield from filled(
        Table("rates", "Throughput", notes=notes, is_sortable=False),
        rows,
        Field("quantity", "text", lambda row: row[0]),
        Field("mean", "rate", lambda row: row[1]),
        Field("p10", "rate", lambda row: row[2], priority=1),
        Field("p90", "rate", lambda row: row[3], priority=1),
        Field("per step", "rate", lambda row: row[4], priority=2),
    )
