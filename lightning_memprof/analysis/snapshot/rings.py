"""Allocations of a run from allocator snapshots: the last snapshot of each window whose trace has no CUDA memory.

Snapshots have allocation sites but no modules, and operators only in C++ frames (otherwise `alloc`). Bytes are
requested bytes; those without a stack are unattributed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from lightning_memprof.analysis.memory.model import (
    DeviceAllocations,
    Site,
    StepBytes,
    WindowAllocations,
    curve_corners,
)
from lightning_memprof.analysis.run.load import Artifact, Run
from lightning_memprof.analysis.snapshot.reader import read_snapshot
from lightning_memprof.analysis.snapshot.replay import BlockLife, Replay, replay
from lightning_memprof.analysis.stacks import Frame, native_site, user_frame
from lightning_memprof.errors import ArtifactError

__all__ = ["ring_allocations", "ring_of"]

_ACTION: Final = "alloc"


class _Step(NamedTuple):
    start_ns: int
    end_ns: int
    number: int


def ring_allocations(run: Run, traced: Sequence[WindowAllocations]) -> list[WindowAllocations]:
    """Return the allocations of windows whose traces have no CUDA memory, from their snapshots.

    Args:
        run: the run.
        traced: allocations found in its traces.

    """
    known = {
        (allocation.rank, allocation.window)
        for allocation in traced
        for device in allocation.devices
        if device.device.startswith("cuda")
    }
    last: dict[tuple[int, int | None], Artifact] = {}
    for artifact in run.artifacts:
        if artifact.type == "snapshot" and artifact.window is not None:
            last[artifact.rank, artifact.window] = artifact
    steps = {
        rank.rank: [
            _Step(start, start + duration, step)
            for row in rank.pulse
            if (step := row["step"]) is not None
            and (start := row["start_ns"]) is not None
            and (duration := row["duration_ns"]) is not None
        ]
        for rank in run.ranks
    }
    return [_read(allocation, steps.get(allocation.rank, [])) for key, allocation in last.items() if key not in known]


def _read(artifact: Artifact, steps: Sequence[_Step]) -> WindowAllocations:
    try:
        snapshot = read_snapshot(artifact.file)
    except ArtifactError as error:
        return WindowAllocations(
            rank=artifact.rank, window=artifact.window, devices=(), trace=artifact.file, problem=str(error)
        )
    devices = tuple(
        ring_of(replay(snapshot, device), steps) for device, recorded in snapshot.devices.items() if recorded.events
    )
    problem = None if devices else "the snapshot has no events: the allocator history was off"
    return WindowAllocations(
        rank=artifact.rank, window=artifact.window, devices=devices, trace=artifact.file, problem=problem
    )


def ring_of(ring: Replay, steps: Sequence[tuple[int, int, int]] = ()) -> DeviceAllocations:
    """Return the allocations of one device, relative to the live bytes at the start of its history.

    Args:
        ring: the replayed history; it has events. Without times (torch before 2.2) all times are 0.
        steps: (start, end, number) of the steps in Unix ns, by time.

    """
    start = ring.live_at(-1).requested_bytes
    live = [ring.live_at(event).requested_bytes - start for event in range(ring.events)]
    times = [(event.time_us or 0) * 1000 for event in ring.snapshot.events]
    held = [life for life in ring.lives if life.born <= ring.peak_event < life.died]
    known = [life for life in held if life.born >= 0 and ring.snapshot.stacks[life.stack]]
    old_bytes = sum(life.requested_size for life in held if life.born < 0)
    peak_time = times[max(ring.peak_event, 0)]
    return DeviceAllocations(
        device=f"cuda:{ring.device}",
        start_bytes=start,
        peak_bytes=ring.peak_requested_bytes - start,
        peak_time_ns=peak_time,
        peak_step=_step_at(steps, peak_time),
        sites=_sites(ring, known, times, steps),
        unattributed_bytes=ring.peak_requested_bytes - old_bytes - sum(life.requested_size for life in known),
        freed_outside_bytes=start - old_bytes,
        curve=tuple((times[i], live[i]) for i in curve_corners(live)),
        steps=tuple(_step_bytes(step, times, live) for step in steps if _holds(step, times)),
        marks=(),
        allocations=sum(event.action == _ACTION for event in ring.snapshot.events),
    )


class _Place(NamedTuple):
    stack: tuple[Frame, ...]
    step: int | None


def _sites(
    ring: Replay, lives: Sequence[BlockLife], times: Sequence[int], steps: Sequence[tuple[int, int, int]]
) -> tuple[Site, ...]:
    held: Counter[_Place] = Counter()
    blocks: Counter[_Place] = Counter()
    for life in lives:
        place = _Place(ring.snapshot.stacks[life.stack], _step_at(steps, times[life.born]))
        held[place] += life.requested_size
        blocks[place] += 1
    return tuple(_site(place, count, blocks[place]) for place, count in held.most_common())


def _site(place: _Place, count: int, blocks: int) -> Site:
    line = user_frame(place.stack)
    return Site(
        operator=native_site(place.stack) or _ACTION,
        module=None,
        line=str(line) if line else None,
        stack=tuple(str(frame) for frame in place.stack if frame.is_python),
        step=place.step,
        phase=None,
        bytes=count,
        blocks=blocks,
    )


def _step_at(steps: Sequence[tuple[int, int, int]], time_ns: int) -> int | None:
    before = bisect_right(steps, time_ns, key=lambda step: step[0])
    if not before or steps[before - 1][1] < time_ns:
        return None
    return steps[before - 1][2]


def _holds(step: tuple[int, int, int], times: Sequence[int]) -> bool:
    """Return whether the history covers a whole step."""
    return times[0] <= step[0] and step[1] <= times[-1]


def _step_bytes(step: tuple[int, int, int], times: Sequence[int], live: Sequence[int]) -> StepBytes:
    first, last = (bisect_right(times, time) for time in step[:2])
    highest = max(range(max(first - 1, 0), last), key=live.__getitem__)
    at_start = live[first - 1] if first else 0
    return StepBytes(
        step=step[2],
        start_bytes=at_start,
        peak_bytes=live[highest],
        peak_time_ns=max(times[highest], step[0]),
        end_bytes=live[last - 1],
    )
