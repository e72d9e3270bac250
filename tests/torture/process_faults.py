"""Faults that come from outside of the program: signals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Final

import fault


def _signal_self(number: signal.Signals) -> Callable[[fault.Cell], None]:
    def strike(cell: fault.Cell) -> None:
        os.kill(os.getpid(), number)
        if number is signal.SIGKILL:
            time.sleep(60)  # the kernel needs a moment, and nothing of this program may happen in it

    return strike


def _kill_all(cell: fault.Cell) -> None:
    # The others first: this process does nothing afterwards.
    for pid in sorted(cell.pids(), key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGKILL)
    time.sleep(60)


FAULTS: Final = (
    fault.Fault(
        name="Ctrl-C",
        says="SIGINT to every rank, as a terminal sends it",
        place=fault.ANYWHERE,
        strike=_signal_self(signal.SIGINT),
        victims=range,
    ),
    fault.Fault(
        name="SIGTERM",
        says="SIGTERM to every rank, as a scheduler sends it",
        place=fault.ANYWHERE,
        strike=_signal_self(signal.SIGTERM),
        victims=range,
    ),
    fault.Fault(
        name="SIGKILL of one rank",
        says="the last rank is killed; with one process that is all of them",
        place=fault.ANYWHERE,
        strike=_signal_self(signal.SIGKILL),
        worlds=(2,),
    ),
    fault.Fault(
        name="SIGKILL of all ranks",
        says="one rank's strike kills all at that moment",
        place=fault.ANYWHERE,
        strike=_kill_all,
    ),
)
