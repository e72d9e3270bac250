"""The number of steps of a run, and whether its schedule records any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_memprof.schedule import Action, Schedule
from lightning_memprof.units import format_count

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


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
