"""The event table of a trace: each question about an event is answered once, for every ledger and list."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec

from lightning_memprof.account.trace.collectives import CollectiveCall, collective_calls
from lightning_memprof.account.trace.device import DeviceEvents, device_events, device_steps
from lightning_memprof.account.trace.events import HostEvents
from lightning_memprof.account.trace.idle import cold_calls
from lightning_memprof.account.trace.spans import Step, loading_intervals, step_spans
from lightning_memprof.read.trace.columns import TraceColumns
from lightning_memprof.read.trace.intervals import Column, Intervals


class EventTable(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A trace with its events classified.

    Attributes:
        columns: kind, name, thread and times of each event.
        device: the events of devices, with the calls that launched them.
        host: the events of the host, with their modules and operators.
        steps: on the host, by start.
        working: the same as long as the device works for them.
    """

    columns: TraceColumns
    device: DeviceEvents
    host: HostEvents
    steps: list[Step]
    working: list[Step]

    @cached_property
    def window(self) -> tuple[int, int] | None:
        """The time from the first device event to the last one, None without any."""
        busy = self.device.busy
        return (int(busy.starts[0]), int(busy.ends[-1])) if len(busy.starts) else None

    @cached_property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """Starts and ends of the steps; without any the window of the device's events."""
        return [(step.start, step.end) for step in self.steps] or ([self.window] if self.window else [])

    @cached_property
    def loading(self) -> Intervals:
        """The time in which a batch is loaded."""
        return loading_intervals(self.columns)

    @cached_property
    def collectives(self) -> list[CollectiveCall]:
        """The collectives and point-to-point operations."""
        return list(collective_calls(self.columns, self.device))

    @cached_property
    def cold(self) -> Column:
        """Rows of the calls and operators that initialise something."""
        return cold_calls(self.columns, self.device, self.ranges)


def event_table(columns: TraceColumns) -> EventTable:
    """Return the event table of a trace."""
    device, steps = device_events(columns), step_spans(columns)
    working = device_steps(columns, device, steps)
    return EventTable(columns=columns, device=device, host=HostEvents(columns), steps=steps, working=working)
