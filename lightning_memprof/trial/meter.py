"""The callbacks in the fit of a trial's process: one ends a recorded fit, the other changes and measures a fit."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops import fit_loop
from lightning.pytorch.trainer import call
from torch.utils.data import DataLoader

from lightning_memprof.capture.loader_workers import worker_memory, worker_pids
from lightning_memprof.capture.observe import Link, replaced, without_torch_function
from lightning_memprof.capture.sources.memory import peak_rss_bytes
from lightning_memprof.compare.trial import Measured
from lightning_memprof.trial.change import Change, RefusedError
from lightning_memprof.trial.changes import batch_samples, parse_change, set_batch_samples
from lightning_memprof.trial.seeds import make_repeatable
from lightning_memprof.trial.task import Task, end

GROUP: Final = "LIGHTNING_MEMPROF_TRIAL_GROUP"
"""The environment variable with the process group that a trial stops and continues."""

# Steps before the measured ones.
_WARMUP: Final = 5
# Of a recorded run: its steps may take minutes each.
_MOST_RECORDED_S: Final = 60.0
_FEWEST_RECORDED: Final = 12


def redirect_callbacks(trainer: Trainer, directory: str) -> None:
    """Let callbacks write into a directory."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
        if getattr(callback, "dirpath", None) is not None:
            callback.dirpath = directory


class _Guest(Callback):
    """Lets a fit run for the steps of a task, whatever its own limits."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._last_update = math.inf

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002 Lightning's
        """Redirect the callbacks of the module, too."""
        redirect_callbacks(trainer, self._task.directory)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 Lightning's
        """Remove the limits of the fit: those of a whole training, which may be shorter than the measurement."""
        loop = trainer.fit_loop
        self._last_update = trainer.estimated_stepping_batches
        loop.max_epochs = loop.epoch_loop.max_steps = -1
        # EarlyStopping and max_time do not end it either.
        loop.epoch_loop.min_steps = sys.maxsize

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """End learning rate schedules with the fit: some raise an exception beyond their last step."""
        if trainer.global_step >= self._last_update:
            trainer.strategy.lr_scheduler_configs.clear()


class Stop(_Guest):
    """Ends a recorded fit after a number of steps, or a minute, without a last validation."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._seen = 0
        self._began = 0.0

    def on_train_batch_end(self, trainer: Trainer, *given: Any) -> None:
        """Count a step; the clock starts with the first."""
        super().on_train_batch_end(trainer, *given)
        self._seen += 1
        self._began = self._began or time.monotonic()
        is_long = self._seen >= _FEWEST_RECORDED and time.monotonic() - self._began > _MOST_RECORDED_S
        if self._seen >= self._task.steps or is_long:
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
            trainer.should_stop = True
            trainer.limit_val_batches = 0


class Meter(_Guest):
    """Applies remedies, measures the steps of a task, and ends the process; code after ``fit`` never runs."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._remedies = [parse_change(name) for name in task.remedies]
        self._first = _WARMUP
        self._batches = math.prod(remedy.batches for remedy in self._remedies)
        self._seen = 0
        self._loaders = 0
        self._samples: int | None = None
        self._losses: list[torch.Tensor] = []
        # Of the batches so far that together replace one.
        self._parts: list[torch.Tensor] = []
        self._in_turn = 0
        self._clock = _Clock()

    def apply(self, hook: str, *given: Any) -> None:
        """Call a hook of each remedy; end the process if one is refused."""
        for remedy in self._remedies:
            if self._task.is_check:
                remedy.make_comparable()
            self._change(getattr(remedy, hook), *given)

    def _change(self, change: Callable[..., None], *given: Any) -> None:
        try:
            change(*given)
        except RefusedError as error:
            end(self._task, Measured(problem=str(error)))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Change what Lightning makes from here on; a spawned rank has none of its parent's changes."""
        super().setup(trainer, pl_module, stage)

        def configured(link: Link) -> Callable[..., None]:
            def configure(*given: Any) -> None:
                link.call(*given)
                self.apply("on_model", trainer.lightning_module)

            return configure

        def processed(link: Link) -> Callable[..., Any]:
            def process(*given: Any, **named: Any) -> Any:
                loader = link.call(*given, **named)
                if isinstance(loader, DataLoader):
                    self._loader(trainer, loader)
                return loader

            return process

        replaced(call, "_call_configure_model", configured)
        replaced(fit_loop, "_process_dataloader", processed)

    def _loader(self, trainer: Trainer, loader: DataLoader[Any]) -> None:
        """Apply the remedies to a training DataLoader, and begin to measure when its first stock of batches is used."""
        if self._task.is_check:
            make_repeatable(trainer, loader)
        self.apply("on_loader", loader)
        samples = batch_samples(loader)
        self._samples = samples if samples in {self._samples, None} or not self._loaders else None
        self._loaders += 1
        if self._task.samples:
            self._change(set_batch_samples, loader, self._task.samples)
            self._samples = self._task.samples
        # Compared runs have the same number of steps.
        stock = 0 if self._task.is_check else loader.num_workers * (loader.prefetch_factor or 0)
        self._first = max(self._first, _WARMUP + stock)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the remedies of optimizers."""
        super().on_train_start(trainer, pl_module)
        self.apply("on_start", trainer, pl_module)
        needs_loader = any(type(remedy).on_loader is not Change.on_loader for remedy in self._remedies)
        if needs_loader and not self._loaders:
            end(self._task, Measured(problem="the training data do not come from a torch.utils.data.DataLoader"))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 Lightning's
        """Stop the clock."""
        self._clock.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 Lightning's
        """Start the clock again."""
        self._clock.resume()

    def on_train_batch_end(self, trainer: Trainer, *given: Any) -> None:
        """Count a step; start the clock after the warm-up, and end after the last step."""
        super().on_train_batch_end(trainer)
        module, outputs, _, batch_idx = given
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._task.is_check and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._parts.append(loss.detach().clone())
        if (batch_idx + 1) % self._batches and not trainer.is_last_batch:
            return
        if self._parts:
            # Lightning divides each loss by their number.
            self._losses.append(torch.stack(self._parts).sum())
            self._parts.clear()
        self._seen += 1
        if self._seen >= self._first:
            self._measure(trainer, module, is_first=batch_idx < self._batches)

    def _measure(self, trainer: Trainer, module: LightningModule, *, is_first: bool) -> None:
        device = trainer.strategy.root_device
        if self._seen == self._first:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            self._begin_turn(device)
            return
        self._in_turn += 1
        turn = self._task.turn
        if turn and self._in_turn == 1:
            # What another process left in the caches, or a worker finished meanwhile, is this step's.
            self._clock.start()
            return
        # The step after a turn is not measured: it must not always be the first of an epoch.
        is_end = turn and self._in_turn > turn and (not trainer.is_last_batch or is_first)
        self._clock.steps += 1
        if is_first or is_end or trainer.is_last_batch or self._clock.measured >= self._task.steps:
            _synchronize(device)
            self._clock.stamp(is_first=is_first)
        if self._clock.measured >= self._task.steps and (is_end or not turn):
            self._finish(trainer, module)
        if is_end:
            self._begin_turn(device)

    def _begin_turn(self, device: torch.device) -> None:
        _synchronize(device)
        self._in_turn = 0
        if self._task.turn and _is_in_group() and int(os.environ.get("LOCAL_RANK", "0")) == 0:
            os.killpg(os.getpgrp(), signal.SIGSTOP)
        self._clock.start()

    def ended(self) -> NoReturn:
        """End the process after a fit that ended before the last step."""
        problem = f"the fit ended after {self._seen} of {self._first + self._task.steps} steps: use fewer --steps"
        end(self._task, Measured(problem=problem))

    def _finish(self, trainer: Trainer, module: LightningModule) -> NoReturn:
        device, clock, steps = trainer.strategy.root_device, self._clock, self._task.steps
        epoch = trainer.num_training_batches / self._batches
        if epoch > steps and any(remedy.is_per_epoch for remedy in self._remedies) and not self._task.is_check:
            problem = f"acts between epochs of {epoch:g} steps, and {steps} are measured: use more --steps"
            end(self._task, Measured(problem=problem))
        measured = Measured(
            steps=clock.measured,
            step_ns=clock.step_ns(epoch if epoch <= steps else math.inf),
            losses=[float(loss) for loss in self._losses],
            weights=_hash(module) if self._task.is_check else "",
            rss_bytes=peak_rss_bytes(0),
            worker_bytes=sum(worker_memory(pid).get("pss_bytes", 0) for pid in worker_pids()),
            device_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            samples=self._samples,
            ranks=max(trainer.num_devices, 1),
            code=[line for remedy in self._remedies for line in remedy.code],
            is_in_group=_is_in_group(),
        )
        end(self._task, measured)


class _Clock:
    """Adds up the time of steps; that of the first of each epoch apart, since chance decides how many are measured."""

    def __init__(self) -> None:
        self.steps = 0
        self.counts = {True: 0, False: 0}
        self._spent_ns = {True: 0, False: 0}
        self._began_ns = 0
        self._paused_ns = 0
        self._pause_began_ns = 0

    @property
    def measured(self) -> int:
        return self.steps + sum(self.counts.values())

    def start(self) -> None:
        """Begin to measure the next steps."""
        self.steps = self._paused_ns = 0
        self._began_ns = time.perf_counter_ns()

    def pause(self) -> None:
        self._pause_began_ns = time.perf_counter_ns()

    def resume(self) -> None:
        self._paused_ns += time.perf_counter_ns() - self._pause_began_ns

    def stamp(self, *, is_first: bool) -> None:
        """Add the steps since the last stamp."""
        self._spent_ns[is_first] += time.perf_counter_ns() - self._began_ns - self._paused_ns
        self.counts[is_first] += self.steps
        self.start()

    def step_ns(self, epoch: float) -> float:
        """Return the mean time of a step; one of ``epoch`` steps is the first, and left out if that is infinite."""
        means = {kind: self._spent_ns[kind] / count for kind, count in self.counts.items() if count}
        if len(means) == 1:
            return next(iter(means.values()))
        return means[False] + (means[True] - means[False]) / epoch


def _is_in_group() -> bool:
    return os.environ.get(GROUP) == str(os.getpgrp())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@without_torch_function
def _hash(module: LightningModule) -> str:
    """Return a hash of the bits of all parameters, of this rank's part where they are sharded."""
    found = hashlib.sha256()
    for parameter in module.parameters():
        local: Any = parameter.detach()
        if hasattr(local, "to_local"):
            local = local.to_local()
        found.update(local.cpu().reshape(-1).contiguous().view(torch.uint8).numpy())
    return found.hexdigest()
