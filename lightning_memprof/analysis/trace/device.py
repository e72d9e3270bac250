"""What ran on the devices of a trace: kernels, copies and memory sets of all streams."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_memprof.analysis.trace.columns import Kind, TraceColumns
from lightning_memprof.analysis.trace.intervals import Column, Intervals, union
from lightning_memprof.analysis.trace.model import Kernel, KernelKind

__all__ = ["DeviceEvents", "Totals", "device_events", "kernels", "totals_by"]

# NCCL and RCCL say so in their kernels' names; the others are libraries and torch's own kernels that move between
# devices. What a compiler fused is named after the operators in it: not a collective.
_COMMUNICATES: Final = re.compile(
    r"nccl|rccl|mscclpp|nvshmem|deep_ep::|cross_device_reduce|(one|two)_shot_all_reduce|multimem_\w*all_\w+",
    re.IGNORECASE,
)
_FUSED: Final = "triton_"


@dataclass(frozen=True, kw_only=True)
class DeviceEvents:
    """Device events in the order of their starts, and the times in which there were any.

    Attributes:
        rows: ``(n,)`` positions in the trace's columns.
        communicates: ``(n,)`` whether it is a collective or a message between devices.
        copies: ``(n,)`` whether it copies or sets memory.
        busy: when anything ran; ``compute``, ``communication`` and ``memory_copy`` likewise.
    """

    rows: NDArray[np.int64]
    communicates: NDArray[np.bool_]
    copies: NDArray[np.bool_]
    busy: Intervals
    compute: Intervals
    communication: Intervals
    memory_copy: Intervals


@dataclass(frozen=True)
class Totals:
    """Count and sum of durations by key, and where the longest is; ``keys`` are those that occur."""

    keys: NDArray[np.int64]
    counts: NDArray[np.int64]
    sums: Column
    longest: NDArray[np.int64]


def device_events(columns: TraceColumns) -> DeviceEvents:
    """Find the device events of a trace."""
    rows = columns.rows(Kind.KERNEL, Kind.MEMORY_COPY, Kind.MEMORY_SET)
    rows = rows[np.argsort(columns.starts[rows], kind="stable")]
    copies = columns.kinds[rows] != Kind.KERNEL
    names = columns.names[rows]
    by_name = np.array([_communicates(name) for name in columns.name_of] or [False])
    by_argument = np.array([each.row for each in columns.collectives if "Collective name" in each.span.args], np.int64)
    communicates = (by_name[names] | np.isin(rows, by_argument)) & ~copies

    def when(chosen: NDArray[np.bool_]) -> Intervals:
        return union(columns.starts[rows[chosen]], columns.ends[rows[chosen]])

    return DeviceEvents(
        rows=rows,
        communicates=communicates,
        copies=copies,
        busy=union(columns.starts[rows], columns.ends[rows]),
        compute=when(~copies & ~communicates),
        communication=when(communicates),
        memory_copy=when(copies),
    )


def totals_by(keys: NDArray[np.int32] | NDArray[np.int64], durations: Column) -> Totals:
    """Sum durations by key."""
    order = np.lexsort((durations, keys))
    found, begins, counts = np.unique(keys[order], return_index=True, return_counts=True)
    sums = np.add.reduceat(durations[order], begins) if len(order) else durations[:0]
    return Totals(found.astype(np.int64), counts, sums, order[begins + counts - 1])


def kernels(columns: TraceColumns, device: DeviceEvents) -> tuple[Kernel, ...]:
    """Return all launches by kernel, longest first."""
    kinds: tuple[KernelKind, ...] = ("compute", "communication", "memory_copy")
    number = np.where(device.copies, 2, np.where(device.communicates, 1, 0))
    keys = columns.names[device.rows].astype(np.int64) * len(kinds) + number
    durations = columns.ends[device.rows] - columns.starts[device.rows]
    found = totals_by(keys, durations)
    rows = [
        Kernel(
            name=columns.name_of[key // len(kinds)],
            kind=kinds[key % len(kinds)],
            count=count,
            total_ns=sum_,
            max_ns=most,
        )
        for key, count, sum_, most in zip(
            found.keys.tolist(),
            found.counts.tolist(),
            found.sums.tolist(),
            durations[found.longest].tolist(),
            strict=True,
        )
    ]
    return tuple(sorted(rows, key=lambda kernel: (-kernel.total_ns, kernel.name)))


def _communicates(name: str) -> bool:
    return not name.startswith(_FUSED) and _COMMUNICATES.search(name) is not None
