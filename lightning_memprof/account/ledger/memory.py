"""The ledger of bytes: at the peak of a run or of a snapshot, each byte has exactly one owner.

A run's peak is the resident memory of its process and worker processes, on an accelerator what the allocator reserved
there. Tensors are owned by category, module and dtype; what nothing recorded owns is ``unattributed``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.estimate import default_workspace
from lightning_memprof.account.ledger.growth import outside_peak, steady_growth, validation_growth
from lightning_memprof.account.memory.activations import Activations, paths_around, patterns
from lightning_memprof.account.memory.report import CategoryPeak, RankMemory
from lightning_memprof.account.snapshot.replay import free_ranges
from lightning_memprof.account.snapshot.report import DeviceReport
from lightning_memprof.account.steps.events import action_name
from lightning_memprof.account.steps.statistics import peak_rss_bytes
from lightning_memprof.artifacts.series import AllocatorRow, ProcessRow
from lightning_memprof.read.run.model import Rank

UNATTRIBUTED: Final = "unattributed"
# Of a peak this close to what the machine can hold, a few percent decide whether the next batch fits.
PRESSURE: Final = 0.7
# Twice the batch needs at most twice the memory.
ROOM: Final = 0.5
# Saved and temporary tensors together, of saved ones.
TEMPORARY: Final = 2
_NO_TENSORS: Final = frozenset(
    {UNATTRIBUTED, "cached", "data_set", "before_run", "workers", "growth", "validation", "outside_steps"}
)
_HOLDERS: Final = ("parameter", "gradient")


class ByteLine(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one owner.

    Attributes:
        category: category of tensors; on the host ``before_run`` (resident when the recording began, without the
            parameters and the data set), ``data_set`` (its tensors and arrays), ``workers``, ``growth`` (added steadily
            over the steps), ``validation`` (added over its batches) and ``outside_steps`` (added by the action
            ``name``, a validation's end for instance); on a device ``cached`` (reserved and not
            allocated, at the peaks of both); in a snapshot ``requested``, ``rounding``, ``free_segments`` and
            ``fragmentation``.
        bytes: its bytes at the peak.
        module: path of the module, empty for the model itself; None if unknown.
        dtype: None if unknown, or if there are several.
        name: allocation site, or another name that says more than the category.
    """

    category: str
    bytes: int
    module: str | None = None
    dtype: str | None = None
    name: str = ""


class ByteLedger(msgspec.Struct, frozen=True, kw_only=True):
    """The owners of a peak; ``lines`` are sorted, largest first, and sum to ``peak_bytes``.

    Attributes:
        peak_bytes: the peak.
        basis: what the peak counts, for people.
        place: ``host``, or the device.
        lines: the owners.
        limit_bytes: what the device, the control group or the machine can hold; None if unknown.
        step: step of the tensors' peak; None if unknown.
        sharing: number of processes of the run that share the limit.
        outside_bytes: what other processes and CUDA contexts, also that of this process, use of the device at least.
        workspace_bytes: what cuBLAS keeps by default for each thread that multiplies matrices; 0 if unknown.
    """

    peak_bytes: int
    basis: str
    place: str
    lines: tuple[ByteLine, ...]
    limit_bytes: int | None = None
    step: int | None = None
    sharing: int = 1
    outside_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def categories(self) -> Mapping[str, int]:
        """The bytes of each category, largest first, ``unattributed`` last."""
        found: dict[str, int] = {}
        for line in self.lines:
            found[line.category] = found.get(line.category, 0) + line.bytes
        return dict(sorted(found.items(), key=lambda item: (item[0] == UNATTRIBUTED, -item[1])))

    def bytes(self, category: str) -> int:
        """Return the bytes of a category."""
        return self.categories.get(category, 0)

    @property
    def has_tensors(self) -> bool:
        """Whether tensors are among the owners."""
        return bool(self.categories.keys() - _NO_TENSORS)

    @property
    def filled(self) -> float | None:
        """The share of what the machine can hold, if every rank on it has this peak; None if that is unknown."""
        return self._filled_by(self.peak_bytes)

    @property
    def is_under_pressure(self) -> bool:
        """Whether the peak is close to what the machine can hold."""
        return (self.filled or 0.0) >= PRESSURE

    @property
    def has_room(self) -> bool:
        """Whether a larger batch fits."""
        return (self.filled or 1.0) <= ROOM

    def fits(self, times: int) -> bool:
        """Return whether a batch of this many times the size fits: temporary tensors grow like saved ones."""
        more = TEMPORARY * (times - 1) * (self.bytes("activation") + self.bytes("input"))
        return (self._filled_by(self.peak_bytes + more) or 0.0) <= PRESSURE

    def _filled_by(self, peak_bytes: int) -> float | None:
        return (peak_bytes * self.sharing + self.outside_bytes) / self.limit_bytes if self.limit_bytes else None


def grouped_bytes(lines: Iterable[ByteLine]) -> list[ByteLine]:
    """Return lines with those of repeated blocks joined (``blocks.0-5.norm``), in their order; the sum stays."""
    found = list(lines)
    paths = {line.module for line in found if line.module}
    shared = patterns(paths.union(*map(paths_around, paths)), {})
    groups: dict[ByteLine, int] = {}
    for line in found:
        key = replace(line, module=line.module and shared[line.module], bytes=0)
        groups[key] = groups.get(key, 0) + line.bytes
    joined = [replace(line, bytes=size) for line, size in groups.items()]
    return sorted(joined, key=lambda line: (line.category == UNATTRIBUTED, -line.bytes))


def run_bytes(rank: Rank, memory: RankMemory | None, sharing: int = 1) -> ByteLedger | None:
    """Return the ledger of a rank's peak; None if no peak was measured.

    Workers count with the bytes that only they have, at their maximum, beside the resident memory. Tensors are those of
    the recorded step with the most: memory that only other steps need is unattributed. Where they exceed the resident
    memory, whose pages may never have been touched, their sum is the peak.
    """
    peak = memory.peak if memory is not None else None
    tensors = list(_tensors(rank, peak, memory)) if peak is not None else []
    if rank.facts.is_cpu:
        return _on_host(rank, tensors, peak.step if peak is not None else None, sharing)
    return _on_device(rank, tensors, peak.step if peak is not None else None)


def resident_bytes(rank: Rank, sharing: int = 1) -> ByteLedger | None:
    """Return the ledger of the resident memory of a rank with an accelerator; None for one without, or if unknown."""
    return None if rank.facts.is_cpu else _on_host(rank, [], None, sharing)


def _on_host(rank: Rank, tensors: list[ByteLine], step: int | None, sharing: int) -> ByteLedger | None:
    measured = peak_rss_bytes(rank)
    process = measured or sum(line.bytes for line in tensors)
    if not process:
        return None
    samples = rank.read(ProcessRow).rows
    workers = _most(row.private_bytes for row in samples) or 0
    lines = [*tensors, *_growing(rank, process - sum(line.bytes for line in tensors))]
    # Several loaders may have the same data.
    data = max((loader.data_bytes or 0 for loader in (rank.training.dataloaders if rank.training else ())), default=0)
    lines.append(ByteLine(category="data_set", bytes=max(0, min(data, process - sum(line.bytes for line in lines)))))
    lines.append(_before_run(rank, data, process - sum(line.bytes for line in lines)))
    return _ledger(
        max(process, sum(line.bytes for line in lines)) + workers,
        [*lines, ByteLine(category="workers", bytes=workers)],
        basis=("tensors of a known category" if measured is None else "resident memory (RSS) of the process")
        + (" and the private memory of its workers" if workers else ""),
        place="host",
        limit_bytes=_limit(rank, ("memory_limit_bytes", "memory_bytes")) or _sampled_limit(rank),
        step=step,
        sharing=sharing,
    )


def _before_run(rank: Rank, data: int, most: int) -> ByteLine:
    """Return what was resident when the recording began, at most ``most`` bytes: pages may be freed and used again."""
    start = rank.facts.environment.get("rss_at_start_bytes")
    # Parameters that a strategy creates later are not among these bytes, nor is a data set of a later moment: the line
    # is then too short, never too long.
    parameters = sum(rank.training.parameter_dtypes.values()) if rank.training is not None else 0
    size = start - parameters - data if type(start) is int else 0
    return ByteLine(category="before_run", bytes=max(0, min(size, most)))


def _growing(rank: Rank, most: int) -> Iterator[ByteLine]:
    """Yield what steps and validations add steadily, and what an action outside the steps adds to their peak.

    At most ``most`` bytes: they may be tensors as well.
    """
    outside = outside_peak(rank.read(ProcessRow).rows, rank.pulse)
    if outside is not None and (size := min(outside[1], most)) > 0:
        yield ByteLine(category="outside_steps", bytes=size, name=action_name(outside[0]))
        most -= size
    rises = {
        "growth": steady_growth(rank.pulse, "rss_bytes"),
        "validation": validation_growth(rank.read(ProcessRow).rows),
    }
    for category, growth in rises.items():
        size = min(growth.added, most) if growth is not None else 0
        if size > 0:
            yield ByteLine(category=category, bytes=size)
            most -= size


def _on_device(rank: Rank, tensors: list[ByteLine], step: int | None) -> ByteLedger | None:
    rows = [row for window in rank.windows for row in window.read(AllocatorRow).rows]
    allocated = _most([*(row["device_peak_bytes"] for row in rank.pulse), *(row.peak_allocated_bytes for row in rows)])
    allocated = max(allocated or 0, sum(line.bytes for line in tensors))
    if not allocated:
        return None
    reserved = max(allocated, _most(row.peak_reserved_bytes for row in rows) or 0)
    return _ledger(
        reserved,
        [*tensors, ByteLine(category="cached", bytes=reserved - allocated)],
        # Reserved bytes are known in windows only.
        basis=f"bytes that the allocator {'reserved' if reserved > allocated else 'allocated'}",
        place=rank.facts.device or "device",
        limit_bytes=_limit(rank, ("device_memory_bytes",)),
        step=step,
        outside_bytes=max((_used_on_device(rank) or 0) - reserved, 0),
        workspace_bytes=default_workspace(str(rank.facts.environment.get("device_name"))),
    )


def _ledger(whole: int, lines: Iterable[ByteLine], **fields: Any) -> ByteLedger:
    """Return a ledger with the rest of a peak, which its lines do not exceed, as its last line, and these fields."""
    known = [line for line in lines if line.bytes > 0]
    rest = whole - sum(line.bytes for line in known)
    ordered = sorted(known, key=lambda line: (-line.bytes, line.category, line.module or "", line.name))
    last = [ByteLine(category=UNATTRIBUTED, bytes=rest)] if rest else []
    return ByteLedger(peak_bytes=whole, lines=(*ordered, *last), **fields)


def _most(sizes: Iterable[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)


def _limit(rank: Rank, names: Sequence[str]) -> int | None:
    """Return the smallest of some limits in the facts of the run."""
    found = [rank.facts.environment.get(name) for name in names]
    return min((size for size in found if type(size) is int and size > 0), default=None)


def _sampled_limit(rank: Rank) -> int | None:
    """Return the limit that the samples of the machine have; runs of older versions have no other."""
    figures = [stretch.figures for stretch in rank.system.stretches]
    limits = [value for found in figures for value in found.get("memory_limit_bytes", ()) if value > 0]
    if limits:
        return round(min(limits))
    names = ("memory_used_bytes", "memory_available_bytes")
    pairs = (zip(*(found.get(name, ()) for name in names), strict=False) for found in figures)
    return max((round(used + free) for pair in pairs for used, free in pair if used + free > 0), default=None)


def _used_on_device(rank: Rank) -> int | None:
    """Return the most memory in use on the device, by all processes and the driver; None if it was not sampled."""
    number = (rank.facts.device or "").partition(":")[2] or "0"
    values = (
        value
        for stretch in rank.system.stretches
        for value in stretch.figures.get(f"gpu{number}_memory_used_bytes", ())
        if value > 0
    )
    return max((round(value) for value in values), default=None)


def _tensors(rank: Rank, peak: CategoryPeak, memory: RankMemory | None) -> Iterator[ByteLine]:
    """Yield the categories of a peak, divided among modules where those of the same step are known."""
    saved = memory.activations if memory is not None else None
    dtypes = rank.training.parameter_dtypes if rank.training is not None else {}
    for category, size in peak.categories.items():
        if not size:
            continue
        name = UNATTRIBUTED if category == "other" else category
        parts: list[ByteLine] = []
        if saved is not None and category == "activation":
            dtype = _only(saved.dtypes)
            parts = [
                ByteLine(category=category, bytes=module.own_activation_bytes, module=module.name, dtype=dtype)
                for module in saved.modules
            ]
        elif saved is not None and category in _HOLDERS:
            parts = list(_held(category, saved, _only(dtypes)))
        parts = [part for part in parts if part.bytes > 0]
        known = sum(part.bytes for part in parts)
        # The tracker of another step may have less than its modules: only what fits is divided.
        if known > size:
            parts, known = [], 0
        yield from parts
        if size > known and name != UNATTRIBUTED:
            yield ByteLine(category=name, bytes=size - known, dtype=_only(dtypes) if category in _HOLDERS else None)


def _held(category: str, saved: Activations, dtype: str | None) -> Iterator[ByteLine]:
    """Yield the parameters or gradients that each module owns without its submodules."""
    sizes = {
        module.name: (module.parameter_bytes if category == "parameter" else module.gradient_bytes) or 0
        for module in saved.modules
    }
    own = dict(sizes)
    for name, size in sizes.items():
        # The innermost known module around it.
        if (parent := next((path for path in reversed(paths_around(name)) if path in sizes), None)) is not None:
            own[parent] -= size
    for name, size in own.items():
        yield ByteLine(category=category, bytes=size, module=name, dtype=dtype)


def _only(dtypes: Mapping[str, int]) -> str | None:
    return next(iter(dtypes)) if len(dtypes) == 1 else None


def snapshot_bytes(device: DeviceReport) -> ByteLedger:
    """Return the ledger of a snapshot's device when its requested bytes peak: the bytes reserved then.

    Requested bytes are owned by allocation site, blocks that wait for a stream included; the rest by the rounding of
    blocks, and by free bytes, in whole segments (``free_segments``) or between live blocks (``fragmentation``).
    """
    lives = device.lives_at(device.peak_event)
    live = sum(life.size for life in lives)
    whole = max(device.live_at(device.peak_event).reserved_bytes, live)
    segments = sum(piece.size for piece in free_ranges(device, device.peak_event) if piece.is_segment)
    segments = min(segments, whole - live)
    return _ledger(
        whole,
        [
            *(ByteLine(category="requested", bytes=line.bytes, name=line.site) for line in device.lines_at_peak),
            ByteLine(category="rounding", bytes=live - device.peak_requested_bytes),
            ByteLine(category="free_segments", bytes=segments),
            ByteLine(category="fragmentation", bytes=whole - live - segments),
        ],
        basis="reserved bytes at the peak of requested bytes",
        place=f"cuda:{device.device}",
    )
