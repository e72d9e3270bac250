"""Where real steps' time went: each part sleeps for as long as it is looked for."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from torch.utils.data import DataLoader

from lightning_memprof import MemProfilerCallback, Schedule, load_run
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.events import StepEvents, rank_events
from lightning_memprof.account.steps.pauses import pauses
from lightning_memprof.collectors import GarbageCollection, HookTimings, Pulse
from training import Noise, Perceptron, trainer

MS = 1_000_000
# Milliseconds that each part sleeps, all different.
NAPS: Final = {
    Part.DATA_WAIT: 3,
    Part.TRANSFER: 2,
    Part.FORWARD: 6,
    Part.BACKWARD: 5,
    Part.OPTIMIZER: 4,
    Part.CALLBACK: 7,
    Part.VALIDATION: 8,
    Part.CHECKPOINT: 9,
    Part.LOGGING: 10,
}


def nap(part: Part) -> None:
    time.sleep(NAPS[part] / 1000)


class Slow(Noise):
    """Takes its time to load."""

    def __getitem__(self, index: int) -> torch.Tensor:
        nap(Part.DATA_WAIT)
        return super().__getitem__(index)


class SlowBackward(torch.autograd.Function):
    """Does nothing, slowly."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        nap(Part.BACKWARD)
        return gradient


class SlowSGD(torch.optim.SGD):
    """Takes its time to step."""

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        nap(Part.OPTIMIZER)
        super().step()
        return loss


class Automatic(Perceptron):
    """Sleeps in every part of a step."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        nap(Part.FORWARD)
        loss: torch.Tensor = SlowBackward.apply(self.loss(batch))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        nap(Part.VALIDATION)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        if self.trainer.training:
            nap(Part.TRANSFER)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def configure_optimizers(self) -> Any:
        return SlowSGD(self.parameters(), 0.1)


class Scheduled(Automatic):
    """Has a scheduler, which takes the optimizer's step."""

    def configure_optimizers(self) -> Any:
        optimizer = SlowSGD(self.parameters(), 0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]


class Manual(Automatic):
    """Steps by hand."""

    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Napping(pl.Callback):
    """Sleeps after each batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        nap(Part.CALLBACK)


class SlowLogger(CSVLogger):
    """Takes its time to log."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        nap(Part.LOGGING)
        super().log_metrics(metrics, step)


class SlowFiles(TorchCheckpointIO):
    """Takes its time to save."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        nap(Part.CHECKPOINT)
        super().save_checkpoint(*args, **kwargs)


def fit(directory: Path, model: pl.LightningModule, *more: pl.Callback, **options: Any) -> list[StepEvents]:
    """Train for 6 batches an epoch, record steps 1 to 5, and check what holds for every run; give their events."""
    collectors = [Pulse(), HookTimings(), GarbageCollection()]
    ours = MemProfilerCallback(schedule=Schedule(wait=1, warmup=0, active=5), collectors=collectors)
    made = trainer(
        directory, Napping(), *more, ours, logger=SlowLogger(directory, name="", version="log"), **options
    )  # fmt: skip
    validation = DataLoader(Noise(2), batch_size=None) if "val_check_interval" in options else None
    made.fit(model, DataLoader(Slow(6), batch_size=None), validation)
    assert ours.run_directory is not None
    rank = load_run(ours.run_directory).lead
    steps = rank_events(rank)
    assert [problem for window in rank.windows for problem in window.problems] == []
    assert [step.step for step in steps] == [1, 2, 3, 4, 5]
    for step in steps:
        assert sum(step.parts_ns.values()) == step.duration_ns
    # Another clock of ours, which begins some microseconds before the first event; another process may come between.
    assert min(abs(step.duration_ns - (rank.pulse[step.step]["duration_ns"] or 0)) for step in steps) < 20 * MS
    return steps


def slept(step: StepEvents, *parts: Part) -> None:
    """Check that these parts hold their sleep; that they sum to the step leaves no room for another's."""
    for part in parts:
        assert step.parts_ns[part] >= NAPS[part] * MS, part
    for part in {Part.VALIDATION, Part.CHECKPOINT}.difference(parts):
        assert step.parts_ns[part] == 0, part


EVERY_STEP: Final = tuple(part for part in NAPS if part not in (Part.VALIDATION, Part.CHECKPOINT))


@pytest.mark.parametrize("model", [Automatic, Scheduled, Manual])
def test_a_steps_time_lies_in_the_part_that_took_it(tmp_path: Path, model: type[pl.LightningModule]) -> None:
    SlowSGD([torch.nn.Parameter(torch.ones(1))])  # the first of a class gets torch's own hook
    methods = Precision.optimizer_step, CSVLogger.save, SlowSGD.step, _EvaluationLoop.run
    steps = fit(tmp_path, model())
    for step in steps:
        slept(step, *EVERY_STEP)
        assert step.callbacks_ns["Napping"] >= NAPS[Part.CALLBACK] * MS
        assert set(step.callbacks_ns) == {"Napping", "MemProfilerCallback"}
    assert methods == (Precision.optimizer_step, CSVLogger.save, SlowSGD.step, _EvaluationLoop.run)


def test_batches_that_only_accumulate_have_no_optimizer_step_and_no_logging(tmp_path: Path) -> None:
    steps = fit(tmp_path, Automatic(), accumulate_grad_batches=2)
    for action in ("[Optimizer]SlowSGD.step", "[Logger]SlowLogger.log_metrics"):
        told = [any(event.action == action for event in step.events) for step in steps]
        assert told == [True, False, True, False, True]
    for step in steps:
        slept(step, *(part for part in EVERY_STEP if step.step % 2 or part not in (Part.OPTIMIZER, Part.LOGGING)))


def test_validation_and_checkpoints_inside_fit_are_their_own_also_between_two_epochs(tmp_path: Path) -> None:
    steps = fit(
        tmp_path,
        Automatic(),
        ModelCheckpoint(tmp_path / "files", every_n_train_steps=3),
        plugins=[SlowFiles()],
        enable_checkpointing=True,
        val_check_interval=3,
        num_sanity_val_steps=0,
        max_epochs=2,
    )
    for step in steps:
        often = (Part.VALIDATION, Part.CHECKPOINT) if step.step in (2, 5) else ()
        slept(step, *EVERY_STEP, *often)
    # Two batches of validation, the second time after the last batch of the epoch.
    for step in (steps[1], steps[4]):
        assert step.parts_ns[Part.VALIDATION] >= 2 * NAPS[Part.VALIDATION] * MS
        names = [event.action for event in step.events]
        order = ("run_training_batch", "save_checkpoint", "run_validation")
        assert [name for name in names if name in order] == list(order)
        assert "[CheckpointIO]SlowFiles.save_checkpoint" in names


def test_events_come_in_the_order_of_lightning_with_what_its_profiler_does_not_tell(tmp_path: Path) -> None:
    step = fit(tmp_path, Automatic(), gradient_clip_val=1.0)[2]
    expected = [
        ("[_TrainingEpochLoop].train_dataloader_next", 0),
        ("[DataLoader]Slow.sampler", 1),
        ("[DataLoader]Slow.fetch", 1),
        ("[DataLoader]Slow.collate", 2),
        ("[Precision]Precision.convert_input", 0),
        ("[Strategy]SingleDeviceStrategy.batch_to_device", 0),
        ("[Callback]Napping.on_train_batch_start", 0),
        ("[MemProfiler]batch_start", 0),
        ("run_training_batch", 0),
        ("[LightningModule]Automatic.optimizer_step", 1),
        ("[Precision]Precision.optimizer_step", 2),
        ("[Optimizer]SlowSGD.step", 3),
        ("[Strategy]SingleDeviceStrategy.training_step", 4),
        ("[MemProfiler]after_forward", 4),
        ("[Optimizer]SlowSGD.zero_grad", 5),
        ("[Strategy]SingleDeviceStrategy.backward", 4),
        ("[Precision]Precision.pre_backward", 5),
        ("[Precision]Precision.backward", 5),
        ("[Precision]Precision.post_backward", 5),
        ("[Callback]Napping.on_before_optimizer_step", 4),
        ("[Precision]Precision.clip_gradients", 5),
        ("[Callback]Napping.on_train_batch_end", 0),
        ("logging", 0),
        ("[Logger]SlowLogger.log_metrics", 1),
        ("[Logger]SlowLogger.save", 1),
    ]
    told = [(event.action, event.depth) for event in step.events]
    assert [action for action in told if action in expected] == expected


def test_what_the_user_collects_in_a_step_is_a_pause_of_that_step(tmp_path: Path) -> None:
    class Collecting(Automatic):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            gc.collect()

    fit(tmp_path, Collecting())
    found = pauses(load_run(tmp_path).lead)
    assert found is not None
    assert found.generations[2][0] >= 5
    assert found.max_ns <= found.total_ns
