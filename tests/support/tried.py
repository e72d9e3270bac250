"""A training for trials: random order, augmentation and dropout, files of its own, and faults on request."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_memprof import MemProfilerCallback


class Augmented(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        # More steps than are too few to judge.
        return 48 if "waits" in sys.argv else 24

    def __getitem__(self, index: int) -> torch.Tensor:
        # Far more than the step, also on a machine with no free core.
        time.sleep(0.02 if "waits" in sys.argv else 0.002)
        return torch.full((8,), float(index)) * random.random() + torch.rand(8)


class Large(Dataset[torch.Tensor]):
    """Samples of four MiB."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1 << 17, 8)


def network(dropout: float = 0.2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))


class Module(pl.LightningModule):
    def __init__(self, fault: str) -> None:
        super().__init__()
        if fault != "configure":
            self.net = network(0.0 if fault == "exact" else 0.2)
        if fault == "own":
            self.scale = nn.Parameter(torch.tensor(1.0))
        self.fault = fault

    def configure_model(self) -> None:
        if self.fault == "configure" and not hasattr(self, "net"):
            self.net = network()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.fault == "raise" and self.global_step == 2:
            raise RuntimeError("the data are gone")
        if self.fault == "kill" and self.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hang":
            time.sleep(3600)
        if self.fault == "logged":
            with Path("steps.txt").open("a") as file:
                file.write(f"{time.time_ns()} {os.getpid()}\n")
        loss: torch.Tensor = self.net(batch).square().mean()
        if self.fault == "own" and batch_idx == 3:
            return self.scale * loss * float("nan")
        if self.fault != "unusual":
            self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if self.fault == "unusual":
            self.logger.experiment.note(batch_idx)  # type: ignore[union-attr]  # of Elsewhere

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Elsewhere(Logger):
    """Writes where no option of Lightning's leads."""

    name = "elsewhere"
    version = 0

    @property
    def experiment(self) -> Elsewhere:
        return self

    def note(self, number: int) -> None:
        Path("elsewhere.txt").write_text(str(number))

    def log_metrics(self, metrics: object, step: int | None = None) -> None:
        Path("elsewhere.txt").write_text(str(metrics))

    def log_hyperparams(self, params: object, *args: object, **kwargs: object) -> None:
        Path("elsewhere.txt").write_text(str(params))


def main() -> None:
    fault = sys.argv[1] if len(sys.argv) > 1 else ""
    if fault == "input":
        input("Name of the experiment? ")
    if fault == "none":
        return
    ranks = 2 if fault == "ranks" else 1
    own = [MemProfilerCallback()] if fault == "own" else []
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=2,
        logger=CSVLogger("logs"),
        callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=1), *own],
        profiler="fts_extended" if own else None,
        enable_progress_bar=False,
    )
    module = Module(fault)
    loader = DataLoader(Augmented(), batch_size=4, shuffle=True)
    if fault == "list":
        trainer.fit(module, [torch.rand(4, 8) for _ in range(6)])
    elif fault == "unusual":
        trainer.loggers = [Elsewhere()]
        compiled: Any = torch.compile(module, backend="eager")
        trainer.fit(compiled, loader, DataLoader(Augmented(), batch_size=4, shuffle=True))
    else:
        trainer.fit(module, DataLoader(Large(), batch_size=4) if fault == "large" else loader)
    Path("after.txt").touch()


if __name__ == "__main__":
    main()
