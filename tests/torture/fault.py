"""What a fault is, and the cell of the matrix in which one strikes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import moments

Place = Literal[
    "training_step", "backward", "optimizer", "validation", "callback", "loader", "teardown", "collector", "anywhere"
]
ANYWHERE: Final[Place] = "anywhere"


@dataclass
class Cell:
    """One rank's part in one cell: a fault, a moment, one process or two, with us or bare.

    Attributes:
        fault: what strikes.
        moment: when.
        world: number of ranks.
        rank: of this process.
        ours: whether this package records; False is the bare twin, which says what is right.
        directory: the cell's own, the same for all ranks; ``log_dir`` is in it.
        struck: whether it has struck in this process.
        notes: what a fault wants to keep between its parts.

    """

    fault: Fault
    moment: moments.Moment
    world: int
    rank: int
    ours: bool
    directory: Path
    struck: bool = False
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def log_dir(self) -> Path:
        """Where the Trainer's logger and this package write."""
        return self.directory / "log"

    @property
    def is_victim(self) -> bool:
        """Whether the fault strikes in this process."""
        return self.rank in self.fault.victims(self.world) and (self.ours or not self.fault.only_ours)

    def strike(self) -> None:
        """Let the fault strike, once; the moment is left in a file, because this process may be gone afterwards."""
        if self.is_victim and not self.struck:
            self.struck = True
            (self.directory / f"struck.rank{self.rank}").touch()
            self.fault.strike(self)

    def pids(self) -> list[int]:
        """Give the processes of all ranks, this one's included; each rank writes its own before it trains."""
        return [int((self.directory / f"pid.rank{rank}").read_text()) for rank in range(self.world)]

    def write_pid(self) -> None:
        """Say which process this rank is."""
        (self.directory / f"pid.rank{self.rank}").write_text(str(os.getpid()))


def _last_rank(world: int) -> Sequence[int]:
    return [world - 1]


@contextmanager
def _nothing(cell: Cell) -> Iterator[None]:
    yield


def _nothing_left(directory: Path) -> None:
    """Leave everything as it is."""


def _no_arguments(cell: Cell) -> Mapping[str, Any]:
    return {}


def _no_collectors(cell: Cell) -> Sequence[Any]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the matrix.

    Attributes:
        name: of the row, unique.
        says: what happens, for the page.
        place: where in the program it strikes. ``anywhere`` is at the end of a batch, and for ``save`` and ``teardown``
            within this package's own saving of the window.
        strike: does it, in the rank that is hit.
        absent: by moment, why this cell cannot exist.
        worlds: numbers of ranks with which it makes sense.
        victims: the ranks that are hit, given the number of ranks; the last one.
        prepare: around the fit in every rank's process, before the Trainer is made; puts back what it took.
        collectors: further collectors of this package in the fit.
        only_ours: it strikes this package alone: its bare twin is a fit without the fault.
        harms: whether collectors of this package may fail by it. They then say so; in every other cell an ``error`` row
            is red.
        silences: whether the manifest may have no end by it, as if the process had been killed: nothing can be written.
        workers: worker processes of the data loader, and how they are started.
        survives: whether the process that is hit goes on to live; its next fit must then work.
        excuse: given the cell's directory and the moment, what of closed windows may be gone because the storage itself
            is, in words for the table; None where nothing may.
        arguments: further arguments of ``MemProfilerCallback``.
        tidy: when all ranks have ended, given the directory of the cell: gives back what a dead process cannot.

    """

    name: str
    says: str
    place: Place
    strike: Callable[[Cell], None]
    absent: Mapping[str, str] = field(default_factory=dict)
    worlds: tuple[int, ...] = (1, 2)
    victims: Callable[[int], Sequence[int]] = _last_rank
    prepare: Callable[[Cell], AbstractContextManager[None]] = _nothing
    collectors: Callable[[Cell], Sequence[Any]] = _no_collectors
    only_ours: bool = False
    harms: bool = False
    silences: bool = False
    workers: Literal["fork", "spawn"] | None = None
    survives: bool = True
    excuse: Callable[[Path, moments.Moment], str | None] | None = None
    arguments: Callable[[Cell], Mapping[str, Any]] = _no_arguments
    tidy: Callable[[Path], None] = _nothing_left
