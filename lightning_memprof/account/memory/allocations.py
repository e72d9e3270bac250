"""Allocations of a run by window: live bytes over time, the peak, and the allocation sites of the bytes at the peak.

Read from operator traces and, for windows whose trace has no CUDA memory, from allocator snapshots. A trace counts the
blocks that were allocated and freed while it was recorded, above the bytes at its start (`start_bytes`). Snapshots have
allocation sites but no modules, and operators only in C++ frames (otherwise `alloc`); their bytes are requested bytes,
and those without a stack are unattributed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final

from lightning_memprof.account.memory.columns import (
    DeviceMemory,
    MemoryColumns,
    MemoryTrace,
    Origin,
    Origins,
    counted_bytes,
    read_memory,
    step_at,
)
from lightning_memprof.account.memory.model import (
    DeviceAllocations,
    MarkBytes,
    Site,
    StepBytes,
    WindowAllocations,
    curve_corners,
)
from lightning_memprof.account.snapshot.replay import Replay, replay
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.model import ArtifactFile, Run
from lightning_memprof.read.snapshot.reader import read_snapshot
from lightning_memprof.read.stacks import native_site, user_frame

_TRACE_COLLECTOR: Final = "operator_trace"
_ALLOC: Final = "alloc"


def run_allocations(run: Run) -> tuple[WindowAllocations, ...]:
    """Return the allocations of every window of a run, by rank and window.

    They are read from the window's operator trace and, where that has no CUDA memory, from its last allocator snapshot.
    A damaged file, or one recorded without allocations, is a `problem`.
    """
    traces = [
        artifact for artifact in run.artifacts if artifact.type == "trace" and artifact.collector == _TRACE_COLLECTOR
    ]
    found = [
        _read(trace, window_allocations, "the trace has no allocations: record it with profile_memory=True")
        for trace in traces
    ]
    found += _snapshot_allocations(run, found)
    return tuple(sorted(found, key=lambda allocation: (allocation.rank, allocation.window or 0, str(allocation.trace))))


def _snapshot_allocations(run: Run, traced: Sequence[WindowAllocations]) -> list[WindowAllocations]:
    """Return the allocations of windows whose traces, read before, have no CUDA memory."""
    known = {
        (allocation.rank, allocation.window)
        for allocation in traced
        for device in allocation.devices
        if device.device.startswith("cuda")
    }
    last = {
        (artifact.rank, artifact.window): artifact
        for artifact in run.artifacts
        if artifact.type == "snapshot" and artifact.window is not None
    }
    steps = {
        rank.rank: [
            (start, start + duration, step)
            for row in rank.pulse
            if (step := row["step"]) is not None
            and (start := row["start_ns"]) is not None
            and (duration := row["duration_ns"]) is not None
        ]
        for rank in run.ranks
    }

    def devices(file: Path, rank: int) -> tuple[DeviceAllocations, ...]:
        snapshot = read_snapshot(file)
        with_events = [number for number, recorded in snapshot.devices.items() if recorded.events]
        return tuple(replay_allocations(replay(snapshot, number), steps.get(rank, [])) for number in with_events)

    return [
        _read(
            artifact,
            partial(devices, rank=artifact.rank),
            "the snapshot has no events: the allocator history was off",
        )
        for key, artifact in last.items()
        if key not in known
    ]


def _read(
    artifact: ArtifactFile, devices_of: Callable[[Path], tuple[DeviceAllocations, ...]], empty: str
) -> WindowAllocations:
    devices: tuple[DeviceAllocations, ...] = ()
    problem: str | None
    try:
        devices = devices_of(artifact.file)
        problem = None if devices else empty
    except ArtifactError as error:
        problem = str(error)
    return WindowAllocations(
        rank=artifact.rank, window=artifact.window, devices=devices, trace=artifact.file, problem=problem
    )


def window_allocations(trace: Path) -> tuple[DeviceAllocations, ...]:
    """Return the allocations of each device of a trace, the host first; empty if recorded without `profile_memory`.

    Reads the file once and needs about 80 bytes of memory per event of a thread with allocations, and 50 of others.

    Raises:
        ArtifactError: the trace is missing, damaged or truncated.
    """
    columns = read_memory(trace)
    origins = Origins(columns)
    return tuple(_device(columns, device, memory, origins) for device, memory in sorted(columns.devices.items()))


def _device(trace: MemoryTrace, device: DeviceMemory, memory: MemoryColumns, origins: Origins) -> DeviceAllocations:
    deltas = counted_bytes(device, memory)
    live = tuple(accumulate(deltas))
    peak = max(range(len(live)), key=live.__getitem__)
    # If nothing was allocated above the start, the peak is at the start.
    count = peak + 1 if live[peak] > 0 else 0
    sites, unattributed, freed_outside = _live_sites(memory, deltas, count, origins)
    time = trace.origin_ns + memory.time[peak if count else 0]
    return DeviceAllocations(
        device=str(device),
        start_bytes=None if device.is_host else memory.start_bytes,
        peak_bytes=live[peak] if count else 0,
        peak_time_ns=time,
        peak_step=trace.step_at(time),
        sites=sites,
        unattributed_bytes=unattributed,
        freed_outside_bytes=freed_outside,
        curve=tuple((trace.origin_ns + memory.time[i], live[i]) for i in curve_corners(live)),
        steps=tuple(_steps(trace.steps, memory.time, live, trace.origin_ns)),
        marks=tuple(
            MarkBytes(
                step=trace.step_at(time),
                point=point,
                time_ns=time,
                live_bytes=_live_at(memory.time, live, time - trace.origin_ns),
            )
            for time, point in trace.points
        ),
        allocations=sum(count > 0 for count in memory.bytes),
    )


def _live_sites(
    memory: MemoryColumns, deltas: array[int], count: int, origins: Origins
) -> tuple[tuple[Site, ...], int, int]:
    """Return the sites of the bytes that are live after the first `count` events, and two sums of bytes.

    These are the live bytes of no known operator, and the bytes freed that were allocated before the trace.
    """
    live: dict[int, int] = {}
    freed_outside = unattributed = 0
    for i in range(count):
        if not memory.address[i]:
            unattributed += deltas[i]
        elif memory.bytes[i] >= 0:
            live[memory.address[i]] = i
        elif live.pop(memory.address[i], None) is None:
            freed_outside -= deltas[i]
    blocks = [(origins.of(memory, i), memory.bytes[i]) for i in live.values()]
    unattributed += sum(size for origin, size in blocks if origin.operator is None)
    return _sites((origin, size) for origin, size in blocks if origin.operator is not None), unattributed, freed_outside


def _sites(blocks: Iterable[tuple[Origin, int]], *, with_native: bool = True) -> tuple[Site, ...]:
    """Sum the bytes of live blocks by origin, largest first; `with_native` shows C++ frames in the stacks."""
    live: Counter[Origin] = Counter()
    counts: Counter[Origin] = Counter()
    for origin, size in blocks:
        live[origin] += size
        counts[origin] += 1
    return tuple(
        Site(
            operator=origin.operator or "",
            module=origin.module,
            line=str(frame) if (frame := user_frame(origin.stack)) else None,
            stack=tuple(str(frame) for frame in origin.stack if with_native or frame.is_python),
            step=origin.step,
            phase=origin.phase,
            bytes=size,
            blocks=counts[origin],
        )
        for origin, size in live.most_common()
    )


def _live_at(times: Sequence[int], live: Sequence[int], time: int) -> int:
    done = bisect_right(times, time)
    return live[done - 1] if done else 0


def _steps(
    steps: Iterable[tuple[int, int, int]], times: Sequence[int], live: Sequence[int], origin_ns: int = 0
) -> Iterator[StepBytes]:
    """Yield the live bytes of steps (start, end, number); all times are ns after the origin."""
    for start, end, step in steps:
        at_start = _live_at(times, live, start)
        inside = range(bisect_right(times, start), bisect_right(times, end))
        highest = max(inside, key=live.__getitem__, default=None)
        peak, time = at_start, start
        if highest is not None and live[highest] > at_start:
            peak, time = live[highest], times[highest]
        yield StepBytes(
            step=step,
            start_bytes=at_start,
            peak_bytes=peak,
            peak_time_ns=origin_ns + time,
            end_bytes=_live_at(times, live, end),
        )


def replay_allocations(ring: Replay, steps: Sequence[tuple[int, int, int]] = ()) -> DeviceAllocations:
    """Return the allocations of one device of a snapshot, relative to the live bytes at the start of its history.

    Args:
        ring: the replayed history; it has events. Without times (torch before 2.2) all times are 0.
        steps: (start, end, number) of the steps in Unix ns, by time.
    """
    start = ring.live_at(-1).requested_bytes
    live = [ring.live_at(event).requested_bytes - start for event in range(ring.events)]
    times = [(event.time_us or 0) * 1000 for event in ring.snapshot.events]
    live_lives = ring.lives_at(ring.peak_event)
    known = [life for life in live_lives if life.born >= 0 and ring.snapshot.stacks[life.stack]]
    old_bytes = sum(life.requested_size for life in live_lives if life.born < 0)
    stacks = {life.stack: ring.snapshot.stacks[life.stack] for life in known}
    origins = {number: Origin(native_site(stack) or _ALLOC, None, None, stack) for number, stack in stacks.items()}
    peak_time = times[max(ring.peak_event, 0)]
    return DeviceAllocations(
        device=f"cuda:{ring.device}",
        start_bytes=start,
        peak_bytes=ring.peak_requested_bytes - start,
        peak_time_ns=peak_time,
        peak_step=step_at(steps, peak_time),
        sites=_sites(
            (
                (origins[life.stack]._replace(step=step_at(steps, times[life.born])), life.requested_size)
                for life in known
            ),
            with_native=False,
        ),
        unattributed_bytes=ring.peak_requested_bytes - old_bytes - sum(life.requested_size for life in known),
        freed_outside_bytes=start - old_bytes,
        curve=tuple((times[i], live[i]) for i in curve_corners(live)),
        steps=tuple(_steps([step for step in steps if times[0] <= step[0] and step[1] <= times[-1]], times, live)),
        marks=(),
        allocations=sum(event.action == _ALLOC for event in ring.snapshot.events),
    )
