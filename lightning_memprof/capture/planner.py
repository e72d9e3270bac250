"""Which window a step belongs to: computed from the schedule and the window requests alone, without side effects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_memprof.schedule import Action, Schedule, Window, plan_window

if TYPE_CHECKING:
    from lightning_memprof.capture.base import Position

_RECORDING: Final = (Action.RECORD, Action.RECORD_AND_SAVE)
_NEW_EPOCH: Final = "a new epoch began"


@dataclass(frozen=True)
class WindowRequest:
    """A request for a window outside the schedule.

    Attributes:
        cause: why, in words.
        warmup: warmup steps, whose records are discarded.
        active: steps to record.
        step: the step at which the window opens; None is the next step.
        leaks: whether to search for the holders of memory that grows in the window.
    """

    cause: str
    warmup: int
    active: int
    step: int | None = None
    leaks: bool = False


class Turn(NamedTuple):
    """What happens where a step begins.

    Attributes:
        action: of the step.
        closes: whether the open window closes before the step.
        cut_by: why that window ends before its planned end; None if it is complete.
        opens: the window that opens with the step.
        request: the request that opens it; None for the schedule's.
    """

    action: Action
    closes: bool
    cut_by: str | None
    opens: Window | None
    request: WindowRequest | None


_QUIET_STEPS: Final = 64


class WindowPlanner:
    """Decides at each step whether a window opens or closes, by the schedule and the requests; one is open at a time.

    A window that has opened runs to its end: a requested one waits until the schedule's has closed, and a scheduled one
    that would start inside a requested one starts after it with the steps that are left.

    Args:
        schedule: decides by ``Position.schedule_step``; called once a step, with one look-ahead for :class:`Schedule`.
    """

    def __init__(self, schedule: Callable[[int], Action]) -> None:
        self._schedule = schedule
        self._pending: deque[WindowRequest] = deque()
        # The request whose window is open or at its last step, and the steps of that window so far.
        self._open: WindowRequest | None = None
        self._passed = 0
        self._action = Action.NONE
        self._last_step: int | None = None
        self._window: Window | None = None
        self._resumed_inside = False
        # Steps for which a :class:`Schedule` plans nothing.
        self._quiet = range(0)
        self.windows = 0

    @property
    def action(self) -> Action:
        """The action of the current step."""
        return self._action

    @property
    def pending(self) -> tuple[WindowRequest, ...]:
        """Requests whose windows have not opened, oldest first."""
        return tuple(self._pending)

    def request(self, request: WindowRequest) -> None:
        """Add a request, before the turn of its step."""
        self._pending.append(request)

    def is_quiet(self, schedule_step: int) -> bool:
        """Whether nothing happens at a step; then the turn may be left out."""
        return schedule_step in self._quiet and not self._pending and self._open is None

    def turn(self, position: Position) -> Turn:
        """Return what happens where the step at ``position`` begins."""
        scheduled = self._scheduled(position.schedule_step)
        action, request = self._with_requests(position.step, scheduled)
        closes, cut_by = self._closes(position.schedule_step, action, request)
        if closes:
            self._window = None
        opens = None
        if self._window is None and action is not Action.NONE:
            opens = self._window = self._next_window(position, request)
            self.windows += 1
        self._action, self._last_step = action, position.schedule_step
        if action is Action.NONE and self._window is None:
            self._quiet = self._quiet_from(position.schedule_step)
        return Turn(action, closes, cut_by, opens, request)

    def _with_requests(self, step: int, scheduled: Action) -> tuple[Action, WindowRequest | None]:
        """Return the action at ``step``, and the request whose window opens at it."""
        opens = None
        if self._open is not None:
            self._passed += 1
            if self._passed >= self._open.warmup + self._open.active:
                self._open = None
        if self._open is None and scheduled is Action.NONE:
            due = (request for request in self._pending if request.step is None or request.step <= step)
            if (opens := next(due, None)) is not None:
                self._pending.remove(opens)
                self._open, self._passed = opens, 0
        if (request := self._open) is None:
            return scheduled, None
        if self._passed < request.warmup:
            return Action.WARMUP, opens
        is_last = self._passed == request.warmup + request.active - 1
        return Action.RECORD_AND_SAVE if is_last else Action.RECORD, opens

    def _scheduled(self, step: int) -> Action:
        action = self._schedule(step)
        if not isinstance(self._schedule, Schedule) or step == 0:
            return action
        # A window that was open at the checkpoint from which this run resumes is not continued.
        if self._last_step is None:
            self._resumed_inside = action in _RECORDING and self._schedule(step - 1) is Action.RECORD
        elif self._resumed_inside:
            self._resumed_inside = action in _RECORDING and self._schedule(step - 1) is not Action.RECORD_AND_SAVE
        return Action.NONE if self._resumed_inside else action

    def _quiet_from(self, step: int) -> range:
        """Return the next steps for which nothing is planned; a user's function is never called ahead."""
        if not isinstance(self._schedule, Schedule):
            return range(0)
        ahead = range(step, step + _QUIET_STEPS)
        return range(step, next((at for at in ahead if self._schedule(at) is not Action.NONE), ahead.stop))

    def _closes(self, schedule_step: int, action: Action, request: WindowRequest | None) -> tuple[bool, str | None]:
        if self._window is None:
            return False, None
        if self._action is Action.RECORD_AND_SAVE or request is not None:
            return True, None
        if self._open is not None:
            return False, None
        if self._last_step is not None and schedule_step <= self._last_step:
            return True, _NEW_EPOCH
        # A user's function may leave a window without RECORD_AND_SAVE.
        return action is Action.NONE or (action is Action.WARMUP and self._action is Action.RECORD), None

    def _next_window(self, position: Position, request: WindowRequest | None) -> Window:
        if request is not None:
            steps = tuple(range(position.step, position.step + request.warmup + request.active))
            return Window(self.windows, steps[: request.warmup], steps[request.warmup :])
        if isinstance(self._schedule, Schedule):
            return plan_window(self._schedule, position.schedule_step, step=position.step, index=self.windows)
        # A user's function may count its calls: it is called once a step and never ahead.
        return Window(self.windows, (), ())
