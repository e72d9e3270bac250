"""The figures of a training run that are the same in every run of the same program: bytes by category, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lightning_memprof.account.memory.report import TRACKERS, RankMemory, memory_report
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.events import HostEvents
from lightning_memprof.account.trace.table import EventTable, event_table
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.model import Rank, RecordedWindow, Run
from lightning_memprof.read.trace.columns import Kind, TraceColumns, read_columns
from lightning_memprof.read.trace.intervals import Column, nearest
from lightning_memprof.read.trace.kernel_names import plain_kernel

# Quantities by the category of the peak that they are; None is not a category.
BYTES: Final[Mapping[str, str | None]] = {
    "peak": None,
    "saved_activations": None,
    "parameters": "parameter",
    "gradients": "gradient",
    "optimizer_state": "optimizer_state",
    "activations": "activation",
    "inputs": "input",
    "temporaries": "temporary",
    "buffers": "buffer",
}
COUNTS: Final = ("operators", "kernels", "collectives", "syncs", "graph_breaks")
_MODEL: Final = "(the model)"
_ELSEWHERE: Final = "(outside modules)"
# torch's event around each operator that a dispatch mode sees: the memory tracker's, and that of ``Lines``.
_DISPATCHED: Final = "PythonDispatchMode"
READS: Final = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "equal", "masked_select", "nonzero", "unique_dim", "unique_consecutive", "_unique2",
    )
)  # fmt: skip
"""Operators that read values on the host, or whose result has a size that depends on values: they wait for a GPU."""
LINE: Final = "[pl][line]"
"""Prefix of a range around an operator; the rest is ``file.py:12``, ``LIGHTNING``, or empty where nothing is known."""
LIGHTNING: Final = "Lightning"
LIGHTNING_SYNCS: Final = "lightning_syncs"
"""Parts that are not counted: no change to the program removes them."""
_NO_STEP: Final = "no recorded step has ended"
_NO_DEVICE: Final = "the training ran without an accelerator"
_NO_TRACKER: Final = "the memory tracker did not record the step"
_OPTIMIZER: Final = "Optimizer.step#"
_ACTION: Final = "[pl][profile]"
_OWN: Final = tuple(f"{_ACTION}[Callback]{name}." for name in ("AttachedCallback", "MemProfilerCallback"))


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one training run: the largest of its ranks.

    Attributes:
        values: bytes and counts by quantity.
        parts: of a quantity by module, operator, kernel or category, largest first.
        missing: reason by quantity that was not measured.
        made_with: torch version and device.
    """

    values: Mapping[str, int]
    parts: Mapping[str, Mapping[str, int]] = msgspec.field(default_factory=dict)
    missing: Mapping[str, str] = msgspec.field(default_factory=dict)
    made_with: str = ""

    def with_count(self, quantity: str, parts: Counter[str]) -> Figures:
        """Return the same figures and another count."""
        values = {**self.values, quantity: parts.total()}
        return replace(self, values=values, parts={**self.parts, quantity: dict(parts.most_common())})


def figures_of(run: Run) -> Figures:
    """Return the figures of a run that was recorded with ``ModuleMemory``, ``SavedTensors`` and ``OperatorTrace``.

    They are those of the last recorded step that has ended: earlier ones create the optimizer's state, and compile.
    """
    values: dict[str, int] = {}
    parts: dict[str, Mapping[str, int]] = {}
    missing: dict[str, str] = {}

    def add(quantity: str, value: int, of: Counter[str]) -> None:
        if value > values.get(quantity, -1):
            values[quantity], parts[quantity] = value, dict(of.most_common())

    last = replace(run, ranks=tuple(replace(rank, windows=_ended(rank)) for rank in run.ranks))
    if not any(rank.windows for rank in last.ranks):
        return Figures(values={}, missing=dict.fromkeys((*BYTES, *COUNTS), _NO_STEP))
    for memory in memory_report(last.in_full).ranks:
        for quantity, size, of in _sizes(memory, missing):
            add(quantity, size, of)
    for columns in _traces(last, missing):
        for quantity, of in _counts(columns):
            add(quantity, of.total(), of)
    values.pop(LIGHTNING_SYNCS, None)
    if "collectives" in values:
        missing |= {"kernels": _NO_DEVICE, "operators": _NO_TRACKER}
    facts = run.lead.facts
    return Figures(
        values=values,
        parts={quantity: of for quantity, of in parts.items() if of},
        missing={quantity: reason for quantity, reason in missing.items() if quantity not in values},
        made_with=f"torch {facts.environment.get('torch', '?')} on {(facts.device or 'cpu').partition(':')[0]}",
    )


def _ended(rank: Rank) -> tuple[RecordedWindow, ...]:
    """Return the last window whose steps have ended."""
    raised = rank.pulse[-1]["step"] if rank.status == "exception" and rank.pulse else None
    windows = [window for window in rank.windows if window.closed and not window.truncated]
    return tuple(window for window in windows if raised not in window.steps)[-1:]


def _sizes(memory: RankMemory, missing: dict[str, str]) -> Iterator[tuple[str, int, Counter[str]]]:
    peak, activations = memory.peak, memory.activations
    if peak is None or peak.source not in TRACKERS:
        reason = memory.reasons.get("peak", "the memory tracker recorded no step")
        missing.update((quantity, reason) for quantity in BYTES if quantity != "saved_activations")
    else:
        words = {category: quantity for quantity, category in BYTES.items()}
        by_module = _own(activations.parameters) if activations is not None else Counter()
        sizes = Counter({words.get(name, name): size for name, size in peak.categories.items() if size})
        yield "peak", peak.total_bytes, sizes
        for quantity in (quantity for quantity, category in BYTES.items() if category is not None):
            yield quantity, sizes[quantity], by_module if quantity == "parameters" else Counter()
    if activations is None:
        missing["saved_activations"] = memory.reasons.get("modules", "no backward was recorded")
    else:
        own = Counter({module.name or _MODEL: module.own_activation_bytes for module in activations.modules})
        own[_ELSEWHERE] = activations.unattributed_bytes
        yield "saved_activations", activations.total_bytes, +own


def _own(inclusive: Mapping[str, int]) -> Counter[str]:
    """Return the bytes of each module without its submodules."""
    own = Counter({name or _MODEL: size for name, size in inclusive.items()})
    for name, size in inclusive.items():
        if name:
            parent = name.rpartition(".")[0]
            own[parent or _MODEL] -= size
    return +own


def _traces(run: Run, missing: dict[str, str]) -> Iterator[TraceColumns]:
    """Yield the trace of each rank's window."""
    windows = {(rank.rank, window.index) for rank in run.ranks for window in rank.windows}
    reason = next((row.reason for row in run.unavailable if row.collector == "operator_trace"), "no trace was recorded")
    for artifact in run.artifacts:
        if artifact.type == "trace" and (artifact.rank, artifact.window) in windows:
            try:
                yield read_columns(artifact.file)
            except ArtifactError as error:
                reason = str(error)
    missing.update({quantity: reason for quantity in COUNTS if quantity not in missing})


def _counts(columns: TraceColumns) -> Iterator[tuple[str, Counter[str]]]:
    """Yield the counts of one trace by quantity."""
    table = event_table(columns)
    device, events = table.device, table.host
    operators, syncs, lightning = Counter[str](), Counter[str](), Counter[str]()
    by_lightning = columns.named(f"{LINE}{LIGHTNING}".__eq__)
    lanes = np.unique(columns.lanes[events.on_host]).tolist()
    for lane in sorted(lanes, key=lambda lane: lane != events.training):
        rows, parents, _ = events.thread(lane)
        module = events.module[rows]
        names, dispatched, waits, lines = _of_thread(table, rows, parents)
        operators += _labels(columns, events, names[dispatched], module[dispatched])
        for counter, chosen in ((syncs, waits & ~by_lightning[lines]), (lightning, waits & by_lightning[lines])):
            counter.update(_labels(columns, events, names[chosen], module[chosen], lines[chosen]))
    if operators:
        yield "operators", operators
    yield "syncs", syncs
    yield LIGHTNING_SYNCS, lightning
    yield "collectives", Counter(call.name for call in table.collectives)
    if len(device.rows):
        launched = columns.names[columns.rows(Kind.KERNEL)].tolist()
        yield "kernels", Counter(plain_kernel(columns.name_of[name]) for name in launched)


def _of_thread(
    table: EventTable, rows: Column, parents: Column
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.bool_], NDArray[np.int32]]:
    """Return the names of a thread's events, which are dispatched operators, which wait for the device, and the lines.

    On a device these are calls of the runtime in a step, with the name of the operator around them: after the step, the
    profiler waits. On a CPU they are operators that would wait on a GPU, without an optimizer's: its step counts are on
    the host, also on a GPU.
    """
    columns = table.columns
    names, kinds = columns.names[rows], columns.kinds[rows]
    is_operator, inside = kinds == Kind.OPERATOR, parents >= 0
    foreign = nearest(parents, columns.named(lambda name: name.startswith(_OWN))[names]) < 0
    is_line = columns.named(lambda name: name.startswith(LINE))[names]
    dispatches = columns.named(_DISPATCHED.__eq__)[names]
    tracks = dispatches.copy()
    tracks[parents[is_line]] = False
    dispatched = foreign & inside & tracks[parents] & ~is_line & ~dispatches
    line_of = nearest(parents, is_line)
    lines = np.where(line_of >= 0, names[line_of], -1).astype(np.int32)
    if len(table.device.rows):
        operator = nearest(parents, is_operator)
        waits = (kinds == Kind.RUNTIME) & (table.part[rows] == Part.IDLE_SYNCHRONIZATION.number)
        starts = columns.starts[rows]
        waits &= np.any([(step.start <= starts) & (starts < step.end) for step in table.steps], axis=0)
        names = np.where(waits & (operator >= 0), names[operator], names)
    else:
        reads = is_operator & columns.named(READS.__contains__)[names]
        around = nearest(parents, columns.named(lambda name: name.startswith((_OPTIMIZER, _ACTION)))[names])
        updates = (around >= 0) & columns.named(lambda name: name.startswith(_OPTIMIZER))[names[around]]
        waits = reads & ~updates & ~(inside & (nearest(parents, reads)[parents] >= 0))
        # The range is inside the operator that is counted.
        reading = nearest(parents, waits)[is_line]
        lines[reading[reading >= 0]] = names[is_line][reading >= 0]
    return names, dispatched, waits & foreign, lines


def _labels(
    columns: TraceColumns,
    events: HostEvents,
    names: NDArray[np.int32],
    owners: NDArray[np.int32],
    lines: NDArray[np.int32] | None = None,
) -> Counter[str]:
    """Return the count of each event, named ``train.py:12: aten::item in net.4``; no line if unknown."""
    numbers = [-1] * len(names) if lines is None else lines.tolist()
    found: Counter[str] = Counter()
    for (name, owner, number), count in Counter(zip(names.tolist(), owners.tolist(), numbers, strict=True)).items():
        path = events.path(owner)
        line = columns.name_of[number].removeprefix(LINE) if number >= 0 else ""
        found[f"{line and f'{line}: '}{columns.name_of[name]}{f' in {path}' if path else ''}"] += count
    return found
