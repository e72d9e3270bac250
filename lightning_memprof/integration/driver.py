"""Turns the actions of a Trainer, by Lightning's names, into steps, actions of the clock and points of a session.

A step has its position in the run, and the run a number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter_ns
from typing import Any, Final

from lightning.pytorch import Callback, Trainer

from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.capture.base import Position
from lightning_memprof.capture.clock import LEAVE
from lightning_memprof.capture.session import Session
from lightning_memprof.packages import overrides
from lightning_memprof.schedule import Action, Point, Schedule
from lightning_memprof.units import format_count

Handler = Callable[[], None] | int
Handlers = dict[str, Handler]
Log = Callable[[tuple[int, int]], None]

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
# Further hooks of the module alone.
_MODULE_HOOKS: Final = (*_FIT_HOOKS, "configure_gradient_clipping", "lr_scheduler_step", "on_save_checkpoint")
# Not in every step: a validation, a checkpoint, the start and the end of an epoch.
_RARE_ACTIONS: Final = frozenset({"run_validation", "save_checkpoint"})
_RARE_HOOKS: Final = frozenset({"on_save_checkpoint"}) | {
    f"on_{part}_{end}" for part in ("train_epoch", "validation", "validation_epoch") for end in ("start", "end")
}
_LOADERS: Final = ("train_dataloader", "val_dataloader")
_TRANSFERS: Final = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_PREFIX: Final = {"validate": "validation", "test": "test", "predict": "predict"}


@dataclass(frozen=True)
class StageActions:
    """Names of a stage's actions.

    Attributes:
        fetch: the fetch of a batch; the first one of a step begins it.
        batch_start: the module's hook before a batch.
        batch_end: the module's hook after a batch.
        forward: the strategy's step.
        callbacks: hooks that a callback overrides.
        before_backward: the module's hook; None outside fit. Manual optimization calls it too, but no action of the
            strategy.
        after_backward: the module's hook; None outside fit.
        before_optimizer_step: the module's hook; None outside fit.
        optimizer: all actions of the optimizer; forward and backward may be nested in them.
        within: actions in the phase of the action around them: checkpoints, and hooks that the module overrides.
        transfers: the same for a batch on its way to the device; those of a validation inside fit belong to it.
        unusual: slow actions that are not part of every step.
        validation: the step of a validation inside fit; None outside fit.
    """

    fetch: str
    batch_start: str
    batch_end: str
    forward: str
    callbacks: tuple[str, ...]
    before_backward: str | None = None
    after_backward: str | None = None
    before_optimizer_step: str | None = None
    optimizer: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    transfers: tuple[str, ...] = ()
    unusual: tuple[str, ...] = ()
    validation: str | None = None


def stage_function(stage: str) -> str:
    """Return the method of the LightningModule that a step of the stage calls."""
    return "training_step" if stage == "fit" else f"{_PREFIX[stage]}_step"


def stage_actions(trainer: Trainer, stage: str, ours: type[Callback]) -> StageActions:
    """Return the action names of a stage of this Trainer; callbacks of type ``ours`` are not the user's."""
    module = f"[LightningModule]{type(trainer.lightning_module).__name__}"
    strategy = f"[Strategy]{type(trainer.strategy).__name__}"
    users = [callback for callback in trainer.callbacks if not isinstance(callback, ours)]  # type: ignore[attr-defined]
    is_fit, prefix = stage == "fit", _PREFIX.get(stage, "train")
    hooks = tuple(f"on_{prefix}_{place}" for place in ("batch_start", "batch_end", "epoch_end"))
    loop: Any = trainer.fit_loop.epoch_loop if is_fit else getattr(trainer, f"{stage}_loop")
    fetch = {"fit": "train_dataloader_next", "validate": "val_next"}.get(stage, f"{stage}_next")
    actions = StageActions(
        fetch=f"[{type(loop).__name__}].{fetch}",
        batch_start=f"{module}.on_{prefix}_batch_start",
        batch_end=f"{module}.on_{prefix}_batch_end",
        forward=f"{strategy}.{stage_function(stage)}",
        callbacks=tuple(_overridden(users, _FIT_HOOKS if is_fit else hooks)),
        within=tuple(_within(trainer, _MODULE_HOOKS if is_fit else hooks)),
        transfers=tuple(_transfers(trainer)),
    )
    if not is_fit:
        return actions
    return replace(
        actions,
        before_backward=f"{module}.on_before_backward",
        after_backward=f"{module}.on_after_backward",
        before_optimizer_step=f"{module}.on_before_optimizer_step",
        optimizer=(f"{module}.optimizer_step", "optimizer_step", f"{module}.optimizer_zero_grad"),
        unusual=(
            # Before the workers of the validation start.
            f"{module}.on_validation_model_zero_grad",
            f"{module}.on_validation_start",
            f"{module}.on_train_epoch_end",
            "save_checkpoint",
        ),
        validation=f"{strategy}.validation_step",
    )


def _overridden(callbacks: list[Any], hooks: tuple[str, ...]) -> Iterator[str]:
    for callback in callbacks:
        for hook in hooks:
            if overrides(callback, "Callback", hook):
                yield f"[Callback]{callback.state_key}.{hook}"
        yield f"[Callback]{callback.state_key}.on_save_checkpoint"


def _within(trainer: Trainer, hooks: tuple[str, ...]) -> Iterator[str]:
    yield "save_checkpoint"
    module = trainer.lightning_module
    used = {"configure_gradient_clipping": trainer.gradient_clip_val, "lr_scheduler_step": trainer.lr_scheduler_configs}
    for hook in hooks:
        if used.get(hook) or overrides(module, "LightningModule", hook):
            yield f"[LightningModule]{type(module).__name__}.{hook}"
    yield from _of_data(trainer, _LOADERS)


def _transfers(trainer: Trainer) -> Iterator[str]:
    yield f"[Strategy]{type(trainer.strategy).__name__}.batch_to_device"
    yield from _of_data(trainer, _TRANSFERS)


def _of_data(trainer: Trainer, hooks: tuple[str, ...]) -> Iterator[str]:
    """Yield the hooks that the model or the data module overrides."""
    for owner, base in (
        (trainer.lightning_module, "LightningModule"),
        (trainer.datamodule, "LightningDataModule"),  # type: ignore[attr-defined]
    ):
        for hook in hooks:
            if owner is not None and overrides(owner, base, hook):
                yield f"[{base}]{type(owner).__name__}.{hook}"


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
        self._mark_batch_end = session.marking(Point.BATCH_END)
        self._actions = actions
        self._position = position
        self._between_steps = True

    def handlers(self) -> tuple[Handlers, Handlers]:
        """Return the handlers of the start and of the stop of an action, by its name."""
        actions, clock = self._actions, self._session.clock
        starts: Handlers = {name: clock.within_code(name) for name in actions.within}
        for phase, names in (
            (_CALLBACKS, actions.callbacks),
            (_OPTIMIZER, actions.optimizer),
            (_FORWARD, (actions.forward,)),
            (_DATA_WAIT, (actions.fetch,)),
        ):
            starts |= {name: clock.slot(name, phase) for name in names}
        stops: Handlers = dict.fromkeys(starts, LEAVE)
        for name in actions.transfers:
            starts[name] = self._within_step(clock.within_code(name))
            stops[name] = self._within_step(LEAVE)
        before, after = self._points()
        for name in actions.unusual:
            before.setdefault(name, self._session.unusual)
        rare = [name for name in {*starts, *_RARE_ACTIONS} if name.rpartition(".")[2] in _RARE_ACTIONS | _RARE_HOOKS]
        session = self._session
        starts = joined(clock.log, {name: partial(session.rare_action, name) for name in rare}, starts)
        stops = joined(clock.log, stops, dict.fromkeys(rare, partial(session.rare_action, None)))
        return joined(clock.log, before, starts), joined(clock.log, stops, after)

    def _points(self) -> tuple[Handlers, Handlers]:
        """Return what happens before the start and after the stop of an action."""
        actions, clock, marking = self._actions, self._session.clock, self._session.marking
        starts: Handlers = {actions.fetch: self._fetch, actions.batch_start: self._batch_start}
        stops: Handlers = {
            actions.batch_start: marking(Point.BATCH_START),
            actions.forward: marking(Point.AFTER_FORWARD),
            actions.batch_end: self._batch_end,
            "run_training_epoch": self._epoch_end,
        }
        if actions.validation is not None:
            starts[actions.validation] = self._session.validation_batch
        if actions.before_backward is not None and actions.after_backward is not None:
            backward = clock.slot("backward", _BACKWARD)
            stops[actions.before_backward] = _both(clock.log, marking(Point.BEFORE_BACKWARD), backward)
            starts[actions.after_backward] = _both(clock.log, LEAVE, marking(Point.AFTER_BACKWARD))
        if actions.before_optimizer_step is not None:
            starts[actions.before_optimizer_step] = marking(Point.BEFORE_OPTIMIZER_STEP)
        return starts, stops

    def _fetch(self) -> None:
        if self._between_steps:
            self._between_steps = False
            self._session.begin_step(self._position(0))

    def _within_step(self, handler: Handler) -> Callable[[], None]:
        """Return a handler that does nothing between two steps, as for the transfers of a validation inside fit."""
        call = calling(self._session.clock.log, handler)

        def handle() -> None:
            if not self._between_steps:
                call()

        return handle

    def _batch_start(self) -> None:
        if self._between_steps:
            self._between_steps = False
            self._session.begin_step(self._position(1))

    def _epoch_end(self) -> None:
        # A batch that the program skipped has no end.
        self._between_steps = True

    def _batch_end(self) -> None:
        self._mark_batch_end()
        self._between_steps = True


def joined(log: Log, first: Mapping[str, Handler], second: Mapping[str, Handler]) -> Handlers:
    """Return the handlers of both; the two handlers of an action are joined."""
    return {**first} | {
        name: _both(log, first[name], handler) if name in first else handler for name, handler in second.items()
    }


def calling(log: Log, handler: Handler) -> Callable[[], None]:
    """Return a handler as a function; one that is a number goes into the log."""
    return handler if callable(handler) else lambda: log((handler, perf_counter_ns()))


def _both(log: Log, first: Handler, second: Handler) -> Callable[[], None]:
    """Return two handlers as one; each call costs up to 1 µs in every step."""
    if callable(first) and not callable(second):

        def handle() -> None:
            first()
            log((second, perf_counter_ns()))

    else:
        before, after = calling(log, first), calling(log, second)

        def handle() -> None:
            before()
            after()

    return handle


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
    optimizer_steps = _optimizer_steps(trainer)

    def position(counted: int) -> Position:
        nonlocal seen, count, last_epoch
        epoch = epochs.completed
        count = 0 if anchor == "epoch" and epoch != last_epoch else count + 1
        last_epoch = epoch
        step = seen if total is None else total.ready - counted
        seen += 1
        return Position(step, optimizer_steps(), epoch, step if listed else count)

    return position


def _optimizer_steps(trainer: Trainer) -> Callable[[], int]:
    """Return a function for ``trainer.global_step``, which is eight calls of properties in every step."""
    try:
        module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
        automatic = loop.automatic_optimization.optim_progress.optimizer.step.total
        manual = loop.manual_optimization.optim_step_progress.total
    except AttributeError:  # the program's own loop
        return lambda: trainer.global_step
    return lambda: (automatic if module.automatic_optimization else manual).completed


def steps_ahead(trainer: Trainer, stage: str) -> int | None:
    """Return the number of batches of this run if nothing ends it early, or None where it is unknown."""
    if stage == "predict":
        return _total(trainer.num_predict_batches)
    if stage != "fit":
        return _total(trainer.num_val_batches if stage == "validate" else trainer.num_test_batches)
    limits: list[float] = []
    progress = trainer.fit_loop.epoch_loop.batch_progress.total
    per_epoch = trainer.num_training_batches
    if trainer.max_epochs is not None and trainer.max_epochs >= 0 and per_epoch != float("inf"):
        limits.append(
            per_epoch * (trainer.max_epochs - trainer.current_epoch) - progress.ready % max(int(per_epoch), 1)
        )
    if trainer.max_steps >= 0 and _steps_after_each_accumulation(trainer):
        limits.append((trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
    return max(int(min(limits)), 0) if limits else None


def _steps_after_each_accumulation(trainer: Trainer) -> bool:
    """Return whether optimizers step after ``accumulate_grad_batches`` batches, in every epoch."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    is_scheduled = any(hasattr(type(callback), "going_to_accumulate_grad_batches") for callback in callbacks)
    return trainer.lightning_module.automatic_optimization and not is_scheduled


def unreachable(trainer: Trainer, stage: str, schedule: Callable[[int], Action]) -> str | None:
    """Return one line with the numbers where the schedule records no step of this run, else None."""
    ahead = steps_ahead(trainer, stage)
    # A function may count its calls: it is not called ahead of time.
    if ahead is None or not isinstance(schedule, Schedule):
        return None
    if schedule.steps and schedule.anchor == "fit" and stage == "fit":
        done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if any(done <= step < done + ahead for step in schedule.steps):
            return None
        listed = ", ".join(map(str, schedule.steps))
        whole = f"fit has {format_count(ahead, 'step')} starting at step {done}"
        return f"nothing will be recorded: {whole}, none of them in steps=[{listed}]"
    counted, whole = ahead, f"{stage} has {format_count(ahead, 'step')}"
    if schedule.anchor == "epoch" and stage == "fit" and trainer.num_training_batches != float("inf"):
        counted = min(ahead, int(trainer.num_training_batches))
        whole = f"an epoch has {format_count(counted, 'step')}"
    if schedule.first_active < counted:
        return None
    if schedule.steps:
        return f"nothing will be recorded: {whole}, but the first recorded step is {schedule.first_active}"
    return (
        f"nothing will be recorded: {whole}, but the first recorded step is {schedule.first_active} "
        f"(skip_first={schedule.skip_first}, wait={schedule.wait}, warmup={schedule.warmup}); "
        f"use Schedule(wait=0, warmup=0, active={max(counted, 1)})"
    )


def _total(batches: float | list[int | float]) -> int | None:
    counts = batches if isinstance(batches, list) else [batches]
    total = sum(counts)
    return None if total == float("inf") else int(total)
