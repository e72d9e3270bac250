"""Windows that were not planned: what was asked for, and the one that goes on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lightning_memprof.schedule import Action, Window

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_memprof.capture.base import StepRecord

__all__ = ["Demand", "Demands", "NoWishes", "Wishes"]


@dataclass(frozen=True)
class Demand:
    """A window that is wanted.

    Attributes:
        cause: why, in words.
        warmup: steps whose records are thrown away.
        active: steps to record.
        step: the step at which it opens; None is the next one.

    """

    cause: str
    warmup: int
    active: int
    step: int | None = None

    def window(self, index: int, step: int) -> Window:
        """Return the window that opens at ``step``."""
        first = step + self.warmup
        return Window(index, tuple(range(step, first)), tuple(range(first, first + self.active)))


class Wishes(Protocol):
    """What asks for windows while the run goes on."""

    def before_step(self, step: int) -> Iterable[Demand]:
        """Return what is wanted, from ``step`` on, that was not yet returned."""

    def after_step(self, record: StepRecord) -> None:
        """Look at a step that has ended."""


class NoWishes:
    """Nothing but the schedule opens windows."""

    def before_step(self, step: int) -> Iterable[Demand]:  # noqa: ARG002 for others
        """Return nothing."""
        return ()

    def after_step(self, record: StepRecord) -> None:
        """Look at nothing."""


class Demands:
    """Lays windows that are wanted over a schedule's.

    One window is open at a time. One that was opened runs to its end: a wanted one waits until the schedule's is
    closed, and a schedule's that would have begun in a wanted one begins behind it with the steps that are left.
    """

    def __init__(self) -> None:
        self._wanted: deque[Demand] = deque()
        self._open: Demand | None = None
        self._passed = 0

    @property
    def open(self) -> Demand | None:
        """The demand whose window goes on, or has come to its last step."""
        return self._open

    @property
    def unmet(self) -> tuple[Demand, ...]:
        """Those whose windows have not been opened, oldest first."""
        return tuple(self._wanted)

    def add(self, demand: Demand) -> None:
        """Want a window."""
        self._wanted.append(demand)

    def turn(self, step: int, scheduled: Action) -> tuple[Action, Demand | None]:
        """Say what happens at ``step``, once a step; and which demand's window opens at it, if one does."""
        if self._open is not None:
            self._passed += 1
            if self._passed < self._open.warmup + self._open.active:
                return self._action(self._open), None
            self._open = None
        if scheduled is Action.NONE:
            due = next((demand for demand in self._wanted if demand.step is None or demand.step <= step), None)
            if due is not None:
                self._wanted.remove(due)
                self._open, self._passed = due, 0
                return self._action(due), due
        return scheduled, None

    def _action(self, demand: Demand) -> Action:
        if self._passed < demand.warmup:
            return Action.WARMUP
        last = self._passed == demand.warmup + demand.active - 1
        return Action.RECORD_AND_SAVE if last else Action.RECORD
