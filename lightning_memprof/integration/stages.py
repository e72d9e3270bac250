"""How Lightning names what happens in a step, by stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning.pytorch import Callback, Trainer

__all__ = ["StageActions", "stage_actions"]

# Hooks that run between or around batches; per-batch hooks of a validation inside fit belong to the validation.
_FIT_HOOKS: Final = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end",
)  # fmt: skip
_PREFIX: Final = {"validate": "validation", "test": "test", "predict": "predict"}


@dataclass(frozen=True)
class StageActions:
    """Names of a stage's actions.

    Attributes:
        function: the LightningModule's method that a step runs.
        fetch: the fetch of a batch; the first of a step is the step's beginning.
        batch_start: the module's hook in front of a batch.
        batch_end: the module's hook behind a batch.
        forward: the strategy's step.
        before_backward: the module's hook; None outside fit. Manual optimization calls it too, and no action of a
            strategy.
        after_backward: the module's hook; None outside fit.
        before_optimizer_step: the module's hook; None outside fit.
        optimizer: all actions that are the optimizer's, in which forward and backward may be nested.
        callbacks: hooks that a callback really has.
        unusual: what is not in every step, and takes its time.

    """

    function: str
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


def stage_actions(trainer: Trainer, stage: str, ours: type[Callback]) -> StageActions:
    """Give the names that Lightning will use in this stage of this Trainer; ``ours`` are no callbacks of the user."""
    module = f"[LightningModule]{type(trainer.lightning_module).__name__}"
    strategy = f"[Strategy]{type(trainer.strategy).__name__}"
    users = [callback for callback in trainer.callbacks if not isinstance(callback, ours)]  # type: ignore[attr-defined]
    if stage == "fit":
        return StageActions(
            function="training_step",
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
        function=f"{prefix}_step",
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
