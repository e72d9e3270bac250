"""The collectives of a trace, by name, group and size."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from lightning_memprof.analysis.trace.columns import Kind, TraceColumns
from lightning_memprof.analysis.trace.communication import Span, collectives_among, described
from lightning_memprof.analysis.trace.device import DeviceEvents
from lightning_memprof.analysis.trace.intervals import Column, Intervals, length_before, union
from lightning_memprof.analysis.trace.model import Collective
from lightning_memprof.analysis.trace.steps import launches

__all__ = ["trace_collectives"]

_KERNEL: Final = re.compile(r"[nr]ccl(?:Dev)?Kernel_?([A-Za-z]+)")
_CAMEL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
_ON_HOST: Final = ("gloo:", "mpi:", "ucc:")
_UNKNOWN: Final = "unknown"
_GENERIC: Final = "Generic"  # RCCL has one kernel for all


class _One(NamedTuple):
    name: str
    group: str
    bytes: int | None
    start: int
    end: int
    on_device: bool


def trace_collectives(columns: TraceColumns, device: DeviceEvents) -> tuple[Collective, ...]:
    """Return the collectives and the messages between two ranks, longest first.

    One on a device is exposed where no device computes. One on the host (gloo) is exposed where, in addition, no other
    thread is inside an operator.
    """
    found = list(_all(columns, device))
    exposed = _exposed(columns, device, found)
    kinds: dict[tuple[str, str, int | None], list[int]] = defaultdict(list)
    for i, call in enumerate(found):
        kinds[call.name, call.group, call.bytes].append(i)
    result = []
    for (name, group, size), members in kinds.items():
        durations = [found[i].end - found[i].start for i in members]
        longest = max(members, key=lambda i: found[i].end - found[i].start)
        result.append(
            Collective(
                name=name,
                group=group,
                bytes_each=size,
                count=len(members),
                total_ns=sum(durations),
                median_ns=round(median(durations)),
                max_ns=max(durations),
                exposed_ns=sum(int(exposed[i]) for i in members),
                longest_start_ns=columns.origin_ns + found[longest].start,
            )
        )
    return tuple(sorted(result, key=lambda each: (-each.total_ns, each.name, each.group)))


def _all(columns: TraceColumns, device: DeviceEvents) -> Iterator[_One]:
    launchers = _Launchers(columns)
    events = ((each.category, each.lane, each.span) for each in columns.collectives)
    known: dict[tuple[int, int], _One] = {}
    for each in collectives_among(events):
        call = _One(each.name, each.group, each.bytes, each.start_ns, each.end_ns, each.device != "host")
        if call.on_device:
            known[call.start, call.end] = call
        else:
            yield call
    rows = device.rows[device.communicates]
    for row, launch in zip(rows.tolist(), launches(columns, rows).tolist(), strict=True):
        start, end = int(columns.starts[row]), int(columns.ends[row])
        found = known.get((start, end))
        if found is None or found.bytes is None:
            name = found.name if found else _plain_name(columns.name_of[columns.names[row]])
            told = launchers.describe(launch) or (name, found.group if found else "", None)
            found = _One(*told, start, end, on_device=True)
        yield found


class _Launchers:
    """The annotations and calls on the host within which collectives were launched, by lane."""

    def __init__(self, columns: TraceColumns) -> None:
        self._columns = columns
        self._annotations: dict[int, list[Span]] = defaultdict(list)
        self._calls: dict[int, list[Span]] = defaultdict(list)
        for each in columns.collectives:
            lane, kind = int(columns.lanes[each.row]), int(columns.kinds[each.row])
            if kind == Kind.ANNOTATION:
                self._annotations[lane].append(each.span)
            elif kind == Kind.OPERATOR:
                self._calls[lane].append(each.span)
        for spans in (*self._annotations.values(), *self._calls.values()):
            spans.sort(key=lambda span: span.start_ns)

    def describe(self, launch: int) -> tuple[str, str, int | None] | None:
        """Return name, group and bytes of what the call at a row launched, None where nothing around it tells."""
        if launch < 0:
            return None
        lane, moment = int(self._columns.lanes[launch]), int(self._columns.starts[launch])
        annotation = _around(self._annotations.get(lane, []), moment)
        return described(annotation, _around(self._calls.get(lane, []), moment)) if annotation else None


def _around(spans: list[Span], moment: int) -> Span | None:
    at = bisect_right(spans, moment, key=lambda span: span.start_ns) - 1
    return spans[at] if at >= 0 and spans[at].end_ns > moment else None


def _plain_name(kernel: str) -> str:
    """What a kernel says of itself: `ncclDevKernel_AllReduce_Sum_f32_RING` is an all_reduce."""
    match = _KERNEL.search(kernel)
    if match is None:
        return kernel.partition("(")[0].partition("<")[0]
    return _UNKNOWN if match[1] == _GENERIC else _CAMEL.sub("_", match[1]).lower()


def _exposed(columns: TraceColumns, device: DeviceEvents, found: list[_One]) -> Column:
    starts = np.array([call.start for call in found], np.int64)
    ends = np.array([call.end for call in found], np.int64)
    computing = device.compute
    if not all(call.on_device for call in found):
        computing = _computing_anywhere(columns, device)
    on_device = np.array([call.on_device for call in found], np.bool_)

    def hidden(within: Intervals) -> Column:
        return length_before(within, ends) - length_before(within, starts)

    exposed: Column = ends - starts - np.where(on_device, hidden(device.compute), hidden(computing))
    return exposed


def _computing_anywhere(columns: TraceColumns, device: DeviceEvents) -> Intervals:
    """When a device computes or a thread that does not communicate itself is inside one of torch's operators."""
    talking = [each.row for each in columns.collectives if each.span.name.startswith(_ON_HOST)]
    lanes = np.unique(columns.lanes[np.array(talking, np.int64)])
    computes = np.array([name.startswith("aten::") for name in columns.name_of] or [False])
    rows = columns.rows(Kind.OPERATOR)
    rows = rows[computes[columns.names[rows]] & ~np.isin(columns.lanes[rows], lanes)]
    starts = np.append(device.compute.starts, columns.starts[rows])
    return union(starts, np.append(device.compute.ends, columns.ends[rows]))
