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
        step: in which it is, 0 to 14; None after the last one.
        window: the window that is being saved; None where none is.
        closed: number of windows that had been closed before.

    """

    name: str
    step: int | None
    window: int | None
    closed: int


MOMENTS: Final = (
    Moment("before", 0, None, 0),
    Moment("warmup", 7, None, 1),
    Moment("active", 8, None, 1),
    Moment("save", 10, 1, 1),
    Moment("teardown", None, 2, 2),
)


def moment(name: str) -> Moment:
    """Give the moment of this name."""
    return next(moment for moment in MOMENTS if moment.name == name)
