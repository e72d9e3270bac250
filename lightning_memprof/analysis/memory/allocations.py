"""From an operator trace's `[memory]` events to live bytes over time, the peak, and who holds the bytes at the peak.

A trace knows what was allocated and freed while it was recorded. On a device its bytes are the allocator's own, blocks
as they are handed out, so that what lay there before is known as a number (`start_bytes`) and may be freed meanwhile.
On the host torch notes the blocks that it saw allocated under a profiler, and notes no free between two profiles: its
totals, and frees of blocks that are not this trace's, mean nothing there and are left out.

An operator is the innermost one that ran in the allocating thread, but for those that only allocate for another. A
backward operator belongs to the module, and to the Python line, of the forward operator that made its autograd node.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

from lightning_memprof.analysis.memory.columns import DeviceMemory, MemoryColumns, MemoryTrace, read_memory
from lightning_memprof.analysis.memory.model import (
    DeviceAllocations,
    MarkBytes,
    Site,
    StepBytes,
    WindowAllocations,
    curve_corners,
)
from lightning_memprof.analysis.run.load import Artifact, Run
from lightning_memprof.analysis.snapshot.rings import ring_allocations
from lightning_memprof.analysis.stacks import Frame, user_frame
from lightning_memprof.analysis.trace.threads import HostRanges
from lightning_memprof.artifacts.naming import TraceName
from lightning_memprof.errors import ArtifactError

__all__ = [
    "DeviceAllocations",
    "MarkBytes",
    "Origin",
    "Origins",
    "Site",
    "StepBytes",
    "WindowAllocations",
    "counted_bytes",
    "run_allocations",
    "window_allocations",
]

_TRACE_COLLECTOR: Final = "operator_trace"
# They allocate for the operator that called them; alone they are the operator.
_ALLOCATING: Final = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::resize_",
        "aten::_resize_output_",
    }
)


def run_allocations(run: Run) -> tuple[WindowAllocations, ...]:
    """Read what every window of a run knows of its memory, rank after rank, window after window.

    That is its operator trace and, where that has nothing of a CUDA device, the last allocator snapshot of the window.
    What is damaged or was recorded without allocations is a `problem`.
    """
    traces = [
        artifact for artifact in run.artifacts if artifact.type == "trace" and artifact.collector == _TRACE_COLLECTOR
    ]
    found = [_read(trace) for trace in traces]
    found += ring_allocations(run, found)
    return tuple(sorted(found, key=lambda allocation: (allocation.rank, allocation.window or 0, str(allocation.trace))))


def _read(artifact: Artifact) -> WindowAllocations:
    try:
        devices = window_allocations(artifact.file)
    except ArtifactError as error:
        return WindowAllocations(artifact.rank, artifact.window, (), artifact.file, str(error))
    problem = None if devices else "its trace has no allocations: record it with profile_memory=True"
    return WindowAllocations(artifact.rank, artifact.window, devices, artifact.file, problem)


def window_allocations(trace: Path) -> tuple[DeviceAllocations, ...]:
    """What a trace says about the memory of each device that it saw allocate, the host first.

    Reads the file once; about 40 bytes an event are kept until its end.

    Returns:
        One for each device; none where the trace was recorded without `profile_memory`.

    Raises:
        ArtifactError: the trace is missing, damaged or cut off.

    """
    name = TraceName.parse(trace.name)
    columns = read_memory(trace, name.stage if name else "fit")
    origins = Origins(columns)
    return tuple(_device(columns, device, memory, origins) for device, memory in sorted(columns.devices.items()))


def _device(trace: MemoryTrace, device: DeviceMemory, memory: MemoryColumns, origins: Origins) -> DeviceAllocations:
    deltas = counted_bytes(device, memory)
    live = tuple(accumulate(deltas))
    peak = max(range(len(live)), key=live.__getitem__)
    # Where all is freed and nothing allocated, the most there was is what there was before.
    count = peak + 1 if live[peak] > 0 else 0
    sites, unattributed, freed_outside = _held(memory, deltas, count, origins)
    time = trace.origin_ns + memory.time[peak if count else 0]
    return DeviceAllocations(
        device=str(device),
        start_bytes=None if device.is_host or not memory.total[0] else memory.total[0] - memory.bytes[0],
        peak_bytes=live[peak] if count else 0,
        peak_time_ns=time,
        peak_step=trace.step_at(time),
        sites=sites,
        unattributed_bytes=unattributed,
        freed_outside_bytes=freed_outside,
        curve=tuple((trace.origin_ns + memory.time[i], live[i]) for i in curve_corners(live)),
        steps=tuple(_steps(trace, memory, live)),
        marks=tuple(
            MarkBytes(trace.step_at(time), point, time, _live_at(memory, live, time - trace.origin_ns))
            for time, point in trace.points
        ),
        allocations=sum(count > 0 for count in memory.bytes),
    )


def counted_bytes(device: DeviceMemory, memory: MemoryColumns) -> array[int]:
    """The bytes by which each event changes what is live; 0 for a free that means nothing (see above)."""
    deltas = array("q", memory.bytes)
    if not any(memory.address):  # traces before torch 1.11: there is nothing to tell blocks by
        return deltas
    live: dict[int, int] = {}
    for i, (address, count) in enumerate(zip(memory.address, memory.bytes, strict=True)):
        if count >= 0:
            # Its free was not seen, a thread that is not recorded did it.
            deltas[i] -= live.get(address, 0)
            live[address] = count
        elif live.pop(address, None) is None and device.is_host:
            deltas[i] = 0
    return deltas


def _held(memory: MemoryColumns, deltas: array[int], count: int, origins: Origins) -> tuple[tuple[Site, ...], int, int]:
    """Who holds what is live after the first `count` events; the bytes of no known operator; those freed of before."""
    live: dict[int, int] = {}
    freed_outside = unattributed = 0
    for i in range(count):
        if not memory.address[i]:
            unattributed += deltas[i]
        elif memory.bytes[i] >= 0:
            live[memory.address[i]] = i
        elif live.pop(memory.address[i], None) is None:
            freed_outside -= deltas[i]
    held: Counter[Origin] = Counter()
    blocks: Counter[Origin] = Counter()
    for i in live.values():
        origin = origins.of(memory, i)
        if origin.operator is None:
            unattributed += memory.bytes[i]
        else:
            held[origin] += memory.bytes[i]
            blocks[origin] += 1
    sites = [_site(origin, count, blocks[origin]) for origin, count in held.items()]
    return tuple(sorted(sites, key=lambda site: -site.bytes)), unattributed, freed_outside


class Origin(NamedTuple):
    """Who allocated: operator, module, phase and step as in :class:`Site`, Python frames innermost first."""

    operator: str | None
    module: str | None
    phase: str | None
    stack: tuple[Frame, ...]
    step: int | None = None


def _site(origin: Origin, count: int, blocks: int) -> Site:
    line = user_frame(origin.stack)
    return Site(
        operator=origin.operator or "",
        module=origin.module,
        line=str(line) if line else None,
        stack=tuple(map(str, origin.stack)),
        step=origin.step,
        phase=origin.phase,
        bytes=count,
        blocks=blocks,
    )


class Origins:
    """Who allocated, found once for each range that did."""

    def __init__(self, trace: MemoryTrace) -> None:
        """Take a trace whose ranges are nested."""
        self._trace = trace
        self._ranges: HostRanges = trace.ranges
        self._forward_threads = self._ranges.forward_threads()
        self._found: dict[tuple[int, int], Origin] = {}

    def of(self, memory: MemoryColumns, i: int) -> Origin:
        """Say who made allocation `i`."""
        step = self._trace.step_at(self._trace.origin_ns + memory.time[i])
        return self._around(memory.thread[i], memory.inner[i])._replace(step=step)

    def _around(self, thread: int, position: int) -> Origin:
        found = self._found.get((thread, position))
        if found is None:
            found = self._found[thread, position] = self._look(thread, position)
        return found

    def _look(self, thread: int, position: int) -> Origin:
        operator = module = phase = None
        stack: list[Frame] = []
        forward: Origin | None = None
        nodes = self._ranges.threads[thread].nodes
        for at, label in self._ranges.chain(thread, position):
            if label.operator and (operator is None or operator in _ALLOCATING):
                operator = label.operator
            module = module or label.module
            phase = phase or label.phase
            if label.frame is not None:
                stack.append(label.frame)
            if forward is None and module is None and at in nodes:
                forward = self._forward_of(*nodes[at])
        if forward is not None:
            return Origin(operator, forward.module, phase, forward.stack or tuple(stack))
        return Origin(operator, module, phase, tuple(stack))

    def _forward_of(self, forward_thread: int, sequence: int) -> Origin | None:
        """Who ran the forward operator of an autograd node; None where the trace does not hold it."""
        thread = self._forward_threads.get(forward_thread)
        if thread is None:
            return None
        position = self._ranges.threads[thread].created.get(sequence)
        return None if position is None else self._around(thread, position)


def _live_at(memory: MemoryColumns, live: Sequence[int], time: int) -> int:
    done = bisect_right(memory.time, time)
    return live[done - 1] if done else 0


def _steps(trace: MemoryTrace, memory: MemoryColumns, live: Sequence[int]) -> Iterator[StepBytes]:
    for start, end, step in trace.steps:
        at_start, at_end = _live_at(memory, live, start), _live_at(memory, live, end)
        inside = range(bisect_right(memory.time, start), bisect_right(memory.time, end))
        highest = max(inside, key=live.__getitem__, default=None)
        if highest is None or live[highest] < at_start:
            yield StepBytes(step, at_start, at_start, trace.origin_ns + start, at_end)
        else:
            yield StepBytes(step, at_start, live[highest], trace.origin_ns + memory.time[highest], at_end)
