"""Calls of the device's runtime, copies of memory, and the profiler's own work, of a trace."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Final

import numpy as np

from lightning_memprof.analysis.trace.columns import Kind, TraceColumns
from lightning_memprof.analysis.trace.device import DeviceEvents, totals_by
from lightning_memprof.analysis.trace.intervals import length_before, union
from lightning_memprof.analysis.trace.model import Copies, RuntimeCall

__all__ = ["ALLOCATES", "READS_BACK", "WAITS", "allocator_spans", "calls", "copies"]

# Calls that return when the device is done, and those that get or return memory.
WAITS: Final = re.compile(r"(?:cuda|hip|cu)\w*Synchronize\w*\Z|(?:cuda|hip)Memcpy(?:WithStream|2D|3D)?\Z")
ALLOCATES: Final = re.compile(
    r"(?:cuda|hip|cu)(?:Ext)?(?:Host|Mem)?"
    r"(?:Malloc|Free|Alloc|Create|Release|Map|Unmap|AddressReserve|AddressFree)(?!\w*Event)\w*\Z"
)
# An operator that brings a number to the host: its wait may be inside a copy that no call of a runtime shows.
READS_BACK: Final = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"})

_OF_HOST_MEMORY: Final = re.compile("Host|Managed")
_MOST_SPANS: Final = 10_000
_COPY: Final = re.compile(r"Memcpy (\w+)(?: \((.*)\))?\Z")


def calls(columns: TraceColumns, kind: int) -> tuple[RuntimeCall, ...]:
    """Return the events of a kind by name, longest first."""
    rows = columns.rows(kind)
    found = totals_by(columns.names[rows], columns.ends[rows] - columns.starts[rows])
    result = []
    for key, count, total, longest in zip(found.keys, found.counts, found.sums, rows[found.longest], strict=True):
        result.append(
            RuntimeCall(
                name=columns.name_of[key],
                count=int(count),
                total_ns=int(total),
                max_ns=int(columns.ends[longest] - columns.starts[longest]),
                longest_start_ns=columns.origin_ns + int(columns.starts[longest]),
            )
        )
    return tuple(sorted(result, key=lambda call: (-call.total_ns, call.name)))


def allocator_spans(columns: TraceColumns) -> tuple[tuple[int, int], ...]:
    """Return start and end (Unix ns) of the calls that get or return device memory; the longest 10,000, by start."""
    named = np.array(
        [ALLOCATES.match(name) is not None and not _OF_HOST_MEMORY.search(name) for name in columns.name_of] or [False]
    )
    rows = columns.rows(Kind.RUNTIME)
    rows = rows[named[columns.names[rows]]]
    rows = rows[np.argsort(columns.starts[rows] - columns.ends[rows], kind="stable")[:_MOST_SPANS]]
    rows = rows[np.argsort(columns.starts[rows], kind="stable")]
    starts, ends = columns.origin_ns + columns.starts[rows], columns.origin_ns + columns.ends[rows]
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


def copies(columns: TraceColumns, device: DeviceEvents) -> tuple[Copies, ...]:
    """Return the copies by kind, longest first: Kineto names them ``Memcpy HtoD (Pageable -> Device)``."""
    rows = columns.rows(Kind.MEMORY_COPY)
    kernels = union(
        np.append(device.compute.starts, device.communication.starts),
        np.append(device.compute.ends, device.communication.ends),
    )
    found: dict[tuple[str, bool | None], list[int]] = defaultdict(list)
    for row, name in zip(rows.tolist(), columns.names[rows].tolist(), strict=True):
        found[_copy_kind(columns.name_of[name])].append(row)
    result = []
    for (kind, is_pageable), members in found.items():
        starts, ends = columns.starts[members], columns.ends[members]
        hidden = length_before(kernels, ends) - length_before(kernels, starts)
        sizes = [columns.copied.get(row) for row in members]
        known = [size for size in sizes if size is not None]
        total = int((ends - starts).sum())
        result.append(
            Copies(
                kind=kind,
                is_pageable=is_pageable,
                count=len(members),
                total_ns=total,
                bytes=sum(known) if len(known) == len(sizes) else None,
                exposed_ns=total - int(hidden.sum()),
                longest_start_ns=columns.origin_ns + int(starts[np.argmax(ends - starts)]),
            )
        )
    return tuple(sorted(result, key=lambda each: (-each.total_ns, each.kind)))


def _copy_kind(name: str) -> tuple[str, bool | None]:
    match = _COPY.match(name)
    if match is None:
        return name, None
    ends = (match[2] or "").lower()
    return match[1], True if "pageable" in ends else False if "pinned" in ends else None
