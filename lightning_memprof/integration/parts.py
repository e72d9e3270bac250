"""Parts of a Trainer without profiler actions: precision, optimizers, loggers, checkpoint files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.capture.base import TimedPart

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lightning.pytorch import Trainer

__all__ = ["untold_parts"]

_PRECISION: Final = ("convert_input", "pre_backward", "backward", "post_backward", "optimizer_step", "clip_gradients")
_LOGGER: Final = ("log_metrics", "save")
_STRATEGY: Final = ("save_checkpoint",)
# What waits for other ranks. Not `reduce`: `self.log` compares the bound method of one call with the next one's and
# raises where they differ, so that a step in a window could not log what a step before it did.
_COLLECTIVES: Final = ("barrier", "broadcast", "all_gather")
# Metrics are computed here, and handed to every logger.
_LOGGING: Final = (
    "update_train_step_metrics", "update_train_epoch_metrics", "update_eval_step_metrics", "log_eval_end_metrics",
)  # fmt: skip


def untold_parts(trainer: Trainer, stage: str) -> list[TimedPart]:
    """Return what can be timed of a Trainer besides its profiler's actions; parts that it does not have are left out.

    Actions are named as Lightning names its own: ``[Precision]MixedPrecision.optimizer_step``,
    ``[Optimizer]AdamW.step``, ``[Logger]CSVLogger.log_metrics``, ``[CheckpointIO]TorchCheckpointIO.save_checkpoint``,
    and ``logging`` and ``run_validation`` for what holds others, as its ``run_training_batch`` does.
    """
    strategy = trainer.strategy
    shared = _COLLECTIVES if trainer.world_size > 1 else ()
    parts = [
        *_of("Precision", strategy.precision_plugin, _PRECISION),
        *_of("Strategy", strategy, (*_STRATEGY, *shared)),
        *_of("CheckpointIO", strategy.checkpoint_io, ("save_checkpoint", "remove_checkpoint")),
        *(part for logger in trainer.loggers for part in _of("Logger", logger, _LOGGER)),
        *(TimedPart(trainer._logger_connector, method, "logging") for method in _LOGGING),
    ]
    if stage == "fit":
        loop = trainer.fit_loop.epoch_loop
        parts += [
            *(part for optimizer in trainer.optimizers for part in _of("Optimizer", optimizer, ("step", "zero_grad"))),
            TimedPart(loop.val_loop, "run", "run_validation"),
        ]
        if shared:
            action = f"[Strategy]{type(strategy).__name__}.broadcast_sigterm"
            parts.append(TimedPart(loop, "_broadcast_sigterm_tensor", action))
    return [part for part in parts if callable(getattr(part.owner, part.method, None))]


def _of(kind: str, owner: object, methods: Iterable[str]) -> Iterator[TimedPart]:
    for method in methods:
        yield TimedPart(owner, method, f"[{kind}]{type(owner).__name__}.{method}")
