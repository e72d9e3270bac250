"""Allocations of a run by window: live bytes over time, the peak, and the allocation sites of the bytes at the peak.

Read from operator traces and, for windows whose trace has no CUDA memory, from allocator snapshots. A trace counts the
blocks that were allocated and freed while it was recorded, above the bytes at its start (`start_bytes`). Snapshots have
allocation sites but no modules, and operators only in C++ frames (otherwise `alloc`); their bytes are requested bytes,
and those without a stack are unattributed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from lightning_memprof.account.memory.blocks import Blocks, read_blocks
from lightning_memprof.account.memory.columns import Origin, Step, step_at
from lightning_memprof.account.memory.model import (
    DeviceAllocations,
    MarkBytes,
    Site,
    StepBytes,
    WindowAllocations,
    curve_corners,
)
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.model import ArtifactFile, Rank, Run
from lightning_memprof.read.stacks import user_frame

_TRACE_COLLECTOR: Final = "operator_trace"


def run_allocations(run: Run) -> tuple[WindowAllocations, ...]:
    """Return the allocations of every window of a run, by rank and window.

    They are read from the window's operator trace and, where that has no CUDA memory, from its last allocator snapshot.
    A damaged file, or one recorded without allocations, is a `problem`.
    """
    traces = (found for found in run.artifacts if found.type == "trace" and found.collector == _TRACE_COLLECTOR)
    found = [_read(trace, "the trace has no allocations: record it with profile_memory=True") for trace in traces]
    known = {
        (allocation.rank, allocation.window)
        for allocation in found
        for device in allocation.devices
        if device.device.startswith("cuda")
    }
    last = {
        (artifact.rank, artifact.window): artifact
        for artifact in run.artifacts
        if artifact.type == "snapshot" and artifact.window is not None
    }
    pulses = {rank.rank: list(_pulse_steps(rank)) for rank in run.ranks}
    found += (
        _read(artifact, "the snapshot has no events: the allocator history was off", pulses.get(artifact.rank, ()))
        for key, artifact in last.items()
        if key not in known
    )
    return tuple(sorted(found, key=lambda allocation: (allocation.rank, allocation.window or 0, str(allocation.trace))))


def _pulse_steps(rank: Rank) -> Iterator[Step]:
    for row in rank.pulse:
        step, start, duration = row["step"], row["start_ns"], row["duration_ns"]
        if step is not None and start is not None and duration is not None:
            yield start, start + duration, step


def _read(artifact: ArtifactFile, empty: str, pulse: Sequence[Step] = ()) -> WindowAllocations:
    devices: tuple[DeviceAllocations, ...] = ()
    problem: str | None
    try:
        found = read_blocks(artifact.file)
        devices = tuple(device_allocations(blocks, pulse) for blocks in found if blocks.times)
        problem = None if devices else empty
    except ArtifactError as error:
        problem = str(error)
    return WindowAllocations(
        rank=artifact.rank, window=artifact.window, devices=devices, trace=artifact.file, problem=problem
    )


def window_allocations(trace: Path) -> tuple[DeviceAllocations, ...]:
    """Return the allocations of each device of a trace, as :func:`read_blocks` has its blocks.

    Raises:
        ArtifactError: the trace is missing, damaged or truncated.
    """
    return tuple(map(device_allocations, read_blocks(trace)))


def device_allocations(blocks: Blocks, pulse: Sequence[Step] = ()) -> DeviceAllocations:
    """Return the allocations of one device; there are events.

    Args:
        blocks: its blocks.
        pulse: steps of a snapshot, which has none itself; it has the bytes of those that its history covers.
    """
    live, times, peak = blocks.live(), blocks.times, blocks.peak
    if peak is None:
        peak = max(range(len(live)), key=live.__getitem__)
        # If nothing was allocated above the start, the peak is at the start.
        peak = peak if live[peak] > 0 else -1
    steps = blocks.steps or pulse
    covered = blocks.steps or [step for step in pulse if blocks.start <= step[0] and step[1] <= blocks.end]
    sizes = list(zip(blocks.born, blocks.died, blocks.size, strict=True))
    held = [i for i, (born, died, _) in enumerate(sizes) if 0 <= born <= peak < died]
    origins = {i: blocks.origins[blocks.place[i]] for i in held}
    known = [i for i in held if origins[i].operator is not None]
    return DeviceAllocations(
        device=blocks.device,
        start_bytes=blocks.start_bytes,
        peak_bytes=live[peak] if peak >= 0 else 0,
        peak_time_ns=times[max(peak, 0)],
        peak_step=step_at(steps, times[max(peak, 0)]),
        sites=_sites((origins[i], step_at(steps, times[blocks.born[i]]), blocks.size[i]) for i in known),
        unattributed_bytes=sum(blocks.size[i] for i in held) - sum(blocks.size[i] for i in known),
        freed_outside_bytes=sum(size for born, died, size in sizes if born < 0 and died <= peak),
        curve=tuple((times[i], live[i]) for i in curve_corners(live)),
        steps=tuple(_steps(covered, times, live)),
        marks=tuple(
            MarkBytes(step=step_at(steps, time), point=point, time_ns=time, live_bytes=_live_at(times, live, time))
            for time, point in blocks.points
        ),
        allocations=sum(born >= 0 for born in blocks.born),
    )


def _sites(blocks: Iterable[tuple[Origin, int | None, int]]) -> tuple[Site, ...]:
    """Sum the bytes of live blocks by origin and step, largest first."""
    live: Counter[tuple[Origin, int | None]] = Counter()
    counts: Counter[tuple[Origin, int | None]] = Counter()
    for origin, step, size in blocks:
        live[origin, step] += size
        counts[origin, step] += 1
    return tuple(
        Site(
            operator=origin.operator or "",
            module=origin.module,
            line=str(frame) if (frame := user_frame(origin.stack)) else None,
            stack=tuple(str(frame) for frame in origin.stack if frame.is_python),
            step=step,
            phase=origin.phase,
            bytes=size,
            blocks=counts[origin, step],
        )
        for (origin, step), size in live.most_common()
    )


def _live_at(times: Sequence[int], live: Sequence[int], time: int) -> int:
    done = bisect_right(times, time)
    return live[done - 1] if done else 0


def _steps(steps: Iterable[Step], times: Sequence[int], live: Sequence[int]) -> Iterator[StepBytes]:
    """Yield the live bytes of steps (start, end, number) in Unix ns."""
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
            peak_time_ns=time,
            end_bytes=_live_at(times, live, end),
        )
