"""Turns the Trainer's actions into steps, phases and points of a session."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.capture.base import Position
from lightning_memprof.capture.session import Session
from lightning_memprof.schedule import Point

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Trainer

    from lightning_memprof.integration.stages import StageActions
    from lightning_memprof.schedule import Action

__all__ = ["StepDriver", "position_source"]

_DATA_WAIT: Final = PHASES.index("data_wait")
_FORWARD: Final = PHASES.index("forward")
_BACKWARD: Final = PHASES.index("backward")
_OPTIMIZER: Final = PHASES.index("optimizer")
_CALLBACKS: Final = PHASES.index("callbacks")

Handlers = dict[str, "Callable[[], None]"]


class StepDriver:
    """Begins a step at the fetch of its batch, and marks its phases and points.

    Where the training step fetches its own batches (``training_step(dataloader_iter)``), the step begins with the
    hook in front of the batch.

    Args:
        session: is driven.
        actions: names of the stage's actions.
        position: tells where the run is, once a step, given how many batches of the step Lightning has counted.

    """

    def __init__(self, session: Session, actions: StageActions, position: Callable[[int], Position]) -> None:
        self._session = session
        self._actions = actions
        self._position = position
        self._between_steps = True

    def handlers(self) -> tuple[Handlers, Handlers]:
        """Give what to do when an action starts, and when it stops, by the action's name."""
        actions, session = self._actions, self._session
        enter, leave, mark = session.clock.enter, session.clock.leave, session.mark

        def forward_stop() -> None:
            leave()
            mark(Point.AFTER_FORWARD)

        def backward_start() -> None:
            mark(Point.BEFORE_BACKWARD)
            enter(_BACKWARD)

        def backward_stop() -> None:
            leave()
            mark(Point.AFTER_BACKWARD)

        starts: Handlers = {name: partial(enter, _CALLBACKS) for name in actions.callbacks}
        stops: Handlers = dict.fromkeys(actions.callbacks, leave)
        starts |= {name: partial(enter, _OPTIMIZER) for name in actions.optimizer}
        stops |= dict.fromkeys(actions.optimizer, leave)
        starts |= {
            actions.fetch: self._fetch,
            actions.batch_start: self._batch_start,
            actions.forward: partial(enter, _FORWARD),
        }
        stops |= {
            actions.fetch: leave,
            actions.batch_start: partial(mark, Point.BATCH_START),
            actions.forward: forward_stop,
            actions.batch_end: self._batch_end,
            "run_training_epoch": self._epoch_end,
        }
        if actions.before_backward is not None and actions.after_backward is not None:
            stops[actions.before_backward] = backward_start
            starts[actions.after_backward] = backward_stop
        starts |= dict.fromkeys(actions.unusual, session.unusual)
        if actions.before_optimizer_step is not None:
            starts[actions.before_optimizer_step] = partial(mark, Point.BEFORE_OPTIMIZER_STEP)
        return starts, stops

    def _fetch(self) -> None:
        if self._between_steps:
            self._between_steps = False
            self._session.begin_step(self._position(0))
        self._session.clock.enter(_DATA_WAIT)

    def _batch_start(self) -> None:
        if self._between_steps:
            self._between_steps = False
            self._session.begin_step(self._position(1))

    def _epoch_end(self) -> None:
        # A batch that the program skipped has no end of its own.
        self._between_steps = True

    def _batch_end(self) -> None:
        self._session.mark(Point.BATCH_END)
        self._between_steps = True


def position_source(trainer: Trainer, stage: str, schedule: Callable[[int], Action]) -> Callable[[int], Position]:
    """Give a function that says, when a step is about to begin, where the run is.

    Args:
        trainer: of the run.
        stage: ``fit`` counts the batches of the whole run, resumed ones included; other stages count their own.
        schedule: with ``anchor="epoch"`` its count starts again in every epoch; one that lists its steps counts those
            of the whole run; any other those of this process.

    """
    anchor = getattr(schedule, "anchor", "fit")
    listed = bool(getattr(schedule, "steps", ())) and anchor == "fit"
    seen = 0
    count = -1
    last_epoch: int | None = None
    total = trainer.fit_loop.epoch_loop.batch_progress.total if stage == "fit" else None
    epochs = trainer.fit_loop.epoch_progress.current

    def position(counted: int) -> Position:
        nonlocal seen, count, last_epoch
        epoch = epochs.completed
        count = 0 if anchor == "epoch" and epoch != last_epoch else count + 1
        last_epoch = epoch
        step = seen if total is None else total.ready - counted
        seen += 1
        return Position(step, trainer.global_step, epoch, step if listed else count)

    return position
