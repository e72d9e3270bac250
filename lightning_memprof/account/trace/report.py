"""The report of one operator trace: steps, device, kernels, copies, collectives, and the causes of idle time.

Device time is a union over all streams and devices of the trace, so that overlapping events count once.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from msgspec.structs import replace

from lightning_memprof.account.ledger.device import device_account
from lightning_memprof.account.ledger.host import host_ledger
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.collectives import trace_collectives
from lightning_memprof.account.trace.device import DeviceEvents, copies, kernels
from lightning_memprof.account.trace.host import calls, gives_work, operators, steady_allocations, synchronizations
from lightning_memprof.account.trace.model import GpuTimes, Loads, Program, StepTimes, TraceReport, TraceStep
from lightning_memprof.account.trace.spans import Step, skips_calls
from lightning_memprof.account.trace.table import EventTable, event_table
from lightning_memprof.artifacts.naming import TraceName
from lightning_memprof.read.trace.columns import HOST_KINDS, Kind, Progress, TraceColumns, read_columns
from lightning_memprof.read.trace.intervals import Intervals, clip, intersection, length, length_within
from lightning_memprof.units import format_ns

_OPTIONS: Final = ("with_stack", "profile_memory", "record_shapes")
# Names that tell a program: Lightning's ranges, what the compiler makes, backward and the optimizer.
_LIGHTNING: Final = ("[pl]", "[Strategy]", "[LightningModule]", "[Callback]")
_DDP: Final = re.compile(r"DistributedDataParallel\.")
_NODE: Final = re.compile("autograd::engine::evaluate_function")
_REDUCES: Final = re.compile("c10d::allreduce_")
_COMPILED: Final = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph", "triton_")
# An optimizer's steps, and the operators and kernels of those that update many parameters at once.
_OPTIMIZER: Final = re.compile(r"Optimizer\.step#(\w+)\.step\Z")
_AT_ONCE: Final = re.compile(r"aten::_(?:foreach|fused)_|multi_tensor_apply|FusedAdam|FusedOptimizer")
_TRAINS: Final = re.compile(r"backward|Optimizer\.|_bwd|wgrad|dgrad", re.IGNORECASE)
# Operators that only libraries of a device have.
_ON_DEVICE: Final = re.compile(r"aten::_?(?:thnn_)?(?:cudnn|miopen|cuda|fused_dropout)|triton_")
# A rank arrives at a few hundred collectives in a step.
_MOST_ARRIVALS: Final = 20_000
_LARGEST_RANK: Final = 1 << 31
_LATEST: Final = int(np.iinfo(np.int64).max)
_NO_RANK: Final = "no rank: torch writes it if a process group exists when the recording ends"


def trace_report(path: Path, progress: Progress | None = None) -> TraceReport:
    """Analyse one trace.

    Args:
        path: a Kineto JSON file of any year and any program, plain or gzip-compressed.
        progress: called now and then with the number of bytes read, and the size of the file.

    Raises:
        ArtifactError: the file is missing, damaged or truncated, or no trace.
    """
    table, name = event_table(read_columns(path, progress)), TraceName.parse(path.name)
    columns, device, steps, loading = table.columns, table.device, table.steps, table.loading
    window, is_sample = table.gpu, skips_calls(columns, table.device.compute)
    device_use = "" if window else _device_use(columns)
    rank, world_size = recorded_number(columns.metadata, "rank"), recorded_number(columns.metadata, "world_size")
    devices, capabilities, busy = zip(*_devices(columns, device), strict=True) if len(device.rows) else ((), (), ())
    device_ledger, idle = device_account(table)
    return TraceReport(
        file=path,
        rank=rank,
        world_size=world_size,
        devices=devices,
        capabilities=capabilities,
        devices_busy_ns=busy if len(busy) > 1 else (),
        start_ns=columns.origin_ns + (int(np.min(columns.starts)) if len(columns.starts) else 0),
        end_ns=columns.origin_ns + (int(np.max(columns.ends)) if len(columns.ends) else 0),
        events=columns.events,
        gpu_window=GpuTimes(**_times(device, window)) if window else None,
        step_window=_step_times(table, steps),
        ahead_window=_step_times(table, table.ahead),
        ahead_steps_ns=tuple(step.end - step.start for step in table.ahead),
        steps=_steps(columns, device, steps, loading),
        kernels=kernels(columns, device),
        is_sample=is_sample,
        device_use=device_use,
        idle=idle if _has_runtime(columns) else (),
        runtime_calls=calls(columns, columns.rows(Kind.RUNTIME)),
        collectives=trace_collectives(columns, device, table.collectives),
        copies=copies(columns, device),
        missing=tuple(_missing(rank, table, device_use, is_sample=is_sample)),
        synchronizations=synchronizations(table),
        profiler_overhead=calls(columns, columns.rows(Kind.OVERHEAD)),
        recorded_with=tuple(option for option in _OPTIONS if columns.metadata.get(option)),
        operators=() if window else operators(columns, table.host),
        program=_program(table),
        loads=_loads(loading),
        host_events=int(np.count_nonzero(np.isin(columns.kinds, HOST_KINDS))),
        steady_allocations=steady_allocations(table) if window else (),
        arrivals=table.arrivals[:_MOST_ARRIVALS],
        host_ledger=host_ledger(table, name.stage if name else "fit"),
        device_ledger=device_ledger,
    )


def of_rank(report: TraceReport, rank: int) -> TraceReport:
    """Return the report with a rank known from elsewhere, where the file does not have it."""
    if report.rank is not None:
        return report
    return replace(report, rank=rank, missing=tuple(text for text in report.missing if text != _NO_RANK))


def _loads(loading: Intervals) -> Loads:
    durations = loading.ends - loading.starts
    return Loads(count=len(durations), total_ns=int(durations.sum()), max_ns=int(durations.max(initial=0)))


def _program(table: EventTable) -> Program:
    columns = table.columns
    names, kinds = columns.name_of, columns.kinds
    optimizer = next((match[1] for name in names if (match := _OPTIMIZER.match(name))), "")
    loop = "" if any(_AT_ONCE.search(name) for name in names) else optimizer
    return Program(
        is_lightning=any(name.startswith(_LIGHTNING) for name in names),
        is_compiled=any(name.startswith(_COMPILED) for name in names),
        has_graphs=bool(np.any(table.part == Part.IDLE_GRAPH.number)),
        has_stacks=bool(np.any(kinds == Kind.PYTHON)),
        # Kernels alone do not tell.
        trains=not np.any(kinds == Kind.OPERATOR) or any(_TRAINS.search(name) for name in names),
        is_ddp=not np.any(kinds == Kind.OPERATOR) or any(map(_DDP.match, names)) or _reduces_in_backward(columns),
        loop_optimizer=loop,
        loop_ns=_optimizer_ns(columns, table.device) if loop else 0,
    )


def _reduces_in_backward(columns: TraceColumns) -> bool:
    """Return whether most all-reduces are called by nodes of autograd, as those of gradients are."""
    backward = columns.when(columns.rows_named(_NODE.match, Kind.OPERATOR))
    called = columns.starts[columns.rows_named(_REDUCES.match, Kind.OPERATOR)]
    return bool(2 * np.count_nonzero(length_within(backward, called, called + 1)) > len(called))


def _optimizer_ns(columns: TraceColumns, device: DeviceEvents) -> int:
    """Return the time of the kernels that compute and that the steps of optimizers launched."""
    steps = columns.when(columns.rows_named(_OPTIMIZER.match, Kind.ANNOTATION, Kind.OPERATOR))
    inside = length_within(steps, device.moments, device.moments + 1) > 0
    return length(columns.when(device.rows[inside & (device.part == Part.COMPUTE.number)]))


def _steps(columns: TraceColumns, device: DeviceEvents, steps: list[Step], loading: Intervals) -> tuple[TraceStep, ...]:
    """Return the steps, each with the device work that it launched.

    Work without a known launch belongs to the step in which it ran, and after the last step to the last one; work that
    was launched before the recording to none.
    """
    starts = np.array([step.start for step in steps], np.int64)
    owners = np.searchsorted(starts, device.moments, side="right") - 1
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(len(steps) + 1))
    found = (
        TraceStep(
            number=step.number,
            start_ns=columns.origin_ns + step.start,
            duration_ns=step.end - step.start,
            busy_ns=length(columns.when(device.rows[order[begin:end]])) if len(device.rows) else None,
            data_loading_ns=length(clip(loading, step.start, step.end)),
        )
        for step, begin, end in zip(steps, bounds[:-1], bounds[1:], strict=True)
    )
    return tuple(sorted(found, key=lambda step: (step.number, step.start_ns)))


def _times(device: DeviceEvents, spans: list[Step]) -> dict[str, int]:
    start, end = spans[0].start, max(span.end for span in spans)
    busy, compute, communication, copied = (
        clip(each, start, end) for each in (device.busy, device.compute, device.communication, device.memory_copy)
    )
    overlapped = length(intersection(communication, compute))
    window_ns = end - start - length(clip(device.unrecorded, start, end))
    return {
        "window_ns": window_ns,
        "busy_ns": length(busy),
        "idle_ns": window_ns - length(busy),
        "compute_ns": length(compute),
        "communication_ns": length(communication),
        "memory_copy_ns": length(copied),
        "communication_overlapped_ns": overlapped,
        "communication_exposed_ns": length(communication) - overlapped,
    }


def _step_times(table: EventTable, steps: list[Step]) -> StepTimes | None:
    if not steps or not len(table.device.rows):
        return None
    loading = clip(table.loading, steps[0].start, max(step.end for step in steps))
    return StepTimes(
        **_times(table.device, steps),
        data_loading_ns=length(loading),
        mean_step_ns=round(sum(step.end - step.start for step in steps) / len(steps)),
    )


def recorded_number(metadata: dict[str, Any], key: Literal["rank", "world_size"]) -> int | None:
    """Return the global rank, or the number of ranks, that a trace's metadata has, None where they have none."""
    found = metadata.get("distributedInfo")
    number = found.get(key) if isinstance(found, dict) else None
    return number if isinstance(number, int) and 0 <= number < _LARGEST_RANK else None


def _devices(columns: TraceColumns, device: DeviceEvents) -> list[tuple[str, tuple[int, int], int]]:
    """Return name, compute capability and busy ns of the devices with events; one without a name has its number.

    Where the program sees only some devices (HIP_VISIBLE_DEVICES), ROCm writes their numbers on the machine at events,
    and those in the program at properties: devices that are all alike are known without their numbers.
    """
    properties = columns.metadata.get("deviceProperties")
    known: dict[str, tuple[str, tuple[int, int]]] = {}
    if isinstance(properties, list):
        for each in properties:
            if isinstance(each, dict):
                major, minor = each.get("computeMajor"), each.get("computeMinor")
                capability = (major, minor) if isinstance(major, int) and isinstance(minor, int) else (0, 0)
                known[str(each.get("id"))] = (str(each.get("name")), capability)
    alike = set(known.values())
    unlisted = alike.pop() if len(alike) == 1 else None
    numbers = np.array([str(pid) for pid, *_ in columns.lane_of])[columns.lanes[device.rows]]
    return [
        (
            *(known.get(number) or unlisted or (f"device {number}", (0, 0))),
            length(columns.when(device.rows[numbers == number])),
        )
        for number in np.unique(numbers).tolist()
    ]


def _missing(rank: int | None, table: EventTable, device_use: str, *, is_sample: bool) -> list[str]:
    columns, device = table.columns, table.device
    missing = []
    if not len(columns.starts):
        missing.append("no events with a duration")
    if not len(device.rows):
        missing.append(
            f"no device events, although the host {device_use}: record the device's activities too"
            if device_use
            else "no device events: recorded on a CPU, or without the device's activities"
        )
    if not table.steps:
        missing.append("no steps: call the profiler's `step()` once per step, and `ProfilerStep#N` appears")
    if rank is None:
        missing.append(_NO_RANK)
    if is_sample:
        missing.append("most events: the numbers of its runtime calls have large gaps, so that idle times are unknown")
    if len(device.rows) and (kept_ns := length(clip(device.unrecorded, int(device.busy.starts[0]), _LATEST))):
        missing.append(
            f"work that takes up to {format_ns(kept_ns)}, for which launched work waits: it is of "
            "another process, or was launched before the recording"
        )
    if len(device.rows) and not _has_runtime(columns):
        missing.append("no calls of the device's runtime: the causes of idle time are unknown")
    return missing


def _device_use(columns: TraceColumns) -> str:
    """Return what shows that the host uses a device, empty for a program of the CPU: it may ask for a GPU and wait."""
    calls = columns.rows_named(gives_work, Kind.RUNTIME)
    if len(calls):
        return f"calls {columns.name(int(calls[0]))}"
    if columns.allocates_on:
        return f"allocates memory on {columns.allocates_on[0]}"
    if columns.launches_on:
        return f"launches work on {columns.launches_on}"
    operators = columns.rows_named(_ON_DEVICE.match, Kind.OPERATOR)
    return f"runs {columns.name(int(operators[0]))}" if len(operators) else ""


def _has_runtime(columns: TraceColumns) -> bool:
    return bool(np.any(columns.kinds == Kind.RUNTIME))
