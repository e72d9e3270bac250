"""Faults of the clock."""

from __future__ import annotations

import time
from typing import Final

import fault
import storage

HOUR_S: Final = 3600


def _set_back(cell: fault.Cell) -> None:
    seconds, nanoseconds = time.time, time.time_ns
    cell.notes["patches"] = [(time, "time", seconds), (time, "time_ns", nanoseconds)]
    time.time = lambda: seconds() - HOUR_S
    time.time_ns = lambda: nanoseconds() - HOUR_S * 10**9


FAULTS: Final = (
    fault.Fault(
        name="clock set back",
        says="by injection: an hour is taken off what Python says of the time of day",
        place=fault.ANYWHERE,
        strike=_set_back,
        prepare=storage.put_back,
        victims=range,
    ),
)
