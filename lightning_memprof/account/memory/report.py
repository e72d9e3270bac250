"""Memory of a run by rank: by category at the peak, by module, by function, by allocation site, and by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.estimate import Estimate
from lightning_memprof.account.memory.activations import (
    SAVED_TENSORS,
    Activations,
    CheckpointedGroup,
    SavedSteps,
    StepEnd,
    checkpointing,
    read_saved_steps,
)
from lightning_memprof.account.memory.functions import FUNCTIONS, FunctionReport, function_memory
from lightning_memprof.account.memory.model import WindowAllocations
from lightning_memprof.account.steps.statistics import typical_steps
from lightning_memprof.artifacts.files import read_object
from lightning_memprof.artifacts.naming import ESTIMATE
from lightning_memprof.artifacts.series import PeakRow
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.model import Rank, Run
from lightning_memprof.read.run.problems import Note

CATEGORIES: Final = ("parameter", "gradient", "optimizer_state", "activation", "input", "temporary")
LAST: Final = ("temporary", "other")
# They track every operator of a step; if both recorded, the larger total is the peak.
TRACKERS: Final = ("module_memory", "fsdp_memory")
NO_OPTIMIZER_STEP: Final = "no optimizer step before step {step}"
MOMENT_SAVED: Final = "saved activations at the start of backward, other categories at the end of the step"


class CategoryPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The peak of the live bytes of one device, by category.

    Attributes:
        source: collector that measured it.
        moment: place in the step where it was measured.
        window: index of the window.
        step: training step.
        device: `cpu`, `cuda:0`, ...; None if unknown.
        total_bytes: sum of the known categories.
        categories: bytes by category; None where unknown.
        unknown: reason by category that is None.
        others: peaks of other devices.
    """

    source: str
    moment: str
    window: int
    step: int
    device: str | None
    total_bytes: int
    categories: Mapping[str, int | None]
    unknown: Mapping[str, str]
    others: tuple[CategoryPeak, ...] = ()


class StepMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded step: largest saved activations of its backwards, and live bytes at its end; None if unknown."""

    window: int
    step: int
    activation_bytes: int | None
    held_bytes: int | None


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank.

    Attributes:
        rank: global rank.
        peak: peak by category.
        activations: saved activations by module at the start of the backward that had the most.
        steps: recorded steps.
        checkpointing: estimates of activation checkpointing, largest saving first.
        functions: memory of named functions.
        allocations: allocations by window.
        reasons: reason by field that is empty or None.
        held: live bytes by category at the end of each window's last step, by window.
    """

    rank: int
    peak: CategoryPeak | None
    activations: Activations | None
    steps: tuple[StepMemory, ...]
    checkpointing: tuple[CheckpointedGroup, ...]
    functions: tuple[FunctionReport, ...]
    allocations: tuple[WindowAllocations, ...]
    reasons: Mapping[str, str]
    held: Mapping[int, Mapping[str, int]] = msgspec.field(default_factory=dict)


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a run by rank; ``lead`` is the lead rank's, ``notes`` name the files that were not read.

    ``estimate`` was made for the run.
    """

    lead: RankMemory
    ranks: tuple[RankMemory, ...]
    notes: tuple[Note, ...]
    estimate: Estimate | None = None


def memory_report(
    run: Run, allocations: Sequence[WindowAllocations] = (), *, max_bytes: int | None = None
) -> MemoryReport:
    """Return the memory of a run.

    Args:
        run: the run.
        allocations: allocations of its windows, of every rank; empty if they were not read.
        max_bytes: read only the lead rank, and only the last windows whose files are together at most this large; a
            note names the others. None reads everything. A model of 300 modules writes about 30 kB per recorded step,
            and reading runs at about 15 MB/s.
    """
    ranks: list[RankMemory] = []
    notes: list[Note] = []
    for rank in run.ranks:
        if max_bytes is not None and rank.rank != run.lead.rank:
            continue
        read = rank if max_bytes is None else _last_windows(rank, max_bytes)
        if len(read.windows) < len(rank.windows):
            message = (
                f"{len(rank.windows) - len(read.windows)} of {len(rank.windows)} windows are omitted from memory: "
                "reading them takes long; lightning-memprof show reads all"
            )
            notes.append(Note(rank.rank, "run", message))
        mine = tuple(allocation for allocation in allocations if allocation.rank == rank.rank)
        ranks.append(_rank_memory(run, read, mine))
    lead = next(rank for rank in ranks if rank.rank == run.lead.rank)
    try:
        estimate = read_object(run.directory / ESTIMATE, Estimate, "an estimate")
    except ArtifactError as error:
        estimate = None
        notes.append(Note(run.lead.rank, "run", str(error)))
    return MemoryReport(lead=lead, ranks=tuple(ranks), notes=tuple(notes), estimate=estimate)


def _last_windows(rank: Rank, max_bytes: int) -> Rank:
    """Return the rank with its last windows whose memory files are together at most ``max_bytes``; at least one."""
    total = 0
    for count, window in enumerate(reversed(rank.windows)):
        for collector in (*TRACKERS, SAVED_TENSORS, FUNCTIONS):
            path = window.series.get(collector)
            total += path.stat().st_size if path is not None and path.exists() else 0
        if count and total > max_bytes:
            return replace(rank, windows=rank.windows[-count:])
    return rank


def _forward_ns(rank: Rank) -> int | None:
    """Return the mean forward of the typical steps, None if it was not measured."""
    typical = typical_steps(rank)
    steps = typical.steps if typical is not None else ()
    known = [ns for _, _, breakdown in steps if (ns := breakdown["forward"]) is not None]
    return round(sum(known) / len(known)) if known else None


def _rank_memory(run: Run, rank: Rank, allocations: tuple[WindowAllocations, ...]) -> RankMemory:
    saved = read_saved_steps(rank)
    functions = function_memory(rank)
    largest = max(saved.backwards, key=lambda backward: backward.total_bytes, default=None)
    activations = _activations(saved, largest) if largest is not None else None
    peak = _tracked_peak(rank) or _saved_peak(saved, rank.facts.device)
    reasons = {}
    if peak is None:
        reasons["peak"] = _why(run, rank, (*TRACKERS, SAVED_TENSORS))
    if activations is None:
        note = next((end.note for end in saved.ends.values() if end.note), None)
        reasons["modules"] = note or _why(run, rank, (SAVED_TENSORS,))
    elif activations.attribution:
        reasons["modules"] = activations.attribution
    if not functions:
        reasons["functions"] = _why(run, rank, ("functions",))
    if not any(device.sites for allocation in allocations for device in allocation.devices):
        reasons["sites"] = _why_no_sites(run, rank, allocations)
    return RankMemory(
        rank=rank.rank,
        peak=peak,
        activations=activations,
        steps=_steps(saved),
        checkpointing=checkpointing(activations, saved.backwards, _forward_ns(rank)) if activations else (),
        functions=functions,
        allocations=allocations,
        reasons=reasons,
        held={window: _held(saved.ends[window, step]) for window, step in sorted(saved.ends)},
    )


def _why(run: Run, rank: Rank, collectors: Sequence[str]) -> str:
    """Return the reason why none of the collectors recorded anything."""
    for collector in collectors:
        for row in run.unavailable:
            if row.rank == rank.rank and row.collector == collector:
                return row.reason
        for error in run.errors:
            if error.rank == rank.rank and error.collector == collector:
                return f"{collector} failed: {error.message}"
    if any(collector in rank.facts.collectors for collector in collectors):
        for window in rank.windows:
            if not window.closed:
                return f"window {window.index} is not closed: the run is in it, or was killed in it"
    return "not recorded"


def _why_no_sites(run: Run, rank: Rank, allocations: Sequence[WindowAllocations]) -> str:
    problem = next((allocation.problem for allocation in allocations if allocation.problem), None)
    if problem is not None:
        return problem
    if not allocations and any(artifact.type == "trace" and artifact.rank == rank.rank for artifact in run.artifacts):
        return "the operator trace was not read: run lightning-memprof show"
    return _why(run, rank, ("operator_trace",))


def _tracked_peak(rank: Rank) -> CategoryPeak | None:
    """Return the largest peak of the trackers, on the model's device if it has one."""
    largest: dict[str | None, CategoryPeak] = {}
    for window in rank.windows:
        for source in TRACKERS:
            for row in window.read(PeakRow, source).rows:
                found = _category_peak(row, source, window.index) if row.kind == "peak" else None
                if found is not None:
                    had = largest.get(found.device, found)
                    largest[found.device] = max(had, found, key=lambda peak: peak.total_bytes)
    ordered = sorted(largest.values(), key=lambda peak: (peak.device != rank.facts.device, -peak.total_bytes))
    return replace(ordered[0], others=tuple(ordered[1:])) if ordered else None


def _category_peak(row: PeakRow, source: str, window: int) -> CategoryPeak | None:
    if row.total_bytes is None or row.categories is None or row.step is None:
        return None
    sizes = _known(row.categories, row.global_step)
    rest = row.total_bytes - sum(sizes.values())
    if rest:
        sizes["other"] = sizes.get("other", 0) + rest
    categories, unknown = _complete(sizes, row.step)
    return CategoryPeak(
        source=source,
        moment="peak of the step",
        window=window,
        step=row.step,
        device=row.device,
        total_bytes=row.total_bytes,
        categories=categories,
        unknown=unknown,
    )


def _known(sizes: Mapping[str, int | None], global_step: int | None) -> dict[str, int]:
    """Return the measured categories; most optimizers have no state before their first step."""
    known = {name: size for name, size in sizes.items() if size is not None}
    if global_step == 0 and not known.get("optimizer_state"):
        known.pop("optimizer_state", None)
    return known


def _complete(sizes: Mapping[str, int], step: int) -> tuple[dict[str, int | None], dict[str, str]]:
    """Return all categories in order, uncommon ones last, and the reason by category that is None."""
    names = [*CATEGORIES, *(name for name in sizes if name not in CATEGORIES)]
    names.sort(key=lambda name: LAST.index(name) + 1 if name in LAST else 0)
    unknown = {name: "not measured" for name in names if name not in sizes}
    # Both are measured at once.
    if "optimizer_state" in unknown and "parameter" in sizes:
        unknown["optimizer_state"] = NO_OPTIMIZER_STEP.format(step=step)
    return {name: sizes.get(name) for name in names}, unknown


def _saved_peak(saved: SavedSteps, device: str | None) -> CategoryPeak | None:
    """Return the largest sum of saved activations and other live bytes at the end of the same step.

    If no backward was recorded, it has only the live bytes.
    """
    sums: list[tuple[dict[str, int], Activations | StepEnd]] = [
        ({**_held(saved.end_of(backward)), "activation": backward.total_bytes}, backward)
        for backward in saved.backwards
    ]
    sums = sums or [(_held(end), end) for end in saved.ends.values()]
    if not sums:
        return None
    sizes, place = max(sums, key=lambda entry: sum(entry[0].values()))
    categories, unknown = _complete(sizes, place.step)
    if "temporary" in unknown:
        unknown["temporary"] = "only ModuleMemory and FSDPMemory measure it"
    if "activation" in unknown:
        unknown["activation"] = (place.note if isinstance(place, StepEnd) else None) or "no backward was recorded"
    moment = "end of the step" if "activation" in unknown else MOMENT_SAVED
    return CategoryPeak(
        source=SAVED_TENSORS,
        moment=moment,
        window=place.window,
        step=place.step,
        device=device,
        total_bytes=sum(sizes.values()),
        categories=categories,
        unknown=unknown,
    )


def _held(end: StepEnd | None) -> dict[str, int]:
    return _known(end.held, end.global_step) if end is not None else {}


def _activations(saved: SavedSteps, largest: Activations) -> Activations:
    """Return a backward with the parameters and gradients at the end of its step, the largest modules first."""
    end = saved.end_of(largest) or next(reversed(saved.ends.values()), None)
    held = end.modules if end is not None else {}
    modules = [
        replace(module, parameter_bytes=held[module.name][0], gradient_bytes=held[module.name][1])
        if module.name in held
        else module
        for module in largest.modules
    ]
    modules.sort(key=lambda module: (-module.inclusive_activation_bytes, module.name))
    parameters = {name: parameter_bytes for name, (parameter_bytes, _) in held.items()}
    return replace(largest, modules=tuple(modules), parameters=parameters)


def _steps(saved: SavedSteps) -> tuple[StepMemory, ...]:
    saved_bytes: dict[tuple[int, int], int] = defaultdict(int)
    for backward in saved.backwards:
        place = backward.window, backward.step
        saved_bytes[place] = max(saved_bytes[place], backward.total_bytes)
    return tuple(
        StepMemory(
            window=window,
            step=step,
            activation_bytes=saved_bytes.get((window, step)),
            held_bytes=sum(sizes.values()) if (sizes := _held(saved.ends.get((window, step)))) else None,
        )
        for window, step in sorted(saved_bytes.keys() | saved.ends.keys())
    )
