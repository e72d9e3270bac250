"""Faults of what records: a collector that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

import fault

from lightning_memprof import Budget, Collector

if TYPE_CHECKING:
    from lightning_memprof import Mark, RunContext
    from lightning_memprof.collectors import Window


SECONDS: Final = 1.0


class Hanging(Collector):
    """Does not come back: from a mark of the cell's step, or from its way out of the cell's window."""

    name: ClassVar[str] = "hanging"

    def __init__(self, cell: fault.Cell) -> None:
        self._cell = cell

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[Any]:
        def on_mark(mark: Mark) -> None:
            if self._cell.moment.window is None and mark.step == self._cell.moment.step:
                self._cell.strike()

        yield on_mark
        if self._cell.moment.window == window.index:
            self._cell.strike()


def _wait(cell: fault.Cell) -> None:
    threading.Event().wait()


def _turn(cell: fault.Cell) -> None:
    while True:
        pass


def _collectors(cell: fault.Cell) -> Sequence[Collector]:
    return [Hanging(cell)]


def _arguments(cell: fault.Cell) -> Mapping[str, Any]:
    return {"budget": Budget(max_collector_seconds=SECONDS)}


def _hang(how: str, says: str, strike: Callable[[fault.Cell], None]) -> fault.Fault:
    return fault.Fault(
        name=f"a collector hangs ({how})",
        says=f"at a mark, or where it saves, a collector {says}; `Budget(max_collector_seconds=1)`",
        place="collector",
        strike=strike,
        absent={"before": "no collector is told of a mark where no window is open"},
        only_ours=True,
        collectors=_collectors,
        arguments=_arguments,
    )


FAULTS: Final = (
    _hang("waits", "waits for an event that never comes", _wait),
    _hang("turns", "turns in a loop for ever", _turn),
)
