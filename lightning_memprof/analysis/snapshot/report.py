"""The report of one CUDA allocator snapshot, written by any tool."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.snapshot.model import (
    AgedHolder,
    DeviceReport,
    FailedRequest,
    HeldLine,
    LargeBlock,
    MemoryPool,
    SnapshotReport,
)
from lightning_memprof.analysis.snapshot.reader import ALLOCATED, INACTIVE, read_snapshot
from lightning_memprof.analysis.snapshot.replay import (
    BlockLife,
    Holder,
    Replay,
    free_ranges,
    holders_of,
    replay,
    site_of,
)
from lightning_memprof.analysis.stacks import parse_frame
from lightning_memprof.units import format_bytes, percent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from lightning_memprof.analysis.snapshot.reader import DeviceSnapshot, Snapshot
    from lightning_memprof.analysis.snapshot.restricted_pickle import Limits

__all__ = ["held_lines", "report_of", "snapshot_report"]

_LARGEST: Final = 20
_CALLED: Final = 3


def snapshot_report(path: Path, limits: Limits | None = None) -> SnapshotReport:
    """Read a snapshot, replay its recorded history, and return its report.

    Args:
        path: a pickle, plain or gzip, of what ``torch.cuda.memory._snapshot()`` or ``memory_snapshot()`` returned.
        limits: how large it may be.

    Raises:
        ArtifactError: the file is missing or damaged, above a limit, no snapshot, or names a global.

    """
    return report_of(read_snapshot(path, limits), path)


def report_of(snapshot: Snapshot, path: Path) -> SnapshotReport:
    """Return the report of a snapshot that was read from ``path``."""
    devices = tuple(_device(replay(snapshot, number)) for number in snapshot.devices)
    return SnapshotReport(
        file=path,
        devices=devices,
        oom=_failed([device.replay for device in devices]),
        missing=tuple(_missing(snapshot, devices)),
        form=snapshot.form,
        settings=snapshot.settings,
    )


def _device(ring: Replay) -> DeviceReport:
    found, events = ring.snapshot, ring.snapshot.events
    has_times = any(event.time_us is not None for event in events)
    return DeviceReport(
        device=ring.device,
        reserved_bytes=found.reserved_bytes,
        allocated_bytes=found.allocated_bytes,
        requested_bytes=found.requested_bytes,
        inactive_bytes=found.inactive_bytes,
        pending_bytes=found.pending_bytes,
        peak_requested_bytes=ring.peak_requested_bytes,
        peak_reserved_bytes=ring.peak_reserved_bytes,
        peak_time_us=ring.peak_time_us,
        events=ring.events,
        segments=len(found.segments),
        holders_at_peak=ring.holders_at_peak,
        fragmentation=ring.fragmentation,
        segments_made=ring.segments_made,
        segments_returned=ring.segments_returned,
        replay=ring,
        lines_at_peak=held_lines(ring.holders_at_peak),
        functions_at_peak=_held_by(ring.holders_at_peak, _function),
        largest_at_peak=_largest(ring),
        oldest=_oldest(ring),
        pools=_pools(found),
        has_times=has_times,
        has_stacks=any(life.stack for life in ring.lives),
        is_expandable=any(segment.is_expandable for segment in found.segments),
        start_bytes=ring.live_at(-1).requested_bytes,
        start_us=events[0].time_us if has_times else None,
        end_us=events[-1].time_us if has_times else None,
    )


def held_lines(holders: Sequence[Holder]) -> tuple[HeldLine, ...]:
    """Sum holders by allocation site, largest first."""
    return _held_by(holders, str)


def _function(site: str) -> str:
    """Return a site without its line."""
    frame = parse_frame(site)
    return f"{frame.filename}: {frame.name}" if frame is not None and frame.is_python else site


def _held_by(holders: Sequence[Holder], place: Callable[[str], str]) -> tuple[HeldLine, ...]:
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
    peak = ring.peak_event
    live = (life for life in ring.lives if life.born <= peak < life.died)
    return tuple(
        LargeBlock(
            address=life.address,
            bytes=life.requested_size,
            site=holders_of(ring.snapshot, [life])[0].site,
            born_us=ring.snapshot.events[life.born].time_us if life.born >= 0 else None,
        )
        for life in heapq.nlargest(_LARGEST, live, key=lambda life: life.requested_size)
    )


def _oldest(ring: Replay) -> tuple[AgedHolder, ...]:
    """Return the live bytes at the end by stack, oldest first, then largest first."""
    events, lives = ring.snapshot.events, defaultdict[int, list[BlockLife]](list)
    for life in ring.lives:
        if life.died == ring.events:
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
    _, at, ring = max(failed, key=lambda entry: entry[:2])
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
        if device.events and device.start_bytes:
            found.append(
                f"The recorded history of {name} starts with {format_bytes(device.start_bytes)} already live; earlier "
                "events are not in it (max_entries)."
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
