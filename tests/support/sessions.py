"""Sessions without a Trainer: a run context on this machine, and steps that a test drives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.artifacts.sink import Sink, claim_run_place
from lightning_memprof.capture.base import Collector, Position, RunContext
from lightning_memprof.capture.clock import LoggedTimes, StepClock, device_timer
from lightning_memprof.capture.faults import Faults, OnError
from lightning_memprof.capture.session import Session
from lightning_memprof.schedule import Action, Point

POINTS = (
    Point.BATCH_START,
    Point.AFTER_FORWARD,
    Point.BEFORE_BACKWARD,
    Point.AFTER_BACKWARD,
    Point.BEFORE_OPTIMIZER_STEP,
    Point.BATCH_END,
)


class Times(LoggedTimes):
    """Times of a step that the test knows."""

    def __init__(
        self,
        phases_ns: Sequence[int] = (0,) * len(PHASES),
        actions: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> None:
        super().__init__(StepClock(None), [], 0, 0)
        self.computed = list(actions[0]), list(actions[1]), list(phases_ns)


@dataclass
class Feed:
    """Actions that the test starts and stops itself."""

    listeners: list[tuple[Callable[[str], None], Callable[[str], None]]] = field(default_factory=list)

    @contextmanager
    def listen(self, start: Callable[[str], None], stop: Callable[[str], None]) -> Iterator[None]:
        entry = (start, stop)
        self.listeners.append(entry)
        try:
            yield
        finally:
            self.listeners.remove(entry)

    @contextmanager
    def action(self, name: str) -> Iterator[None]:
        """Tell all who listen that an action starts, and stops."""
        for start, _ in tuple(self.listeners):
            start(name)
        yield
        for _, stop in reversed(tuple(self.listeners)):
            stop(name)


@dataclass
class Tensors:
    """Batches, losses and optimizers that the test gives."""

    batch: list[Callable[[Any], None]] = field(default_factory=list)
    loss: list[Callable[[torch.Tensor], None]] = field(default_factory=list)
    given_optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    @contextmanager
    def listen(
        self, *, batch: Callable[[Any], None] | None = None, loss: Callable[[torch.Tensor], None] | None = None
    ) -> Iterator[None]:
        pairs = [(self.batch, batch), (self.loss, loss)]
        for listeners, listener in pairs:
            if listener is not None:
                listeners.append(listener)
        try:
            yield
        finally:
            for listeners, listener in pairs:
                if listener is not None:
                    listeners.remove(listener)

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self.given_optimizers

    def is_over(self) -> bool:
        return False


@contextmanager
def context(directory: Path, device: str = "cpu", on_error: OnError = "warn") -> Iterator[RunContext]:
    """Give the context of a fit of a small model whose artifacts lie below ``directory``."""
    sink = Sink(claim_run_place(directory), 0)
    run = RunContext(
        rank=0,
        world_size=1,
        stage="fit",
        function="training_step",
        strategy="SingleDeviceStrategy",
        device=torch.device(device),
        model=nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        actions=Feed(),
        training=Tensors(),
        sink=sink,
        faults=Faults(sink.manifest, on_error),
        timer=device_timer(torch.device(device)),
    )
    try:
        yield run
    finally:
        run.resident.close()
        sink.close()


@contextmanager
def session(run: RunContext, schedule: Callable[[int], Action], collectors: Sequence[Collector]) -> Iterator[Session]:
    """Give an open session; it is closed as an exception would close it where the body raises."""
    made = Session(run, schedule, collectors)
    made.open()
    try:
        yield made
    except BaseException as error:
        made.close(reason=f"{type(error).__name__}: {error}")
        raise
    made.close()


def positions(steps: Iterable[int]) -> Iterator[Position]:
    """Give the positions of a fit that starts at step 0 and steps its optimizer every time."""
    for step in steps:
        yield Position(step, step, 0, step)


def drive(made: Session, steps: Iterable[int], inside: Callable[[int], object] = lambda _: None) -> None:
    """Run steps with every point; ``inside`` is called with the step in the middle of each."""
    for position in positions(steps):
        made.begin_step(position)
        for point in POINTS:
            made.mark(point)
            if point is Point.AFTER_FORWARD:
                inside(position.step)
