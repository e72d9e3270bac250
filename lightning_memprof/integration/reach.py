"""Will the schedule record anything in this run?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_memprof.schedule import Schedule
from lightning_memprof.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Trainer

    from lightning_memprof.schedule import Action

__all__ = ["steps_ahead", "unreachable"]


def steps_ahead(trainer: Trainer, stage: str) -> int | None:
    """Return how many batches this run will see if nothing ends it early, or None where it cannot be known."""
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
    if trainer.max_steps >= 0:
        limits.append((trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
    return max(int(min(limits)), 0) if limits else None


def unreachable(trainer: Trainer, stage: str, schedule: Callable[[int], Action]) -> str | None:
    """Return one line with the numbers where the schedule cannot record a step of this run, else None."""
    ahead = steps_ahead(trainer, stage)
    # A function of the user's may count its calls: it is not asked ahead.
    if ahead is None or not isinstance(schedule, Schedule):
        return None
    if schedule.steps and schedule.anchor == "fit" and stage == "fit":
        done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if any(done <= step < done + ahead for step in schedule.steps):
            return None
        listed = ", ".join(map(str, schedule.steps))
        whole = f"fit has {format_count(ahead, 'step')} from step {done} on"
        return f"nothing will be recorded: {whole}, none of them in steps=[{listed}]"
    counted, whole = ahead, f"{stage} has {format_count(ahead, 'step')}"
    if schedule.anchor == "epoch" and stage == "fit" and trainer.num_training_batches != float("inf"):
        counted = min(ahead, int(trainer.num_training_batches))
        whole = f"an epoch has {format_count(counted, 'step')}"
    if schedule.first_active < counted:
        return None
    if schedule.steps:
        return f"nothing will be recorded: {whole}, and the schedule records from step {schedule.first_active} on"
    return (
        f"nothing will be recorded: {whole}, and the schedule records from step {schedule.first_active} on "
        f"(skip_first={schedule.skip_first}, wait={schedule.wait}, warmup={schedule.warmup}); "
        f"use Schedule(wait=0, warmup=0, active={max(counted, 1)})"
    )


def _total(batches: float | list[int | float]) -> int | None:
    counts = batches if isinstance(batches, list) else [batches]
    total = sum(counts)
    return None if total == float("inf") else int(total)
