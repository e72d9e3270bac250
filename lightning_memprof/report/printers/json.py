"""JSON: the results of the analysis in base units (bytes, nanoseconds), null where not available; and documents."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import msgspec

from lightning_memprof.account.ledger.holders import who_holds
from lightning_memprof.account.ledger.memory import ByteLedger, snapshot_bytes
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.memory.activations import Activations
from lightning_memprof.account.memory.functions import FunctionReport
from lightning_memprof.account.memory.model import DeviceAllocations
from lightning_memprof.account.memory.report import CATEGORIES, MemoryReport, RankMemory
from lightning_memprof.account.oom.autopsy import Autopsy
from lightning_memprof.account.ranks.report import RankReport
from lightning_memprof.account.snapshot.report import DeviceReport, SnapshotReport
from lightning_memprof.account.steps.events import ACTION_PARTS, Event, StepEvents, event_totals
from lightning_memprof.account.steps.statistics import mean
from lightning_memprof.account.steps.workers import workers
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.artifacts.manifest import SCHEMA_VERSION
from lightning_memprof.artifacts.series import PHASES, HangRow, HolderRow, RegionRow, columns_of
from lightning_memprof.compare.batches import Batches
from lightning_memprof.compare.comparison import Outcome
from lightning_memprof.compare.model import Comparison, Difference, Measure, Side
from lightning_memprof.compare.trial import Trial
from lightning_memprof.judge import Finding
from lightning_memprof.judge.out_of_memory import remedies_for
from lightning_memprof.read.run.locate import shown_place
from lightning_memprof.report.document import Cell, Command, Item, Phrase, Words
from lightning_memprof.report.files_view import FilesView
from lightning_memprof.report.printers.values import words_text
from lightning_memprof.report.sections.memory import peak_allocations
from lightning_memprof.report.view import RankView, View

if TYPE_CHECKING:
    from lightning_memprof.read.run.model import Rank

# A window has thousands of allocation sites, nearly all of a few bytes; a trace thousands of kernels, a snapshot
# thousands of stacks: the rest is one sum.
MAX_SITES: Final = 200
MAX_ROWS: Final = 100
MAX_LEDGER_LINES: Final = 30
# A step has some sixty events: the first steps have them in order, all have their sums.
MAX_LISTED_STEPS: Final = 20
MAX_ACTIONS: Final = 500
RUN_FACTS: Final = (
    "stage", "host", "device", "accelerator", "strategy", "world_size", "schedule", "collectors", "environment",
)  # fmt: skip
TRAINING_FACTS: Final = (
    "model", "parameters", "parameter_bytes", "precision", "num_batches", "max_steps", "max_epochs",
    "accumulate_grad_batches", "optimizers", "dataloaders",
)  # fmt: skip
VERDICT: Final = ("title", "why", "next", "rule", "severity")
SNAPSHOT_SIZES: Final = ("reserved_bytes", "allocated_bytes", "requested_bytes", "inactive_bytes", "pending_bytes")
FRAGMENTATION: Final = (
    "reserved_bytes", "allocated_bytes", "pending_bytes", "inactive_split_bytes", "free_segment_bytes",
    "rounding_bytes", "largest_free_block",
)  # fmt: skip
FUNCTION_CHANGES: Final = (
    "rss_bytes", "vms_bytes", "allocated_bytes", "reserved_bytes", "forward_rss_bytes", "saved_bytes",
)  # fmt: skip


def to_json(view: View | FilesView) -> dict[str, Any]:
    """Return a view as values that any JSON encoder takes."""
    found: dict[str, Any] = encode(_files(view) if isinstance(view, FilesView) else _run(view))
    return found


def comparison_to_json(comparison: Comparison, verdict: Words, outcomes: Sequence[Outcome] = ()) -> dict[str, Any]:
    """Return a comparison: bytes, nanoseconds, shares of 1."""
    return {
        "verdict": words_text(verdict),
        "is_same": comparison.is_same,
        **encode(comparison),
        "limits": encode(list(outcomes)),
    }


# Of thousands of values nearly all are these.
_AS_IS: Final = frozenset({str, int, bool, type(None)})


def encode(value: Any) -> Any:
    """Return a value as JSON has it: a struct in its shape; NaN, which a manifest may hold, is null."""
    if type(value) in _AS_IS:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    plain = _plain(value)
    if isinstance(plain, Mapping):
        return {str(key): encode(item) for key, item in plain.items()}
    return [encode(item) for item in plain] if isinstance(plain, list | tuple | frozenset) else plain


def _plain(value: Any) -> Any:
    """Return an object's fields, or its text; other values unchanged."""
    match value:
        case Phrase():
            return words_text(value)
        case Command():
            return str(value)
        case msgspec.Struct():
            shape = SHAPES.get(type(value), _WHOLE)
            fields = {name: getattr(value, name) for name in value.__struct_fields__ if name not in shape.omit}
            fields |= {name: fields[name][:most] for name, most in shape.first.items()}
            return fields if shape.more is None else fields | shape.more(value)
        case IntEnum():
            return value.name.lower()
        case Path():
            return os.fspath(value)
    return value._asdict() if hasattr(value, "_asdict") else value


def _fields(value: Any, *names: str) -> dict[str, Any]:
    """Return some fields or properties of an object, all null without one."""
    return {name: None if value is None else getattr(value, name) for name in names}


def _files(view: FilesView) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": _fields(view.verdict, *VERDICT),
        "findings": view.findings,
        "traces": view.traces,
        "snapshots": view.snapshots,
        "files": [{"file": file, "size_bytes": size} for file, size in view.sizes.items()],
        "problems": view.problems,
        "left_out": view.left_out,
        "commands": view.commands,
    }


def _run(view: View) -> dict[str, Any]:
    """Return a run; ``windows`` are those of the lead rank, ``ranks`` has every rank's own."""
    return {
        "schema_version": view.run.lead.facts.schema_version or SCHEMA_VERSION,
        "run": _facts(view),
        "verdict": _fields(view.verdict, *VERDICT),
        "findings": view.findings,
        "pulse": _pulse(view.lead),
        "ledger": _ledgers(view),
        "ranks": [{**encode(rank), "pulse": _pulse(rank)} for rank in view.ranks],
        "windows": view.lead.windows,
        "artifacts": [{**encode(artifact), "file": _where(view, artifact.file)} for artifact in view.run.artifacts],
        "errors": view.run.errors,
        "unavailable": view.run.unavailable,
        "overhead": view.lead.overhead,
        "memory": _memory(view.memory),
        "across_ranks": view.across,
        "events": _events(view),
        "throughput": view.throughput,
        "system": view.system,
        "oom": view.ooms,
        "holders": _of_ranks(view, lambda rank: map(columns_of, who_holds(rank.read(HolderRow).rows))),
        "workers": _of_ranks(view, lambda rank: map(encode, workers(rank))),
        "hangs": _of_ranks(view, lambda rank: map(columns_of, rank.read(HangRow).rows)),
        "traces": [{**encode(trace), "file": _where(view, trace.file)} for trace in view.traces],
        "snapshots": [{**encode(snapshot), "file": _where(view, snapshot.file)} for snapshot in view.snapshots],
        "named": [{"rank": rank, **encode(row)} for rank, row in view.named],
        "notes": view.notes,
        "problems": view.problems,
        "commands": view.commands,
    }


def _of_ranks(view: View, rows_of: Callable[[Rank], Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return what each rank that is read in full has, with its number."""
    return [{"rank": rank.rank, **row} for rank in view.run.ranks if rank.in_full for row in rows_of(rank)]


def _where(view: View, path: Path) -> str:
    run = view.run
    return str(path) if run.url is None else shown_place(path, run.root, run.url)


def _facts(view: View) -> dict[str, Any]:
    lead = view.run.lead
    facts, training = lead.facts.fields, lead.training.fields if lead.training else {}
    return {
        "directory": _where(view, view.run.directory),
        "root": _where(view, view.run.root),
        "url": view.run.url,
        "status": view.status,
        "exception": view.exception,
        "started_ns": facts.get("time_ns"),
        "steps": view.lead.steps,
        "lead_rank": lead.rank,
        **{key: facts.get(key) for key in RUN_FACTS},
        **{key: training.get(key) for key in TRAINING_FACTS},
        "other_runs": view.others,
    }


def _pulse(rank: RankView) -> dict[str, Any]:
    """Return the pulse in one shape whether the run has one or not: without it every figure is null."""
    found = rank.statistics
    return {
        **_fields(found, "basis", "clock"),
        "steps": found.steps if found else 0,
        "used_steps": found.used if found else 0,
        "duration_ns": {name: getattr(found, f"{name}_ns", None) for name in ("median", "p90", "max", "mean")},
        "breakdown_ns": found.breakdown_ns if found else dict.fromkeys(PHASES),
    }


def _memory(report: MemoryReport) -> dict[str, Any]:
    """Return the lead rank's memory, and under ``ranks`` every rank's peak, functions and step curve."""
    return {
        **_rank_memory(report.lead),
        **_lead_memory(report.lead),
        **({} if report.estimate is None else {"estimated": report.estimate}),
        "ranks": [_rank_memory(rank) for rank in report.ranks],
    }


def _rank_memory(memory: RankMemory) -> dict[str, Any]:
    peak, saved = memory.peak, memory.activations
    return {
        "rank": memory.rank,
        **_fields(peak, "source", "moment", "total_bytes"),
        "peak_bytes": peak.categories if peak else dict.fromkeys(CATEGORIES),
        "unattributed_bytes": saved.unattributed_bytes if saved else None,
        "functions": {function.name: function for function in memory.functions},
        "curve": memory.steps,
        "reasons": memory.reasons,
    }


def _lead_memory(memory: RankMemory) -> dict[str, Any]:
    window, device = peak_allocations(memory) or (None, None)
    sites = device.sites if device is not None else ()
    peak, saved = memory.peak, memory.activations
    rest = sites[MAX_SITES:]
    where = {"window": window, "device": device.device if device is not None else None}
    return {
        **_fields(peak, "window", "step", "device"),
        "unknown": peak.unknown if peak else {},
        "other_devices": [
            {**_fields(other, "device", "total_bytes"), "peak_bytes": other.categories}
            for other in (peak.others if peak else ())
        ],
        "activations": saved,
        "modules": saved.modules if saved else [],
        "allocations": [
            {"window": allocations.window, **encode(found)}
            for allocations in memory.allocations
            for found in allocations.devices
        ],
        "sites": [{**encode(site), **where} for site in sites[:MAX_SITES]],
        "more_sites": {"count": len(rest), "bytes": sum(site.bytes for site in rest)},
        "checkpointing": memory.checkpointing,
    }


def _function(function: FunctionReport) -> dict[str, Any]:
    changes = {name: found for name in FUNCTION_CHANGES if (found := function.changes(name))}
    return {
        "calls": len(function.calls),
        "unfinished": sum(call.end is None for call in function.calls),
        "raised": sum(call.raised is not None for call in function.calls),
        "changes": {name: {"mean": mean(found), "max": max(found)} for name, found in changes.items()},
        "each": function.calls,
    }


def _events(view: View) -> dict[str, Any]:
    """Return the recorded steps of the lead rank.

    ``steps`` has every recorded step with its parts, which sum to it, and its callbacks by key, and of the first ones
    the ``events`` in order; ``actions`` the sums over all steps, the longest first; ``gc_pauses`` the GC pauses.
    """
    steps = view.events
    actions = event_totals(steps)
    return {
        "rank": view.lead.rank,
        "mean_ns": mean(step.duration_ns for step in steps),
        "parts_ns": {part: mean(step.parts_ns[part] for step in steps) for part in ACTION_PARTS},
        "callbacks_ns": _callbacks(steps),
        "steps": [
            {**encode(step), "events": step.events if place < MAX_LISTED_STEPS else None}
            for place, step in enumerate(steps)
        ],
        "actions": actions[:MAX_ACTIONS],
        "more_actions": len(actions[MAX_ACTIONS:]),
        "gc_pauses": view.pauses,
    }


def _callbacks(steps: Sequence[StepEvents]) -> Mapping[str, int]:
    sums: Counter[str] = Counter()
    for step in steps:
        sums.update(step.callbacks_ns)
    means = {name: round(ns / len(steps)) for name, ns in sums.items()}
    return dict(sorted(means.items(), key=lambda item: (-item[1], item[0])))


def _ledgers(view: View) -> dict[str, Any] | None:
    """Return the ledger of time, and under ``memory`` that of bytes."""
    time, memory = encode(view.ledger), encode(view.byte_ledger)
    return None if time is None and memory is None else {**(time or {}), "memory": memory}


def _time_sums(ledger: TimeLedger) -> dict[str, Any]:
    """Return the time of each part, and the sum of the lines that are not listed."""
    others = ledger.lines[MAX_LEDGER_LINES:]
    parts = dict.fromkeys(line.part for line in ledger.lines)
    return {
        "parts_ns": {part: ledger.ns(part) for part in parts},
        "other_lines": len(others),
        "other_ns": total(others),
    }


def _byte_sums(ledger: ByteLedger) -> dict[str, Any]:
    """Return the bytes of each category, and the sum of the lines that are not listed."""
    others = ledger.lines[MAX_LEDGER_LINES:]
    sums = {"other_lines": len(others), "other_bytes": sum(line.bytes for line in others)}
    return {"categories_bytes": ledger.categories, **sums}


def _device(device: DeviceReport) -> dict[str, Any]:
    """Return a device; of its stacks the 100 largest, and the sum of the others."""
    others = device.holders_at_peak[MAX_ROWS:]
    listed = ("holders_at_peak", "lines_at_peak", "functions_at_peak")
    figures = ("peak_requested_bytes", "peak_reserved_bytes", "peak_time_us", "events")
    return {
        **_fields(device.snapshot, "device", *SNAPSHOT_SIZES, "is_expandable"),
        **_fields(device, *figures, "start_us", "end_us"),
        "start_bytes": device.live_at(-1).requested_bytes,
        "segments": len(device.snapshot.segments),
        "fragmentation": _fields(device.snapshot, *FRAGMENTATION),
        **{name: getattr(device, name)[:MAX_ROWS] for name in listed},
        "ledger": snapshot_bytes(device),
        "other_holders_bytes": sum(holder.bytes for holder in others),
        "other_holders": len(others),
    }


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The form of a type in JSON, where that is not all of its fields.

    Args:
        omit: fields that JSON has in another form, or that only rules and pages need.
        first: how many rows it has of a long list, by the field's name.
        more: returns further fields.
    """

    omit: frozenset[str] = frozenset()
    first: Mapping[str, int] = {}
    more: Callable[[Any], dict[str, Any]] | None = None


_WHOLE: Final = Shape()
SHAPES: Final[Mapping[type, Shape]] = {
    Activations: Shape(omit=frozenset({"modules", "inputs", "parameters"})),
    Autopsy: Shape(
        omit=frozenset({"blocks", "is_expandable", "training", "world_size"}),
        more=lambda event: {"remedies": [remedy.fields for remedy in remedies_for(event)]},
    ),
    Batches: Shape(more=lambda found: {"best": None if found.best is None else found.best.samples}),
    ByteLedger: Shape(omit=frozenset({"workspace_bytes"}), first={"lines": MAX_LEDGER_LINES}, more=_byte_sums),
    Cell: Shape(omit=frozenset({"whole", "style", "id", "command", "sort"})),
    DeviceAllocations: Shape(omit=frozenset({"sites"})),
    DeviceReport: Shape(omit=frozenset(DeviceReport.__struct_fields__), more=_device),
    Difference: Shape(more=lambda row: _fields(row, "change", "relative", "is_above_noise", "has_too_few_steps")),
    Event: Shape(omit=frozenset({"phase", "callback"})),
    Finding: Shape(omit=frozenset({"weight"}), more=lambda finding: {"remedies": finding.steps}),
    FunctionReport: Shape(omit=frozenset(FunctionReport.__struct_fields__), more=_function),
    Measure: Shape(omit=frozenset({"steps"})),
    Outcome: Shape(more=lambda outcome: {"limit": outcome.limit.text}),
    RankReport: Shape(omit=frozenset({"problems", "lead_waits_ns"})),
    RankView: Shape(omit=frozenset({"statistics"})),
    RegionRow: Shape(omit=frozenset({"recorded"})),
    Side: Shape(omit=frozenset({"measures", "named", "spreads", "sentences"})),
    SnapshotReport: Shape(omit=frozenset({"settings"})),
    StepEvents: Shape(omit=frozenset({"events"})),
    TimeLedger: Shape(
        omit=frozenset({"work", "double_backward_ns", "recomputed_ns", "forwards", "exposed", "passes"}),
        first={"lines": MAX_LEDGER_LINES, "communication": MAX_LEDGER_LINES},
        more=_time_sums,
    ),
    TimeLine: Shape(omit=frozenset({"inside"})),
    TraceReport: Shape(
        omit=frozenset({
            "recorded_with", "arrivals", "is_steady", "ahead_window", "ahead_steps_ns", "is_sample", "device_use",
            "devices_busy_ns",
        }),
        first=dict.fromkeys(
            ("kernels", "collectives", "copies", "synchronizations", "runtime_calls", "profiler_overhead", "operators"),
            MAX_ROWS,
        ),
    ),
    Trial: Shape(more=lambda trial: {"best": None if trial.best is None else trial.best.remedy}),
    **dict.fromkeys(get_args(Item), Shape(more=lambda part: {"part": part.part})),
}  # fmt: skip
