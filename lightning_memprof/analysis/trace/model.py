"""What an analysis says of one operator trace; times are nanoseconds, and absolute ones Unix epoch time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = [
    "Collective",
    "Copies",
    "GpuTimes",
    "HostOperators",
    "IdleCause",
    "Kernel",
    "Operator",
    "RuntimeCall",
    "StepTimes",
    "Synchronization",
    "TraceReport",
    "TraceStep",
]

KernelKind = Literal["compute", "communication", "memory_copy"]
Cause = Literal["data_loading", "synchronization", "allocator", "garbage", "python", "operators", "launch", "queue"]


@dataclass(frozen=True, kw_only=True)
class GpuTimes:
    """What the devices did in a stretch of time: unions over all streams, so that what overlaps counts once.

    ``busy_ns`` and ``idle_ns`` add up to ``window_ns``; communication is exposed where nothing is computed meanwhile.
    """

    window_ns: int
    busy_ns: int
    idle_ns: int
    compute_ns: int
    communication_ns: int
    memory_copy_ns: int
    communication_overlapped_ns: int
    communication_exposed_ns: int


@dataclass(frozen=True, kw_only=True)
class StepTimes(GpuTimes):
    """The same within the steps (``ProfilerStep#N`` on the host), with the time in which batches were loaded.

    ``data_loading_exposed_ns`` is the part of it in which no device was busy; None where that was not computed.
    """

    data_loading_ns: int
    mean_step_ns: int
    data_loading_exposed_ns: int | None = None


@dataclass(frozen=True, kw_only=True)
class TraceStep:
    """One step; ``busy_ns`` is None where the trace has no device, else when the work was done that the step launched.

    It may go on behind the step's end, and of several steps at once; work of unknown origin belongs to the step in
    which it began, and behind the last one to the last.
    """

    number: int
    start_ns: int
    duration_ns: int
    busy_ns: int | None
    data_loading_ns: int


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """All launches of one kernel, or all copies of one kind, by name; ``total_ns`` is their sum, streams not united."""

    name: str
    kind: KernelKind
    count: int
    total_ns: int
    max_ns: int


@dataclass(frozen=True, kw_only=True)
class IdleCause:
    """Idle time of the device within the GPU window, by what the launching thread did meanwhile.

    ``launch``: the next work was launched, or other calls of the runtime were made. Nothing is a ``tail`` as yet.

    ``example`` names the operator, call or range that took the most of it. The causes add up to ``idle_ns``.
    ``longest_start_ns`` is when the longest one began.
    """

    cause: Cause
    total_ns: int
    count: int
    longest_ns: int
    example: str
    longest_start_ns: int | None = None


@dataclass(frozen=True, kw_only=True)
class RuntimeCall:
    """All calls of one function of the driver or its runtime, such as ``cudaMalloc``.

    ``longest_start_ns`` is when the longest one began.
    """

    name: str
    count: int
    total_ns: int
    max_ns: int
    longest_start_ns: int | None = None


@dataclass(frozen=True, kw_only=True)
class Operator:
    """All calls of one operator on the host; ``own_ns`` is without the operators that they called."""

    name: str
    count: int
    own_ns: int
    total_ns: int
    max_ns: int


@dataclass(frozen=True, kw_only=True)
class Synchronization:
    """All calls by which one operator, or the program itself, made the host wait for the device.

    ``name`` is the outermost operator around the call (``aten::item``), else the call (``cudaStreamSynchronize``).
    The host waits ``total_ns``; the devices are idle ``gap_ns`` in the gaps that begin while it waits, or right after,
    because nothing was queued meanwhile: that is what the calls cost, but for batches that were loaded then. A call
    that no kernel follows counts to no gap.
    """

    name: str
    count: int
    total_ns: int
    gap_ns: int
    longest_gap_ns: int
    longest_start_ns: int | None = None


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All collectives of one kind and size in one process group; ``bytes_each`` is None where the trace has no size."""

    name: str
    group: str
    bytes_each: int | None
    count: int
    total_ns: int
    median_ns: int
    max_ns: int
    exposed_ns: int
    longest_start_ns: int | None = None


@dataclass(frozen=True, kw_only=True)
class Copies:
    """All copies of one kind (``HtoD``, ``DtoH``, ``DtoD``); ``is_pageable`` is None where the trace does not say.

    ``exposed_ns`` is the part of ``total_ns`` in which no kernel ran, None where that was not computed.
    """

    kind: str
    is_pageable: bool | None
    count: int
    total_ns: int
    bytes: int | None
    exposed_ns: int | None = None
    longest_start_ns: int | None = None


@dataclass(frozen=True, kw_only=True)
class HostOperators:
    """A typical step on a host without a device: its operators, and the Python between them.

    ``operators`` are those that call no other, and ``median_ns`` is theirs. ``small_ns`` passes in operators during
    stretches so short that calling them takes as long as what they compute, ``between_ns`` in short stretches between
    operators. ``events`` were recorded in the step, each of which took time too. ``names`` and ``places`` are the
    operators that the program itself called, by name and by the innermost module or range around them, most first.
    """

    steps: int
    step_ns: int
    operators: int
    median_ns: int
    small_ns: int
    between_ns: int
    events: int
    names: tuple[tuple[str, int], ...]
    places: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class TraceReport:
    """One trace.

    Attributes:
        file: the trace.
        rank: global rank, None where the trace has none; ``world_size`` likewise.
        devices: names of the devices on which something ran.
        start_ns: Unix time of the first event, from the trace's base; 0 at the base where it has none.
        end_ns: the same of the last event's end.
        events: how many events the file has.
        gpu_window: from the first device event's start to the last one's end; None without a device event.
        step_window: from the first step's start to the last one's end; None without steps or without a device event.
        steps: each step once, by number.
        kernels: by total time, longest first.
        idle: by total time, longest first.
        runtime_calls: by total time, longest first.
        collectives: by total time, longest first.
        copies: by total time, longest first.
        missing: what the trace lacks, a sentence each.
        synchronizations: by ``gap_ns``, longest first.
        profiler_overhead: events of the profiler's own work (category ``overhead``) by name, longest first.
        allocator_spans: start and end of each call that gets device memory from the driver or gives it back
            (``cudaMalloc``, ``cudaFree``, ``cuMemCreate``, ``hipMalloc``, ...) by start; at most 10,000, the longest.
        operators: of a trace without a device event, the most time of their own first.
        recorded_with: options that the trace says were on: ``with_stack``, ``profile_memory``, ``record_shapes``.
        host_operators: of a trace with steps and without a device event, else None.
    """

    file: Path
    rank: int | None
    world_size: int | None
    devices: tuple[str, ...]
    start_ns: int
    end_ns: int
    events: int
    gpu_window: GpuTimes | None
    step_window: StepTimes | None
    steps: tuple[TraceStep, ...]
    kernels: tuple[Kernel, ...]
    idle: tuple[IdleCause, ...]
    runtime_calls: tuple[RuntimeCall, ...]
    collectives: tuple[Collective, ...]
    copies: tuple[Copies, ...]
    missing: tuple[str, ...]
    synchronizations: tuple[Synchronization, ...] = ()
    profiler_overhead: tuple[RuntimeCall, ...] = ()
    allocator_spans: tuple[tuple[int, int], ...] = ()
    recorded_with: tuple[str, ...] = ()
    operators: tuple[Operator, ...] = ()
    host_operators: HostOperators | None = None
