"""Self time of each action of a step by phase, on the host's clock, and of each phase on the device's."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from lightning_memprof.artifacts.series import GC_PAUSE, PHASES, UNTRACKED
from lightning_memprof.capture.observe import gc_callback

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.capture.base import DeviceTimer

__all__ = ["AcceleratorTimer", "RecentMedian", "StepClock", "StepTimes", "device_timer", "gc_pauses"]

_OTHER: Final = PHASES.index("other")
_HOST_ONLY: Final = (PHASES.index("callbacks"), _OTHER)


class StepTimes(NamedTuple):
    """Times of a finished step.

    Attributes:
        end_ns: reading of ``time.perf_counter_ns``.
        phases_ns: self time by phase; the sum is the step's duration.
        actions: self time in nanoseconds by slot, whose sum is the step's duration, and number of entries by slot.
        moments: the device timestamps, see :class:`lightning_memprof.capture.base.StepRecord`.

    """

    end_ns: int
    phases_ns: tuple[int, ...]
    actions: tuple[list[int], list[int]]
    moments: list[tuple[int, Any, int]] | None


class StepClock:
    """Splits a step into actions that may nest; time in an inner action does not count for the outer one.

    An action in a phase has a slot, its index in :attr:`actions`; time outside all actions has slot 0. ``enter`` and
    ``leave`` run some dozens of times in every step of the run: about 0.2 µs each.

    Args:
        timer: the device's clock, or None to use the host's only. Callback phases get no device timestamps: each one
            costs a call into the driver.

    Attributes:
        actions: name and index of the phase of each slot.

    """

    def __init__(self, timer: DeviceTimer | None) -> None:
        self.actions: list[tuple[str, int]] = []
        self.start_ns = 0
        self._timer = timer
        self._slots: dict[tuple[str, int], int] = {}
        self._phase_of: list[int] = []
        # Between two steps both are one list that nobody reads.
        self._idle: list[int] = []
        self._spent = self._entries = self._idle
        self._stack: list[int] = []
        self._current = self.slot(UNTRACKED, _OTHER)
        self._last = 0
        # The innermost phase with device timestamps.
        self._device_phase = _OTHER
        self._moments: list[tuple[int, Any, int]] = []

    @property
    def phase(self) -> str:
        """The innermost current phase."""
        return PHASES[self._phase_of[self._current]]

    def slot(self, action: str, phase: int) -> int:
        """Return the slot of an action in a phase, a new one at its first use."""
        slot = self._slots.get((action, phase))
        if slot is None:
            slot = self._slots[action, phase] = len(self.actions)
            self.actions.append((action, phase))
            self._phase_of.append(phase)
            for counts in (self._idle, self._spent, self._entries):
                counts.append(0)
        return slot

    def enter(self, slot: int) -> None:
        """Begin an action inside the current one."""
        now = perf_counter_ns()
        current = self._current
        self._spent[current] += now - self._last
        self._last = now
        self._stack.append(current)
        self._current = slot
        self._entries[slot] += 1
        if self._timer is not None:
            self._switch_device(self._timer)

    def enter_within(self, action: str) -> None:
        """Begin an action in the phase of the current one."""
        self.enter(self.slot(action, self._phase_of[self._current]))

    def leave(self) -> None:
        """End the current action and continue the one around it."""
        if not self._stack:
            return
        now = perf_counter_ns()
        self._spent[self._current] += now - self._last
        self._last = now
        self._current = self._stack.pop()
        if self._timer is not None:
            self._switch_device(self._timer)

    def interrupt(self, action: str, ns: int) -> None:
        """Count time that ended now for an action that interrupted the current one, in its phase."""
        slot = self.slot(action, self._phase_of[self._current])
        self._spent[slot] += ns
        self._entries[slot] += 1
        self._last += ns

    def start(self) -> None:
        """Begin a step now, outside all actions."""
        # A GC pause may interrupt this method: it must find no half of the new step.
        spent, entries = [0] * len(self.actions), [0] * len(self.actions)
        entries[0] = 1
        self._stack.clear()
        self._current = 0
        self._device_phase = _OTHER
        if self._timer is not None:
            self._moments = [(_OTHER, self._timer.record(), 0)]
        self.start_ns = self._last = perf_counter_ns()
        self._spent = spent
        self._entries = entries

    def leave_out(self, ns: int) -> None:
        """Exclude time that ended now from the current step: it was not the training's."""
        self._last += ns
        self.start_ns += ns
        moments = self._moments
        if moments:
            # The allocator synchronizes before it reports a failed allocation: the device idles meanwhile. By index,
            # because another thread than the training's may report it.
            last = len(moments) - 1
            phase, moment, excluded_ns = moments[last]
            moments[last] = (phase, moment, excluded_ns + ns)

    def stop(self) -> StepTimes:
        """End the step now; return its times."""
        now = perf_counter_ns()
        spent, entries = self._spent, self._entries
        spent[self._current] += now - self._last
        self._last = now
        self._spent = self._entries = self._idle
        moments = None
        if self._timer is not None:
            self._moments.append((_OTHER, self._timer.record(), 0))
            moments, self._moments = self._moments, []
        phases = [0] * len(PHASES)
        for phase, ns in zip(self._phase_of, spent, strict=False):
            if ns:
                phases[phase] += ns
        return StepTimes(now, tuple(phases), (spent, entries), moments)

    def _switch_device(self, timer: DeviceTimer) -> None:
        """Record a timestamp if the innermost phase that has them is another one now."""
        for slot in (self._current, *reversed(self._stack)):
            phase = self._phase_of[slot]
            if phase not in _HOST_ONLY:
                break
        else:
            phase = _OTHER
        if phase != self._device_phase:
            self._device_phase = phase
            self._moments.append((phase, timer.record(), 0))


@contextmanager
def gc_pauses(clock: StepClock) -> Iterator[None]:
    """Count the pauses of Python's garbage collector in this thread as an action, in the phase that they interrupt."""
    thread = get_ident()
    began = 0

    def on_collection(phase: str, _: dict[str, int]) -> None:
        nonlocal began
        if get_ident() != thread:
            return
        if phase == "start":
            began = perf_counter_ns()
        elif began:
            clock.interrupt(GC_PAUSE, perf_counter_ns() - began)
            began = 0

    with gc_callback(on_collection):
        yield


class AcceleratorTimer:
    """Timed events of an accelerator, from a pool: creating one costs more than recording it.

    Args:
        device: the accelerator.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: list[torch.Event] = []

    def record(self) -> torch.Event:
        """Record an event on the current stream."""
        event = self._pool.pop() if self._pool else torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def reached(self, moment: torch.Event) -> bool:
        """Query the event; never waits."""
        return bool(moment.query())

    def elapsed_ns(self, start: torch.Event, end: torch.Event) -> int:
        """Return the nanoseconds between two events."""
        return round(start.elapsed_time(end) * 1e6)

    def release(self, moment: torch.Event) -> None:
        """Return the event to the pool."""
        self._pool.append(moment)


def device_timer(device: torch.device) -> DeviceTimer | None:
    """Return the clock of an asynchronous device, or None for a CPU, whose clock is the host's."""
    if device.type in ("cpu", "meta"):
        return None
    return AcceleratorTimer(device)


class RecentMedian:
    """The median of the last values; about 2 µs per value.

    Args:
        most: number of values.
        least: fewer values have no median.

    """

    def __init__(self, most: int, least: int) -> None:
        self._most = most
        self._least = least
        # In order of time and of size.
        self._recent: deque[int] = deque()
        self._ordered: list[int] = []

    def add(self, value: int) -> int | None:
        """Add a value; return the median of those before it."""
        recent, ordered = self._recent, self._ordered
        median = ordered[len(ordered) // 2] if len(ordered) >= self._least else None
        if len(recent) == self._most:
            del ordered[bisect_left(ordered, recent.popleft())]
        recent.append(value)
        insort(ordered, value)
        return median
