"""Turns the actions of a Trainer, by Lightning's names, into steps, phases and points of a session."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.capture.base import Position
from lightning_memprof.capture.session import Session
from lightning_memprof.schedule import Point

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning.pytorch import Callback, Trainer

    from lightning_memprof.schedule import Action

__all__ = ["StageActions", "StepDriver", "position_source", "stage_actions", "stage_function"]

_DATA_WAIT: Final = PHASES.index("data_wait")
_FORWARD: Final = PHASES.index("forward")
_BACKWARD: Final = PHASES.index("backward")
_OPTIMIZER: Final = PHASES.index("optimizer")
_CALLBACKS: Final = PHASES.index("callbacks")

# Hooks that run between or around batches; per-batch hooks of a validation inside fit belong to the validation.
_FIT_HOOKS: Final = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end",
)  # fmt: skip
_PREFIX: Final = {"validate": "validation", "test": "test", "predict": "predict"}

Handlers = dict[str, "Callable[[], None]"]


@dataclass(frozen=True)
class StageActions:
    """Names of a stage's actions.

    Attributes:
        fetch: the fetch of a batch; the first one of a step begins it.
        batch_start: the module's hook before a batch.
        batch_end: the module's hook after a batch.
        forward: the strategy's step.
        before_backward: the module's hook; None outside fit. Manual optimization calls it too, but no action of the
            strategy.
        after_backward: the module's hook; None outside fit.
        before_optimizer_step: the module's hook; None outside fit.
        optimizer: all actions of the optimizer; forward and backward may be nested in them.
        callbacks: hooks that a callback overrides.
        unusual: slow actions that are not part of every step.

    """

    fetch: str
    batch_start: str
    batch_end: str
    forward: str
    before_backward: str | None
    after_backward: str | None
    before_optimizer_step: str | None
    optimizer: tuple[str, ...]
    callbacks: tuple[str, ...]
    unusual: tuple[str, ...] = ()


def stage_function(stage: str) -> str:
    """Return the method of the LightningModule that a step of the stage calls."""
    return "training_step" if stage == "fit" else f"{_PREFIX[stage]}_step"


def stage_actions(trainer: Trainer, stage: str, ours: type[Callback]) -> StageActions:
    """Return the action names of a stage of this Trainer; callbacks of type ``ours`` are not the user's."""
    module = f"[LightningModule]{type(trainer.lightning_module).__name__}"
    strategy = f"[Strategy]{type(trainer.strategy).__name__}"
    users = [callback for callback in trainer.callbacks if not isinstance(callback, ours)]  # type: ignore[attr-defined]
    if stage == "fit":
        return StageActions(
            fetch=f"[{type(trainer.fit_loop.epoch_loop).__name__}].train_dataloader_next",
            batch_start=f"{module}.on_train_batch_start",
            batch_end=f"{module}.on_train_batch_end",
            forward=f"{strategy}.training_step",
            before_backward=f"{module}.on_before_backward",
            after_backward=f"{module}.on_after_backward",
            before_optimizer_step=f"{module}.on_before_optimizer_step",
            optimizer=(f"{module}.optimizer_step", "optimizer_step", f"{module}.optimizer_zero_grad"),
            callbacks=tuple(_overridden(users, _FIT_HOOKS)),
            unusual=(f"{module}.on_validation_start", f"{module}.on_train_epoch_end", "save_checkpoint"),
        )
    prefix = _PREFIX[stage]
    loop = {
        "validate": trainer.validate_loop,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }[stage]
    fetch = "val_next" if stage == "validate" else f"{stage}_next"
    return StageActions(
        fetch=f"[{type(loop).__name__}].{fetch}",
        batch_start=f"{module}.on_{prefix}_batch_start",
        batch_end=f"{module}.on_{prefix}_batch_end",
        forward=f"{strategy}.{prefix}_step",
        before_backward=None,
        after_backward=None,
        before_optimizer_step=None,
        optimizer=(),
        callbacks=tuple(
            _overridden(users, (f"on_{prefix}_batch_start", f"on_{prefix}_batch_end", f"on_{prefix}_epoch_end"))
        ),
    )


def _overridden(callbacks: list[Any], hooks: tuple[str, ...]) -> Iterator[str]:
    for callback in callbacks:
        for hook in hooks:
            method = getattr(type(callback), hook, None)
            is_base = getattr(method, "__qualname__", "") == f"Callback.{hook}"
            if not is_base or hook in vars(callback):
                yield f"[Callback]{callback.state_key}.{hook}"
        yield f"[Callback]{callback.state_key}.on_save_checkpoint"


class StepDriver:
    """Begins a step at the fetch of its batch, and marks its phases and points.

    Where the training step fetches its own batches (``training_step(dataloader_iter)``), the step begins with the
    hook in front of the batch.

    Args:
        session: the session to drive.
        actions: names of the actions of the stage.
        position: returns the position of the run, called once per step with the number of batches of the step that
            Lightning has counted.

    """

    def __init__(self, session: Session, actions: StageActions, position: Callable[[int], Position]) -> None:
        self._session = session
        self._actions = actions
        self._position = position
        self._between_steps = True

    def handlers(self) -> tuple[Handlers, Handlers]:
        """Return the handlers of the start and of the stop of an action, by its name."""
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
        # A batch that the program skipped has no end.
        self._between_steps = True

    def _batch_end(self) -> None:
        self._session.mark(Point.BATCH_END)
        self._between_steps = True


def position_source(trainer: Trainer, stage: str, schedule: Callable[[int], Action]) -> Callable[[int], Position]:
    """Return a function that returns the position of the run before a step.

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
