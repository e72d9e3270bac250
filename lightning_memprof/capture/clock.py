"""Self time of each phase of a step, on the host's and on the device's clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import torch

from lightning_memprof.artifacts.series import PHASES

if TYPE_CHECKING:
    from lightning_memprof.capture.base import DeviceTimer

__all__ = ["AcceleratorTimer", "StepClock", "device_timer"]

_OTHER: Final = PHASES.index("other")
_HOST_ONLY: Final = (PHASES.index("callbacks"), _OTHER)


class StepClock:
    """Splits a step into phases that may nest; time in an inner phase does not count for the outer one.

    ``enter`` and ``leave`` run a dozen times in every step of the run: about 0.2 µs each.

    Args:
        timer: the device's clock, or None to use the host's only. Callback phases get no device timestamps: each one
            costs a call into the driver.

    """

    def __init__(self, timer: DeviceTimer | None) -> None:
        self._timer = timer
        self._spent = [0] * len(PHASES)
        self._stack: list[int] = []
        self._current = _OTHER
        self._last = 0
        self.start_ns = 0
        self._moments: list[tuple[int, Any, int]] = []

    @property
    def phase(self) -> str:
        """The innermost current phase."""
        return PHASES[self._current]

    def enter(self, phase: int) -> None:
        """Begin a phase inside the current one."""
        now = time.perf_counter_ns()
        self._spent[self._current] += now - self._last
        self._last = now
        self._stack.append(self._current)
        self._current = phase
        if self._timer is not None and phase not in _HOST_ONLY:
            self._moments.append((phase, self._timer.record(), 0))

    def leave(self) -> None:
        """End the current phase and continue the one around it."""
        if not self._stack:
            return
        now = time.perf_counter_ns()
        left = self._current
        self._spent[left] += now - self._last
        self._last = now
        self._current = self._stack.pop()
        if self._timer is not None and left not in _HOST_ONLY:
            self._moments.append((self._device_phase(), self._timer.record(), 0))

    def start(self) -> None:
        """Begin a step now, outside all phases."""
        self._spent = [0] * len(PHASES)
        self._stack.clear()
        self._current = _OTHER
        if self._timer is not None:
            self._moments = [(_OTHER, self._timer.record(), 0)]
        self.start_ns = self._last = time.perf_counter_ns()

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

    def stop(self) -> tuple[int, tuple[int, ...], list[tuple[int, Any, int]] | None]:
        """End the step now; return its end, nanoseconds by phase, and the device timestamps."""
        now = time.perf_counter_ns()
        self._spent[self._current] += now - self._last
        self._last = now
        moments = None
        if self._timer is not None:
            self._moments.append((_OTHER, self._timer.record(), 0))
            moments, self._moments = self._moments, []
        return now, tuple(self._spent), moments

    def _device_phase(self) -> int:
        """Return the innermost phase that has device timestamps."""
        for phase in (self._current, *reversed(self._stack)):
            if phase not in _HOST_ONLY:
                return phase
        return _OTHER


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
