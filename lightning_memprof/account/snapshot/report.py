"""The report of one CUDA allocator snapshot, written by any tool."""

from __future__ import annotations

import heapq
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from lightning_memprof.account.snapshot.growth import Growth, steady_growth
from lightning_memprof.account.snapshot.replay import (
    GROWS,
    SHRINKS,
    BlockLife,
    Holder,
    Live,
    Replay,
    free_ranges,
    holders_of,
    site_of,
)
from lightning_memprof.read.snapshot.reader import ALLOCATED, INACTIVE, DeviceSnapshot, Snapshot, read_snapshot
from lightning_memprof.read.stacks import parse_frame
from lightning_memprof.units import MIB, format_bytes, percent

_LARGEST: Final = 20
_CALLED: Final = 3
# A device with a fifth more than the others limits the batch of all.
_LEAST_IMBALANCE: Final = 1.2
_LEAST_IMBALANCE_BYTES: Final = 64 * MIB


class FailedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The last failed allocation (``oom`` event) of the recorded history.

    ``failures`` counts all of them; ``first`` is the device and the bytes of the first. ``site`` is the user's line
    that asked, empty where it is unknown. ``live`` is the state at that event. ``unused_bytes`` were reserved but not
    allocated, ``largest_free_bytes`` is the largest contiguous part of them.
    """

    device: int
    requested_bytes: int
    device_free_bytes: int | None
    time_us: int | None
    live: Live
    largest_free_bytes: int = 0
    unused_bytes: int = 0
    site: str = ""
    failures: int = 1
    first: tuple[int, int]


class HeldLine(msgspec.Struct, frozen=True, kw_only=True):
    """Live bytes of one allocation site; ``stacks`` counts its different stacks.

    ``site`` is the user's innermost line, ``file.py(12): function``, or all lines of a function, ``file.py: function``;
    empty where it is unknown. ``called`` are the innermost functions called from it, such as ``linear``, by bytes.
    """

    site: str
    called: tuple[str, ...]
    bytes: int
    blocks: int
    stacks: int


class LargeBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One block live at the peak; ``born_us`` is None if it predates the recorded history or has no time."""

    address: int
    bytes: int
    site: str
    born_us: int | None


class AgedHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Live bytes of one stack at the end of the recorded history, with the age of its oldest block.

    ``before_ring_bytes`` predate the recorded history, so their age is unknown. ``age_us`` is the age of the oldest
    other block at the last event; None without such blocks or without times.
    """

    holder: Holder
    before_ring_bytes: int
    age_us: int | None


class MemoryPool(msgspec.Struct, frozen=True, kw_only=True):
    """The segments of one pool and stream, which serve no other; ``(0, 0)`` is the default pool (no CUDA graph)."""

    pool: tuple[int, int]
    stream: int
    segments: int
    reserved_bytes: int
    allocated_bytes: int
    inactive_bytes: int


class DeviceReport(Replay, frozen=True, dict=True):
    """One device: its history, and the sums over its blocks, each computed when it is first used."""

    @property
    def has_times(self) -> bool:
        """Whether the events have times."""
        return any(event.time_us is not None for event in self.snapshot.events)

    @property
    def start_us(self) -> int | None:
        """Unix microseconds of the first event; None without times."""
        return self.snapshot.events[0].time_us if self.has_times else None

    @property
    def end_us(self) -> int | None:
        """Unix microseconds of the last event; None without times."""
        return self.snapshot.events[-1].time_us if self.has_times else None

    @property
    def segments_made(self) -> tuple[int, int]:
        """Count and bytes of segments (or parts of expandable ones) created in the history."""
        return self._segments(GROWS)

    @property
    def segments_returned(self) -> tuple[int, int]:
        """Count and bytes of segments returned to the driver."""
        return self._segments(SHRINKS)

    @property
    def has_stacks(self) -> bool:
        """Whether any block of the history has a stack."""
        return any(life.stack for life in self.lives)

    @cached_property
    def growth(self) -> Growth | None:
        """The function whose blocks pile up step by step, None without one."""
        return steady_growth(self)

    @cached_property
    def lines_at_peak(self) -> tuple[HeldLine, ...]:
        """Requested bytes by allocation site, largest first; they sum to the peak."""
        return held_lines(self.holders_at_peak)

    @cached_property
    def functions_at_peak(self) -> tuple[HeldLine, ...]:
        """The same by function."""
        return held_lines(self.holders_at_peak, _function)

    @cached_property
    def largest_at_peak(self) -> tuple[LargeBlock, ...]:
        """The largest blocks live at the peak, at most 20."""
        return _largest(self)

    @cached_property
    def oldest(self) -> tuple[AgedHolder, ...]:
        """Live bytes at the end by stack, oldest first, then largest first."""
        return _oldest(self)

    @cached_property
    def pools(self) -> tuple[MemoryPool, ...]:
        """The segments by pool and stream, largest first."""
        return _pools(self.snapshot)

    def _segments(self, actions: frozenset[str]) -> tuple[int, int]:
        sizes = [event.size for event in self.snapshot.events if event.action in actions]
        return len(sizes), sum(sizes)


class Imbalance(NamedTuple):
    """The device with the highest peak of requested bytes, and the median peak of the other devices."""

    device: int
    peak_bytes: int
    others_bytes: int


class SnapshotReport(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot; ``missing`` lists its gaps, one sentence each.

    ``form`` is the form of the file: a dictionary, or a bare list of segments. ``settings`` are the allocator settings
    recorded in the file, such as ``PYTORCH_CUDA_ALLOC_CONF``.
    """

    file: Path
    devices: tuple[DeviceReport, ...]
    oom: FailedRequest | None
    missing: tuple[str, ...]
    form: Literal["dict", "list"] = "dict"
    settings: Mapping[str, Any] = msgspec.field(default_factory=dict)

    @property
    def imbalance(self) -> Imbalance | None:
        """The device whose peak exceeds the others' by a fifth and 64 MiB or more, or None."""
        ordered = sorted(self.devices, key=lambda device: device.peak_requested_bytes)
        if len(ordered) < 2:
            return None
        most = ordered.pop()
        others = int(statistics.median(device.peak_requested_bytes for device in ordered))
        needed = max(_LEAST_IMBALANCE * others, others + _LEAST_IMBALANCE_BYTES)
        found = Imbalance(most.device, most.peak_requested_bytes, others)
        return found if found.peak_bytes >= needed else None


def snapshot_report(path: Path) -> SnapshotReport:
    """Read a snapshot, replay its recorded history, and return its report.

    Args:
        path: a pickle, plain or gzip, of what ``torch.cuda.memory._snapshot()`` or ``memory_snapshot()`` returned.

    Raises:
        ArtifactError: the file is missing or damaged, above a limit, no snapshot, or names a global.
    """
    snapshot = read_snapshot(path)
    devices = tuple(map(DeviceReport, snapshot.devices.values()))
    return SnapshotReport(
        file=path,
        devices=devices,
        oom=_failed(devices),
        missing=tuple(_missing(snapshot, devices)),
        form=snapshot.form,
        settings=snapshot.settings,
    )


def _function(site: str) -> str:
    """Return a site without its line."""
    frame = parse_frame(site)
    return f"{frame.filename}: {frame.name}" if frame is not None and frame.is_python else site


def held_lines(holders: Sequence[Holder], place: Callable[[str], str] = str) -> tuple[HeldLine, ...]:
    """Sum holders by allocation site, or by the place that it is in, largest first."""
    held: defaultdict[str, list[Holder]] = defaultdict(list)
    for holder in holders:
        held[place(holder.site)].append(holder)
    lines = []
    for site, alike in held.items():
        called: Counter[str] = Counter()
        for holder in alike:
            inner = parse_frame(holder.stack[0]) if holder.stack else None
            if inner is not None and inner.is_python and place(str(inner)) != site:
                called[inner.name] += holder.bytes
        lines.append(
            HeldLine(
                site=site,
                called=tuple(name for name, _ in called.most_common(_CALLED)),
                bytes=sum(holder.bytes for holder in alike),
                blocks=sum(holder.blocks for holder in alike),
                stacks=len(alike),
            )
        )
    return tuple(sorted(lines, key=lambda line: -line.bytes))


def _largest(ring: Replay) -> tuple[LargeBlock, ...]:
    return tuple(
        LargeBlock(
            address=life.address,
            bytes=life.requested_size,
            site=holders_of(ring.snapshot, [life])[0].site,
            born_us=ring.snapshot.events[life.born].time_us if life.born >= 0 else None,
        )
        for life in heapq.nlargest(_LARGEST, ring.lives_at(ring.peak_event), key=lambda life: life.requested_size)
    )


def _oldest(ring: Replay) -> tuple[AgedHolder, ...]:
    events, lives = ring.snapshot.events, defaultdict[int, list[BlockLife]](list)
    for life in ring.lives_at(ring.events - 1):
        lives[life.stack].append(life)
    by_stack: defaultdict[tuple[str, ...], list[BlockLife]] = defaultdict(list)
    for alike in lives.values():
        by_stack[holders_of(ring.snapshot, alike)[0].stack] += alike
    found = []
    for alike in by_stack.values():
        born = min((life.born for life in alike if life.born >= 0), default=None)
        before = sum(life.requested_size for life in alike if life.born < 0)
        start, end = (events[born].time_us, events[-1].time_us) if born is not None else (None, None)
        age = max(0, end - start) if start is not None and end is not None else None
        oldest = min(life.born for life in alike)
        aged = AgedHolder(holder=holders_of(ring.snapshot, alike)[0], before_ring_bytes=before, age_us=age)
        found.append((oldest, -aged.holder.bytes, aged))
    return tuple(aged for *_, aged in sorted(found, key=lambda entry: entry[:2]))


def _pools(device: DeviceSnapshot) -> tuple[MemoryPool, ...]:
    alike = defaultdict(list)
    for segment in device.segments:
        alike[segment.pool, segment.stream].append(segment)
    pools = []
    for (pool, stream), segments in alike.items():
        blocks = [block for segment in segments for block in segment.blocks]
        pools.append(
            MemoryPool(
                pool=pool,
                stream=stream,
                segments=len(segments),
                reserved_bytes=sum(segment.size for segment in segments),
                allocated_bytes=sum(block.size for block in blocks if block.state == ALLOCATED),
                inactive_bytes=sum(block.size for block in blocks if block.state == INACTIVE),
            )
        )
    return tuple(sorted(pools, key=lambda pool: -pool.reserved_bytes))


def _failed(rings: Sequence[Replay]) -> FailedRequest | None:
    """Return the last failed allocation of all devices, by time, or by position where there are no times."""
    failed = [
        (event.time_us or 0, i, ring)
        for ring in rings
        for i, event in enumerate(ring.snapshot.events)
        if event.action == "oom"
    ]
    if not failed:
        return None
    failed.sort(key=lambda entry: entry[:2])
    (_, first, at_first), (_, at, ring) = failed[0], failed[-1]
    event = ring.snapshot.events[at]
    free = free_ranges(ring, at)
    return FailedRequest(
        device=ring.device,
        requested_bytes=event.size,
        device_free_bytes=event.device_free,
        time_us=event.time_us,
        live=ring.live_at(at),
        largest_free_bytes=max((piece.size for piece in free), default=0),
        unused_bytes=sum(piece.size for piece in free),
        site=site_of(ring.snapshot.stacks[event.stack]),
        failures=len(failed),
        first=(at_first.device, at_first.snapshot.events[first].size),
    )


def _missing(snapshot: Snapshot, devices: Sequence[DeviceReport]) -> list[str]:
    if not devices:
        return ["The snapshot has no device memory: it was taken before the first allocation."]
    found = []
    if snapshot.form == "list":
        found.append("The file is a bare list of segments: it has the live blocks of one moment and no events.")
    for device in devices:
        name = f"cuda:{device.device}"
        if not device.events:
            if snapshot.form == "dict":
                found.append(
                    f"{name} has no events because the history was off; the peak is the live bytes at the end."
                )
        elif not device.has_times:
            found.append(f"The events of {name} have no times (torch before 2.2).")
        start_bytes = device.live_at(-1).requested_bytes
        if device.events and start_bytes:
            found.append(
                f"The recorded history of {name} starts with {format_bytes(start_bytes)} already live; earlier "
                "events are not in it."
            )
        unknown = sum(holder.bytes for holder in device.holders_at_peak if not holder.stack)
        if device.has_stacks and unknown > device.peak_requested_bytes / 2:
            found.append(
                f"{percent(unknown / device.peak_requested_bytes)} of the peak of {name} has no stack: record the "
                "history with stacks from the start of the program."
            )
        if not device.has_stacks:
            found.append(f"No block of {name} has a stack: record the history with stacks before the first allocation.")
    return found
