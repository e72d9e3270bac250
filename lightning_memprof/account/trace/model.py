"""Results of the analysis of one operator trace; times are nanoseconds, absolute ones Unix epoch time."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from lightning_memprof.account.ledger.model import TimeLedger
from lightning_memprof.account.parts import Part
from lightning_memprof.read.trace.communication import Collective

KernelKind = Literal["compute", "communication", "memory_copy"]
_MOSTLY = 0.5


class GpuTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Device time in a window: unions over all streams, so that overlapping events count once.

    ``busy_ns`` and ``idle_ns`` add up to ``window_ns``; communication is exposed where no device computes meanwhile.
    """

    window_ns: int
    busy_ns: int
    idle_ns: int
    compute_ns: int
    communication_ns: int
    memory_copy_ns: int
    communication_overlapped_ns: int
    communication_exposed_ns: int


class StepTimes(GpuTimes, frozen=True, kw_only=True):
    """The same within the steps (``ProfilerStep#N`` on the host), with the time in which batches were loaded."""

    data_loading_ns: int
    mean_step_ns: int


class TraceStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step; ``busy_ns`` is the device time of the work that it launched, None where the trace has no device.

    That work may end after the step, and overlap the work of other steps. Work without a known launch belongs to the
    step in which it began, and after the last step to the last one; work from before the recording to none.
    """

    number: int
    start_ns: int
    duration_ns: int
    busy_ns: int | None
    data_loading_ns: int


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """All launches of one kernel, or all copies of one kind, by name; ``total_ns`` is the sum over all streams."""

    name: str
    kind: KernelKind
    count: int
    total_ns: int
    max_ns: int


class IdleCause(msgspec.Struct, frozen=True, kw_only=True):
    """Idle time of the device in :attr:`TraceReport.window` with one cause: what the launching thread did meanwhile.

    The causes add up to ``idle_ns``; ``idle_launch`` is a call that launches the next work, or another one of the
    runtime.

    Attributes:
        count: number of gaps; ``longest_ns`` and ``longest_start_ns`` are of the longest one.
        example: operator, call, range or place in the program with the largest share, ``example_share``.
        launches: whether device work is launched inside the example.
        apart: the one with most of the time in which none is launched, ``apart_ns``.
        long_ns: half of the time is in gaps of this length or more.
    """

    cause: Part
    total_ns: int
    count: int
    longest_ns: int
    example: str
    longest_start_ns: int | None = None
    example_share: float = 0.0
    launches: bool = False
    apart: str = ""
    apart_ns: int = 0
    long_ns: int = 0

    @property
    def mostly_in(self) -> str:
        """The example if it has at least half of the time, else an empty string."""
        return self.example if self.example_share >= _MOSTLY else ""


class RuntimeCall(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one function of the driver or its runtime, such as ``cudaMalloc``.

    ``longest_start_ns`` is the start of the longest call.
    """

    name: str
    count: int
    total_ns: int
    max_ns: int
    longest_start_ns: int | None = None


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one operator on the host; ``self_ns`` is without the operators that it called."""

    name: str
    count: int
    self_ns: int
    total_ns: int
    max_ns: int


class Synchronization(msgspec.Struct, frozen=True, kw_only=True):
    """All calls by which one operator, or the program itself, made the host wait for the device.

    ``name`` is the outermost operator around the call (``aten::item``), else the call (``cudaStreamSynchronize``).
    The host waits ``total_ns``, and for ``busy_ns`` of it the device is busy. ``gap_ns`` is the cost: the device is
    idle that long in gaps that begin while the host waits, or right after, because nothing was queued; time in which a
    batch was loaded does not count. A call without a kernel after it has no gap. Of the gaps, ``own_ns`` would not be
    there without the waits.
    """

    name: str
    count: int
    total_ns: int
    gap_ns: int
    longest_gap_ns: int
    longest_start_ns: int | None = None
    busy_ns: int = 0
    own_ns: int = 0


class CollectiveTotals(msgspec.Struct, frozen=True, kw_only=True):
    """All collectives of one kind and size in one process group; ``bytes_each`` is None where the trace has no size.

    ``bus_bytes_per_s`` is the bus bandwidth of the fastest, which waited for other ranks the least; None where the
    trace does not tell how many ranks took part.
    """

    name: str
    group: str
    bytes_each: int | None
    count: int
    total_ns: int
    median_ns: int
    max_ns: int
    exposed_ns: int
    longest_start_ns: int | None = None
    bus_bytes_per_s: float | None = None


class Copies(msgspec.Struct, frozen=True, kw_only=True):
    """All copies of one kind (``HtoD``, ``DtoH``, ``DtoD``); ``is_pageable`` is None where the trace does not tell.

    ``exposed_ns`` is the part of ``total_ns`` in which no kernel ran, None if not computed.
    """

    kind: str
    is_pageable: bool | None
    count: int
    total_ns: int
    bytes: int | None
    exposed_ns: int | None = None
    longest_start_ns: int | None = None


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """The stretches of a trace in which a batch was loaded, in ns."""

    count: int = 0
    total_ns: int = 0
    max_ns: int = 0


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The program that was recorded, as far as the names in its trace tell.

    Attributes:
        is_lightning: whether Lightning's Trainer ran it.
        is_compiled: whether parts were compiled by ``torch.compile``.
        has_graphs: whether it launched CUDA graphs.
        has_stacks: whether Python functions were recorded.
        trains: whether it has a backward or an optimizer; True where it does not tell.
        is_ddp: whether DistributedDataParallel averages its gradients; True where it does not tell.
        loop_optimizer: class of an optimizer that updates its parameters one by one; empty where none is seen.
        loop_ns: device time of the kernels that it launches.
    """

    is_lightning: bool = True
    is_compiled: bool = False
    has_graphs: bool = False
    has_stacks: bool = False
    trains: bool = True
    is_ddp: bool = True
    loop_optimizer: str = ""
    loop_ns: int = 0


class TraceReport(msgspec.Struct, frozen=True, kw_only=True):
    """One trace.

    Attributes:
        file: the trace.
        rank: global rank, None where the trace has none; ``world_size`` likewise.
        devices: names of the devices with events.
        capabilities: major and minor number of the compute capability of each of them, (0, 0) where the trace has none.
        devices_busy_ns: busy time of each of several devices; empty for one, whose time is that of the GPU window.
        start_ns: Unix time of the first event; counts from 0 where the trace has no base time.
        end_ns: the same of the last event's end.
        events: number of events in the file.
        gpu_window: from the first device event's start to the last one's end, without steps to the end of a graph's
            capture behind it; None without a device event.
        step_window: from the first step's start to the last one's end; None without steps or without a device event.
        steps: each step once, by number.
        kernels: by total time, longest first.
        ahead_window: the steps as long as the device works for them, where that is longer than on the host or ends much
            later; else None.
        ahead_steps_ns: the time that the device takes for each of them, in order; else empty.
        is_sample: whether most events are missing from the file, so that idle times are unknown.
        idle: by total time, longest first.
        runtime_calls: by total time, longest first.
        collectives: by total time, longest first.
        copies: by total time, longest first.
        missing: facts that the trace does not have, a sentence each.
        device_use: what shows that the host uses a device (``calls cudaLaunchKernel``) of which the trace has no event;
            empty where it has one, or nothing shows it.
        synchronizations: by ``gap_ns``, longest first.
        profiler_overhead: events of the profiler's own work (category ``overhead``) by name, longest first.
        operators: of a trace without a device event, most self time first.
        recorded_with: enabled options: ``with_stack``, ``profile_memory``, ``record_shapes``.
        program: the recorded program.
        loads: loading of batches, in the whole trace.
        host_events: number of events of the program's threads: operators, ranges, Python functions, runtime calls.
        steady_allocations: calls that get or return device memory, within the steps (without steps the GPU window) and
            without those of a cold start; longest first.
        arrivals: start and end of each collective by start, without point-to-point operations; at most 20,000.
        host_ledger: the owners of the training thread's time in the steps, None without an operator.
        device_ledger: the owners of the device's time in the steps, None without a device event.
        is_steady: whether device ledger, idle times and gaps are those of a step outside windows, not of the recording.
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
    collectives: tuple[CollectiveTotals, ...]
    copies: tuple[Copies, ...]
    missing: tuple[str, ...]
    capabilities: tuple[tuple[int, int], ...] = ()
    synchronizations: tuple[Synchronization, ...] = ()
    profiler_overhead: tuple[RuntimeCall, ...] = ()
    recorded_with: tuple[str, ...] = ()
    operators: tuple[Operator, ...] = ()
    program: Program = Program()
    loads: Loads = Loads()
    host_events: int = 0
    steady_allocations: tuple[RuntimeCall, ...] = ()
    arrivals: tuple[Collective, ...] = ()
    host_ledger: TimeLedger | None = None
    device_ledger: TimeLedger | None = None
    is_steady: bool = False
    devices_busy_ns: tuple[int, ...] = ()
    ahead_window: StepTimes | None = None
    ahead_steps_ns: tuple[int, ...] = ()
    is_sample: bool = False
    device_use: str = ""

    @property
    def window(self) -> GpuTimes | None:
        """The time that the causes of idle time are of: the steps, else the first device event to the last."""
        return self.gpu_window if self.is_steady else self.work_window or self.gpu_window

    @property
    def work_window(self) -> StepTimes | None:
        """The steps as long as they last: the time that the device takes for them, where the host is ahead."""
        return self.ahead_window or self.step_window
