"""Where the memory of a run went: by category at the peak, by module, by function, by allocation, over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.memory.activations import (
    SAVED_TENSORS,
    Backward,
    CheckpointedGroup,
    SavedSteps,
    StepEnd,
    checkpointing,
    read_saved_steps,
)
from lightning_memprof.analysis.memory.functions import FUNCTIONS, FunctionReport, function_memory
from lightning_memprof.analysis.run.problems import Note, Problem
from lightning_memprof.artifacts.series import PeakRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_memprof.analysis.memory.model import WindowAllocations
    from lightning_memprof.analysis.run.model import Rank, Run

__all__ = [
    "CATEGORIES",
    "Activations",
    "CategoryPeak",
    "MemoryReport",
    "ModuleBytes",
    "RankMemory",
    "StepMemory",
    "memory_report",
]

CATEGORIES: Final = ("parameter", "gradient", "optimizer_state", "activation", "input", "temporary")
LAST: Final = ("temporary", "other")
# They track every operator of a step; where both did, the larger total is the peak.
TRACKERS: Final = ("module_memory", "fsdp_memory")
NOT_SEEN: Final = "only ModuleMemory and FSDPMemory see it"
NOT_COUNTED: Final = "not counted"
MOMENT_TRACKED: Final = "the peak of the step"
MOMENT_HELD: Final = "the end of the step"
NO_BACKWARD: Final = "no backward was seen"
MOMENT_SAVED: Final = "activation at the start of backward, the rest at the end of the step"


@dataclass(frozen=True)
class CategoryPeak:
    """The most bytes that were live at once on one device, by category.

    The categories that are known sum to ``total_bytes``; those of which nothing is known are None, and ``unknown`` says
    why. ``source`` is the collector, ``moment`` when its figures were read. ``others`` are the peaks of other devices.
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


@dataclass(frozen=True)
class ModuleBytes:
    """One module: what its forwards kept for backward, alone and with sub-modules; parameters and gradients with them.

    ``forward_ns`` is the time in its forwards of this step, with sub-modules. None where it was not recorded.
    """

    name: str
    own_activation_bytes: int
    inclusive_activation_bytes: int
    parameter_bytes: int | None
    gradient_bytes: int | None
    calls: int
    forward_ns: int | None = None


@dataclass(frozen=True)
class Activations:
    """What autograd kept at the start of one backward, the largest of the recorded ones.

    The own bytes of ``modules`` (largest inclusive ones first) and ``unattributed_bytes`` sum to ``total_bytes``.
    ``parameters`` has the bytes of every module's parameters, also of those that were not called. ``uncounted`` values
    are kept beside these bytes, in a form whose size is not known.
    """

    window: int
    step: int
    total_bytes: int
    unattributed_bytes: int
    dtypes: Mapping[str, int]
    attribution: str | None
    modules: tuple[ModuleBytes, ...]
    parameters: Mapping[str, int]
    uncounted: int = 0


@dataclass(frozen=True)
class StepMemory:
    """One recorded step: the most that backward found kept, and what was held beside it at the step's end."""

    window: int
    step: int
    activation_bytes: int | None
    held_bytes: int | None


@dataclass(frozen=True)
class RankMemory:
    """Where the memory of one rank went. ``reasons`` says by field why it is empty or None.

    ``held`` are the bytes by category that stayed from step to step, at the end of each window's last step.
    """

    rank: int
    peak: CategoryPeak | None
    activations: Activations | None
    steps: tuple[StepMemory, ...]
    checkpointing: tuple[CheckpointedGroup, ...]
    functions: tuple[FunctionReport, ...]
    allocations: tuple[WindowAllocations, ...]
    reasons: Mapping[str, str]
    held: Mapping[int, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryReport:
    """Where the memory of a run went, by rank; ``lead`` is the lead rank's.

    ``problems`` are files that are damaged, ``notes`` what was not read.
    """

    lead: RankMemory
    ranks: tuple[RankMemory, ...]
    problems: tuple[Problem, ...]
    notes: tuple[Note, ...]


def memory_report(
    run: Run, allocations: Sequence[WindowAllocations] = (), *, max_bytes: int | None = None
) -> MemoryReport:
    """Return where the memory of a run went.

    Args:
        run: the run.
        allocations: what its operator traces and allocator rings say, of every rank; empty where they were not read.
        max_bytes: read the lead rank only, and of its windows the last ones whose files are not larger together; a note
            says what was left out. None reads all. A model of 300 modules has about 30 kB a recorded step, which are
            read at about 15 MB/s.

    """
    problems: list[Problem] = []
    ranks: list[RankMemory] = []
    notes: list[Note] = []
    for rank in run.ranks:
        if max_bytes is not None and rank.rank != run.lead.rank:
            continue
        read = rank if max_bytes is None else _last_windows(rank, max_bytes)
        if len(read.windows) < len(rank.windows):
            left_out = f"{len(rank.windows) - len(read.windows)} of {len(rank.windows)} windows"
            message = (
                f"{left_out} are not in the memory shown here, it would take long: lightning-memprof show has them"
            )
            notes.append(Note(rank.rank, "run", message))
        memory, damage = _rank_memory(
            run, read, tuple(allocation for allocation in allocations if allocation.rank == rank.rank)
        )
        ranks.append(memory)
        problems += damage
    lead = next(rank for rank in ranks if rank.rank == run.lead.rank)
    return MemoryReport(lead=lead, ranks=tuple(ranks), problems=tuple(problems), notes=tuple(notes))


def _last_windows(rank: Rank, max_bytes: int) -> Rank:
    """Return the rank with the last of its windows, at least one, whose files of memory are not larger together."""
    total = 0
    for count, window in enumerate(reversed(rank.windows)):
        for collector in (*TRACKERS, SAVED_TENSORS, FUNCTIONS):
            path = window.series.get(collector)
            total += path.stat().st_size if path is not None and path.exists() else 0
        if count and total > max_bytes:
            return replace(rank, windows=rank.windows[-count:])
    return rank


def _rank_memory(run: Run, rank: Rank, allocations: tuple[WindowAllocations, ...]) -> tuple[RankMemory, list[Problem]]:
    saved = read_saved_steps(rank)
    tracked, damage = _tracked_peak(rank)
    functions, more_damage = function_memory(rank)
    largest = max(saved.backwards, key=lambda backward: backward.activation_bytes, default=None)
    activations = _activations(saved, largest) if largest is not None else None
    peak = tracked or _saved_peak(saved, rank.facts.device)
    trade = checkpointing(largest, saved.backwards, activations.parameters) if largest and activations else ()
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
    memory = RankMemory(
        rank=rank.rank,
        peak=peak,
        activations=activations,
        steps=_steps(saved),
        checkpointing=trade,
        functions=functions,
        allocations=allocations,
        reasons=reasons,
        held={window: _held(saved.ends[window, step]) for window, step in sorted(saved.ends)},
    )
    return memory, [*saved.problems, *damage, *more_damage]


def _why(run: Run, rank: Rank, collectors: Sequence[str]) -> str:
    """Return why none of some collectors recorded anything."""
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
                return f"window {window.index} is not closed: the run is still in it, or was killed there"
    return "not recorded"


def _why_no_sites(run: Run, rank: Rank, allocations: Sequence[WindowAllocations]) -> str:
    problem = next((allocation.problem for allocation in allocations if allocation.problem), None)
    if problem is not None:
        return problem
    if not allocations and any(artifact.type == "trace" and artifact.rank == rank.rank for artifact in run.artifacts):
        return "the operator trace was not read: lightning-memprof show does"
    return _why(run, rank, ("operator_trace",))


def _tracked_peak(rank: Rank) -> tuple[CategoryPeak | None, list[Problem]]:
    """Return the largest peak that a tracker saw, the model's device first, and the damage of its files."""
    problems: list[Problem] = []
    largest: dict[str | None, CategoryPeak] = {}
    for window in rank.windows:
        for source in TRACKERS:
            file = window.read(PeakRow, source)
            problems += file.problems
            for row in file.rows:
                found = _category_peak(row, source, window.index) if row.kind == "peak" else None
                if found is not None:
                    had = largest.get(found.device, found)
                    largest[found.device] = max(had, found, key=lambda peak: peak.total_bytes)
    return _on_first_device(largest.values(), rank.facts.device), problems


def _category_peak(row: PeakRow, source: str, window: int) -> CategoryPeak | None:
    if row.total_bytes is None or row.categories is None or row.step is None:
        return None
    sizes = dict(row.categories)
    rest = row.total_bytes - sum(sizes.values())
    if rest:
        sizes["other"] = sizes.get("other", 0) + rest
    categories, unknown = _complete(sizes, NOT_COUNTED)
    return CategoryPeak(
        source=source,
        moment=MOMENT_TRACKED,
        window=window,
        step=row.step,
        device=row.device,
        total_bytes=row.total_bytes,
        categories=categories,
        unknown=unknown,
    )


def _on_first_device(peaks: Iterable[CategoryPeak], device: str | None) -> CategoryPeak | None:
    ordered = sorted(peaks, key=lambda peak: (peak.device != device, -peak.total_bytes))
    if not ordered:
        return None
    first, *others = ordered
    return replace(first, others=tuple(others))


def _complete(sizes: Mapping[str, int], reason: str) -> tuple[dict[str, int | None], dict[str, str]]:
    """Return every category in its order, those that are no common ones behind, and why some are None."""
    names = [*CATEGORIES, *(name for name in sizes if name not in CATEGORIES)]
    names.sort(key=lambda name: LAST.index(name) + 1 if name in LAST else 0)
    return {name: sizes.get(name) for name in names}, {name: reason for name in names if name not in sizes}


def _saved_peak(saved: SavedSteps, device: str | None) -> CategoryPeak | None:
    """Return the largest sum of what backward found kept and what the same step held at its end.

    Where no backward was seen it is what was held alone.
    """
    sums: list[tuple[dict[str, int], Backward | StepEnd]] = []
    for backward in saved.backwards:
        end = saved.end_of(backward)
        sums.append(({**_held(end), "activation": backward.activation_bytes}, backward))
    if not sums:
        sums = [(_held(end), end) for end in saved.ends.values()]
    if not sums:
        return None
    sizes, place = max(sums, key=lambda entry: sum(entry[0].values()))
    categories, unknown = _complete(sizes, NOT_COUNTED)
    if "temporary" in unknown:
        unknown["temporary"] = NOT_SEEN
    if "activation" in unknown:
        unknown["activation"] = (place.note if isinstance(place, StepEnd) else None) or NO_BACKWARD
    moment = MOMENT_HELD if "activation" in unknown else MOMENT_SAVED
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
    held = end.held if end is not None else {}
    return {name: size for name, size in held.items() if size is not None}


def _activations(saved: SavedSteps, largest: Backward) -> Activations:
    end = saved.end_of(largest) or saved.last_end
    held = end.modules if end is not None else {}
    modules = [
        ModuleBytes(
            module.name, module.own_bytes, module.inclusive_bytes, *_sizes(held.get(module.name)),
            module.calls, module.forward_ns,
        )
        for module in largest.modules.values()
    ]  # fmt: skip
    modules.sort(key=lambda module: (-module.inclusive_activation_bytes, module.name))
    attributed = sum(module.own_activation_bytes for module in modules)
    return Activations(
        window=largest.window,
        step=largest.step,
        total_bytes=largest.activation_bytes,
        # What the row calls unattributed, and whatever else no row of a module accounts for.
        unattributed_bytes=largest.activation_bytes - attributed,
        dtypes=largest.dtypes,
        attribution=largest.attribution,
        modules=tuple(modules),
        parameters={name: sizes[0] for name, sizes in held.items()},
        uncounted=largest.uncounted,
    )


def _sizes(known: tuple[int, int] | None) -> tuple[int | None, int | None]:
    return (None, None) if known is None else known


def _steps(saved: SavedSteps) -> tuple[StepMemory, ...]:
    kept: dict[tuple[int, int], int] = defaultdict(int)
    for backward in saved.backwards:
        kept[backward.window, backward.step] = max(kept[backward.window, backward.step], backward.activation_bytes)
    points = []
    for place in sorted(kept.keys() | saved.ends.keys()):
        end = saved.ends.get(place)
        sizes = _held(end)
        points.append(StepMemory(*place, kept.get(place), sum(sizes.values()) if sizes else None))
    return tuple(points)
