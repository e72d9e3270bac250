"""The event table of a trace: each question about an event is answered once, for every ledger, list and chart."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.classify import event_parts
from lightning_memprof.account.trace.cold import capture_ends, cold_calls
from lightning_memprof.account.trace.collectives import collective_calls
from lightning_memprof.account.trace.device import DeviceEvents, device_events, device_steps, either
from lightning_memprof.account.trace.events import HostEvents
from lightning_memprof.account.trace.spans import Step, step_spans
from lightning_memprof.read.trace.columns import TraceColumns, read_columns
from lightning_memprof.read.trace.communication import Collective, CollectiveEvents, collective_events
from lightning_memprof.read.trace.intervals import Column, Intervals, difference, intersection, length_before


class DeviceTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """Bins of equal length from the first device event's start to the last one's end.

    Attributes:
        stretch_ns: length of a bin in ns.
        shares: by state the part of each bin's time, 0 to 1; they add up to 1. The states are parts, the first one that
            applies, and ``idle``: compute hides the rest; an idle device may wait for a batch.
        steps: number, start and end of each step in bins: 2.5 is the middle of the third.
    """

    stretch_ns: float
    shares: dict[str, list[float]]
    steps: tuple[tuple[int, float, float], ...]


class EventTable(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A trace with its events classified.

    Attributes:
        columns: kind, name, thread and times of each event.
        part: ``(n,)`` `Part.number` of each event, -1 for none: a device's work, or the cause of idle time during it.
        loading: the time in which a batch is loaded.
        device: the events of devices, with the calls that launched them.
        host: the events of the host, with their modules and operators.
        steps: those of the host, by start.
        ahead: the same as long as the device works for them; empty where that is the same time.
        gpu: from the first device event to the last one, without steps to the end of a graph's capture behind it: no
            kernel runs meanwhile; empty without an event.
    """

    columns: TraceColumns
    part: NDArray[np.int8]
    loading: Intervals
    device: DeviceEvents
    host: HostEvents
    steps: list[Step]
    ahead: list[Step]
    gpu: list[Step]

    @property
    def ranges(self) -> list[Step]:
        """The steps; without any the window of the device's events."""
        return self.steps or self.gpu

    @cached_property
    def arrivals(self) -> tuple[Collective, ...]:
        """The collectives that all ranks of a group join, by start."""
        return tuple(self._collective_events.collectives(self.columns.origin_ns))

    @cached_property
    def collectives(self) -> list[Collective]:
        """The collectives and point-to-point operations."""
        return list(collective_calls(self.columns, self.device, self._collective_events, self.arrivals))

    @cached_property
    def _collective_events(self) -> CollectiveEvents:
        return collective_events(self.columns)

    @cached_property
    def cold(self) -> Column:
        """Rows of the calls and operators that initialise something."""
        return cold_calls(self.columns, self.part, self.device, self.ranges)


def event_table(columns: TraceColumns) -> EventTable:
    """Return the event table of a trace."""
    part = event_parts(columns)
    # The training process waits for a batch, or makes one.
    loading = columns.when(np.flatnonzero(part == Part.IDLE_DATA.number))
    steps = step_spans(columns, loading)
    device = device_events(columns, part, steps)
    working = device_steps(columns, device, steps)
    captured = [] if steps else columns.ends[capture_ends(columns)].tolist()
    busy = device.busy
    return EventTable(
        columns=columns,
        part=part,
        loading=loading,
        device=device,
        host=HostEvents(columns),
        steps=steps,
        ahead=[] if working == steps else working,
        gpu=[Step(int(busy.starts[0]), max([int(busy.ends[-1]), *captured]), 0)] if len(busy.starts) else [],
    )


def device_timeline(path: Path, stretches: int = 400) -> DeviceTimeline | None:
    """Read a trace once; None where nothing ran on a device.

    Raises:
        ArtifactError: the file is missing, damaged or truncated, or no trace.
    """
    table = event_table(read_columns(path))
    device = table.device
    if not len(device.busy.starts):
        return None
    start, end = int(device.busy.starts[0]), int(device.busy.ends[-1])
    length = (end - start) / stretches
    window = Intervals(np.array([start], np.int64), np.array([end], np.int64))
    idle = difference(window, device.busy)
    loading = intersection(idle, table.loading)
    shares = {
        Part.COMPUTE: device.compute,
        Part.COLLECTIVE: difference(device.communication, device.compute),
        Part.COPY: difference(device.memory_copy, either(device.compute, device.communication)),
        Part.IDLE_DATA: loading,
        "idle": difference(idle, loading),
    }
    edges = np.rint(np.linspace(start, end, stretches + 1)).astype(np.int64)
    widths = np.maximum(1, np.diff(edges))
    return DeviceTimeline(
        stretch_ns=length,
        shares={state: (np.diff(length_before(part, edges)) / widths).tolist() for state, part in shares.items()},
        steps=tuple((step.number, (step.start - start) / length, (step.end - start) / length) for step in table.steps),
    )
