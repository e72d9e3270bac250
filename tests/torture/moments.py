"""The five moments at which a fault strikes, and the schedule that they are moments of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

STEPS: Final = 15
WAIT: Final = 2
WARMUP: Final = 1
ACTIVE: Final = 2


@dataclass(frozen=True)
class Moment:
    """A place in a fit of 15 steps with three windows: steps 2-4, 7-9 and 12-14, the first step of each its warmup.

    Attributes:
        name: of the column.
        says: what it is, for the page.
        step: in which it is, 0 to 14; None after the last one.
        window: the window that is being saved; None where none is.
        closed: number of windows that had been closed before.

    """

    name: str
    says: str
    step: int | None
    window: int | None
    closed: int


MOMENTS: Final = (
    Moment("before", "in the first step, when no window has been opened", 0, None, 0),
    Moment("warmup", "in the warmup step of the second window; the first one is closed", 7, None, 1),
    Moment("active", "in the first recorded step of the second window", 8, None, 1),
    Moment("save", "the second window is being saved", 10, 1, 1),
    Moment("teardown", "the steps are over and the third window is still to be saved", None, 2, 2),
)


def moment(name: str) -> Moment:
    """Give the moment of this name."""
    return next(moment for moment in MOMENTS if moment.name == name)
