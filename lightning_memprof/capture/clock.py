"""Self time of each action of a step by phase, on the host's clock, and of each phase on the device's."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from contextlib import ExitStack, contextmanager, suppress
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from lightning_memprof.artifacts.series import COMPILATION, GC_PAUSE, PHASES, PROFILER, UNTRACKED
from lightning_memprof.capture.observe import gc_callback
from lightning_memprof.capture.sources.compiled import around_compilations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_OTHER: Final = PHASES.index("other")
# Codes of a clock's log.
LEAVE: Final = -1
_LEAVE_OUT: Final = -2
_WITHIN: Final = -3
# The timestamps of a step take 40 to 90 µs: of shorter steps only some have them.
_DEVICE_NS: Final = 4_000_000
# A GC pause may be anywhere.
_MOST_COURSES: Final = 256
_HOST_ONLY: Final = (PHASES.index("callbacks"), _OTHER)


class DeviceTimer(Protocol):
    """Timestamps on the device's own clock, read when the device has reached them."""

    def record(self) -> Any:
        """Put a timestamp into the device's queue."""

    def reached(self, moment: Any) -> bool:
        """Return whether the device has passed ``moment``; does not wait."""

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Return the nanoseconds between two reached timestamps."""

    def release(self, moment: Any) -> None:
        """Return a timestamp for reuse."""


class LoggedTimes:
    """Self times of a finished step, computed from its log at the first use.

    Args:
        clock: has the slots of the actions.
        log: see :class:`StepClock`.
        start_ns: reading of ``time.perf_counter_ns``.
        end_ns: another.

    Attributes:
        computed: self times by slot, entries by slot, and self times by phase; None before they are computed.
    """

    __slots__ = ("clock", "computed", "end_ns", "log", "start_ns")

    def __init__(self, clock: StepClock, log: list[int], start_ns: int, end_ns: int) -> None:
        self.clock = clock
        self.log = log
        self.start_ns = start_ns
        self.end_ns = end_ns
        self.computed: tuple[list[int], list[int], list[int]] | None = None

    @property
    def actions(self) -> tuple[list[int], list[int]]:
        """Self time in nanoseconds by slot, whose sum is the step's duration, and number of entries by slot."""
        return (self.computed or self._computed())[:2]

    @property
    def phases_ns(self) -> list[int]:
        """Self time by phase; the sum is the step's duration."""
        return (self.computed or self._computed())[2]

    @staticmethod
    def compute(steps: Iterable[LoggedTimes]) -> None:
        """Compute the times of many steps at once: a tenth of what they cost one by one."""
        alike: dict[tuple[StepClock, tuple[int, ...]], list[LoggedTimes]] = {}
        for times in steps:
            if times.computed is None:
                alike.setdefault((times.clock, tuple(times.log[::2])), []).append(times)
        for (clock, codes), group in alike.items():
            course = clock.courses.get(codes)
            if course is None:
                if len(clock.courses) >= _MOST_COURSES:
                    clock.courses.clear()
                course = clock.courses[codes] = Course(clock, codes)
            readings = np.array([[times.start_ns, *times.log[1::2], times.end_ns] for times in group], np.int64)
            spent, phases = (readings @ course.by_slot).tolist(), (readings @ course.by_phase).tolist()
            for index, times in enumerate(group):
                times.computed = spent[index], course.entries, phases[index]

    def _computed(self) -> tuple[list[int], list[int], list[int]]:
        while self.computed is None:
            self.compute((self,))
        return self.computed


class Course:
    """The order of the actions in a step, the same for most steps of a run.

    All times are sums and differences of the start of the step, the values in its log, and its end.

    Args:
        clock: has the slots of the actions, and gets those that are missing.
        codes: of a log.

    Attributes:
        by_slot: the factor of each value in the self time of each slot.
        by_phase: the same for each phase.
        entries: number of entries by slot.
    """

    def __init__(self, clock: StepClock, codes: tuple[int, ...]) -> None:
        current, entered = 0, [0]
        stack: list[int] = []
        within = list(clock.within)
        factors = [(0, 0, -1)]
        for index, code in enumerate(codes, 1):
            if code == _LEAVE_OUT:
                factors.append((index, current, -1))
                continue
            if code == LEAVE:
                if not stack:
                    continue
                following = stack.pop()
            else:
                following = code
                if code <= _WITHIN:
                    following = clock.slot(within[_WITHIN - code], clock.actions[current][1])
                stack.append(current)
                entered.append(following)
            factors += [(index, current, 1), (index, following, -1)]
            current = following
        factors.append((len(codes) + 1, current, 1))
        self.entries = [entered.count(slot) for slot in range(len(clock.actions))]
        self.by_slot = np.zeros((len(codes) + 2, len(clock.actions)), np.int64)
        self.by_phase = np.zeros((len(codes) + 2, len(PHASES)), np.int64)
        for index, slot, factor in factors:
            self.by_slot[index, slot] += factor
            self.by_phase[index, clock.actions[slot][1]] += factor


class StepClock:
    """Splits a step into actions that may nest; time in an inner action does not count for the outer one.

    An action in a phase has a slot, its index in :attr:`actions`; time outside all actions has slot 0. ``enter`` and
    ``leave`` run some dozens of times in every step of the run: they only log. The log is flat, for the garbage
    collector: a slot and the time of its start, ``LEAVE`` and the time, ``_LEAVE_OUT`` and the nanoseconds, or
    ``_WITHIN`` less the index of an action that takes the phase around it, and its start.

    Args:
        timer: the device's clock, or None to use the host's only. Callback phases get no device timestamps: each one
            costs a call into the driver.

    Attributes:
        actions: name and index of the phase of each slot.
        start_ns: reading of ``time.perf_counter_ns`` where the step began.
        within: the codes of the actions that take the phase around them, in order.
        courses: those of its steps so far, by the codes of a log.
        log: adds to the log; without a device the cheapest way to enter and leave.
    """

    def __init__(self, timer: DeviceTimer | None) -> None:
        self.actions: list[tuple[str, int]] = []
        self.start_ns = 0
        self._timer = timer
        self._slots: dict[tuple[str, int], int] = {}
        self.within: dict[str, int] = {}
        self.courses: dict[tuple[int, ...], Course] = {}
        self._log: list[int] = []
        self.log: Callable[[tuple[int, int]], None] = self._log.extend if timer is None else self._log_with_device
        self._first_ns = 0
        self.slot(UNTRACKED, _OTHER)
        # With a device: the phases around that have device timestamps, and the last one that got one.
        self._phases: list[int] = []
        self._device_phase = _OTHER
        # Empty in a step without them.
        self._moments: list[tuple[int, Any, int]] = []
        self._device_due_ns = 0

    def phase(self, *, raised: bool = False) -> str:
        """Return the innermost current phase, or the one before an exception left the current actions."""
        codes = self._log[::2]
        while raised and codes and codes[-1] == LEAVE:
            codes.pop()
            # Marks and GC pauses may come while the actions are left.
            if codes and (codes[-1] <= _WITHIN or (codes[-1] >= 0 and self.actions[codes[-1]][0] == PROFILER)):
                codes.pop()
        stack = [_OTHER]
        for code in codes:
            if code == LEAVE:
                del stack[max(len(stack) - 1, 1) :]
            elif code != _LEAVE_OUT:
                # A meeting of ranks, as in `self.log`, is called in the phase around it.
                inner = _OTHER if code < 0 else self.actions[code][1]
                stack.append(stack[-1] if inner == _OTHER else inner)
        return PHASES[stack[-1]]

    def slot(self, action: str, phase: int) -> int:
        """Return the slot of an action in a phase, a new one at its first use."""
        slot = self._slots.get((action, phase))
        if slot is None:
            slot = self._slots[action, phase] = len(self.actions)
            self.actions.append((action, phase))
        return slot

    def enter(self, slot: int) -> None:
        """Begin an action inside the current one."""
        self.log((slot, perf_counter_ns()))

    def enter_within(self, action: str) -> None:
        """Begin an action in the phase of the current one."""
        self.log((self.within_code(action), perf_counter_ns()))

    def leave(self) -> None:
        """End the current action and continue the one around it."""
        self.log((LEAVE, perf_counter_ns()))

    def interrupt(self, action: str, start_ns: int) -> None:
        """Count the time since ``start_ns`` for an action that interrupted the current one, in its phase."""
        self._log.extend((self.within_code(action), start_ns, LEAVE, perf_counter_ns()))

    def start(self) -> None:
        """Begin a step now, outside all actions."""
        if self._timer is not None and (now := perf_counter_ns()) >= self._device_due_ns:
            self._device_due_ns = now + _DEVICE_NS
            self._phases.clear()
            self._device_phase = _OTHER
            self._moments = [(_OTHER, self._timer.record(), 0)]
        # A GC pause may interrupt this method: what it logs is not of the new step.
        self.start_ns = self._first_ns = perf_counter_ns()
        self._log.clear()

    def leave_out(self, ns: int) -> None:
        """Exclude time that ended now from the current step: it was not the training's."""
        self._log.extend((_LEAVE_OUT, ns))
        self.start_ns += ns
        moments = self._moments
        if moments:
            # The allocator synchronizes before it reports a failed allocation: the device idles meanwhile. By index,
            # because another thread than the training's may report it.
            last = len(moments) - 1
            phase, moment, excluded_ns = moments[last]
            moments[last] = (phase, moment, excluded_ns + ns)

    def stop(self) -> tuple[int, LoggedTimes, list[tuple[int, Any, int]] | None]:
        """End the step now; return the reading of ``time.perf_counter_ns``, the times and the device timestamps."""
        now = perf_counter_ns()
        log = self._log.copy()
        self._log.clear()
        moments = None
        if self._timer is not None and self._moments:
            self._moments.append((_OTHER, self._timer.record(), 0))
            moments, self._moments = self._moments, []
        return now, LoggedTimes(self, log, self._first_ns, now), moments

    def within_code(self, action: str) -> int:
        """Return the code for :attr:`log` of an action that takes the phase around it."""
        return self.within.setdefault(action, _WITHIN - len(self.within))

    def _log_with_device(self, entry: tuple[int, int]) -> None:
        """Add to the log; record a timestamp if another phase is the innermost one that has them now."""
        # One call: a GC pause or a signal may come between two.
        self._log.extend(entry)
        if not self._moments or self._timer is None:
            return
        code, phases = entry[0], self._phases
        if code != LEAVE:
            phase = _OTHER if code < 0 else self.actions[code][1]
            # A phase without timestamps, and an action within another, belong to the phase around them.
            phases.append(phase if phase not in _HOST_ONLY else phases[-1] if phases else _OTHER)
        elif phases:
            phases.pop()
        innermost = phases[-1] if phases else _OTHER
        if innermost != self._device_phase:
            self._device_phase = innermost
            self._moments.append((innermost, self._timer.record(), 0))


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
            clock.interrupt(GC_PAUSE, began)
            began = 0

    with gc_callback(on_collection):
        yield


@contextmanager
def compilations(clock: StepClock) -> Iterator[None]:
    """Time what torch compiles in this thread as an action, in the phase that calls the compiled code."""
    thread = get_ident()
    is_open = False

    def start(_: object) -> None:
        nonlocal is_open
        if get_ident() == thread:
            is_open = True
            clock.enter_within(COMPILATION)

    def end(_: object) -> None:
        nonlocal is_open
        if is_open:
            is_open = False
            clock.leave()

    with ExitStack() as stack:
        # A version of torch without these callbacks has one owner of time less.
        with suppress(AttributeError):
            stack.enter_context(around_compilations(start, end))
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
