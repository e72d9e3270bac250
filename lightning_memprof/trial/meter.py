"""Measures the steps of a fit, and ends the process after the last one."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_memprof.analysis.trial import Measured
from lightning_memprof.capture.loader_workers import worker_memory, worker_pids
from lightning_memprof.capture.sources.memory import peak_rss_bytes
from lightning_memprof.trial.remedies import RefusedError, Remedy
from lightning_memprof.trial.task import Task, result_path

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["Meter", "end", "lift_limits"]


class Meter(Callback):
    """Measures the steps of a task, and ends the process; the program's code after ``fit`` never runs.

    Args:
        task: the steps.
        remedies: are applied when the fit starts.

    """

    def __init__(self, task: Task, remedies: Sequence[Remedy]) -> None:
        self._task = task
        self._remedies = remedies
        self._first = task.warmup
        self._seen = 0
        self._losses: list[torch.Tensor] = []
        self._began_ns = 0
        self._paused_ns = 0
        self._validation_ns = 0

    def loader(self, loader: DataLoader[Any]) -> None:
        """Apply the remedies to a training DataLoader, and begin to measure when its first stock of batches is used."""
        for remedy in self._remedies:
            remedy.on_loader(loader)
        # Compared runs have the same number of steps.
        stock = 0 if self._task.is_check else loader.num_workers * (loader.prefetch_factor or 0)
        self._first = max(self._first, self._task.warmup + stock)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the remedies of optimizers, and let the fit run until it is measured."""
        lift_limits(trainer)
        try:
            for remedy in self._remedies:
                remedy.on_start(trainer, pl_module)
        except RefusedError as error:
            end(self._task, Measured(problem=str(error)))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 Lightning's
        """Stop the clock."""
        self._validation_ns = time.perf_counter_ns()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 Lightning's
        """Start the clock again."""
        if self._began_ns:
            self._paused_ns += time.perf_counter_ns() - self._validation_ns

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,  # noqa: ARG002 Lightning's
        batch_idx: int,  # noqa: ARG002 Lightning's
    ) -> None:
        """Count a step; start the clock after the warm-up, and end after the last step."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._task.is_check and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().clone())
        self._seen += 1
        device = trainer.strategy.root_device
        if self._seen == self._first:
            _synchronize(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            self._began_ns = time.perf_counter_ns()
        elif self._seen == self._first + self._task.steps:
            _synchronize(device)
            self._finish(device, pl_module, time.perf_counter_ns() - self._began_ns - self._paused_ns)

    def ended(self) -> NoReturn:
        """End the process after a fit that ended before the last step."""
        wanted = self._first + self._task.steps
        problem = f"the fit ended after {self._seen} of {wanted} steps: use fewer --steps"
        end(self._task, Measured(problem=problem))

    def _finish(self, device: torch.device, module: LightningModule, spent_ns: int) -> NoReturn:
        memory = [worker_memory(pid) for pid in worker_pids()]
        measured = Measured(
            steps=self._task.steps,
            step_ns=spent_ns / self._task.steps,
            losses=[float(loss) for loss in self._losses],
            weights=_hash(module) if self._task.is_check else "",
            rss_bytes=peak_rss_bytes(0),
            worker_bytes=sum(worker.pss_bytes for worker in memory if worker is not None),
            device_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        )
        end(self._task, measured)


def end(task: Task, measured: Measured) -> NoReturn:
    """Write the result, and end the process without the program's own code or Python's cleanup."""
    path = result_path(task.directory)
    partial = Path(f"{path}.partial")
    partial.write_bytes(msgspec.json.encode(measured))
    partial.replace(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def lift_limits(trainer: Trainer) -> None:
    """Let the fit go on until it is ended: its limits are those of a whole training, which may be shorter."""
    loop = trainer.fit_loop
    loop.max_epochs = -1
    loop.epoch_loop.max_steps = -1


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _hash(module: LightningModule) -> str:
    """Return a hash of the bits of all parameters, of this rank's part where they are sharded."""
    found = hashlib.sha256()
    for parameter in module.parameters():
        local: Any = parameter.detach()
        if hasattr(local, "to_local"):
            local = local.to_local()
        found.update(local.cpu().contiguous().view(torch.uint8).numpy().tobytes() if local.numel() else b"")
    return found.hexdigest()
