"""The training behind ``lightning-memprof demo``: everything that profiling it takes is in ``train_demo``."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, Schedule
from lightning_memprof.demo.data import ByteWindows, read_library
from lightning_memprof.demo.model import GPT, GPTConfig
from lightning_memprof.demo.progress import ProgressBar
from lightning_memprof.errors import ConfigError

__all__ = ["LitGPT", "train_demo"]


class LitGPT(LightningModule):
    """Next-byte prediction."""

    def __init__(self, config: GPTConfig) -> None:
        """Build the model."""
        super().__init__()
        self.model = GPT(config)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy in nats a byte of one batch: tokens and targets, both ``(batch, time)``."""
        tokens, targets = batch
        logits = self.model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Choose AdamW for all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)


def train_demo(out: Path, steps: int = 40) -> Path:
    """Train for ``steps`` batches and record two windows of two steps, a third and two thirds of the way through.

    Args:
        out: where the run goes, in a new directory ``version_N``.
        steps: batches to train on, at least 6.

    Returns:
        The run's ``log_dir``.

    Raises:
        ConfigError: there are too few steps for two windows.

    """
    if steps < 6:
        raise ConfigError(f"steps={steps}: two windows take at least 6 steps")
    seed_everything(0, verbose=False)
    config = GPTConfig()
    batches = DataLoader(ByteWindows(read_library(), config.context), batch_size=8, shuffle=True, drop_last=True)
    logger = TensorBoardLogger(out, name="")
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=1,
        limit_train_batches=steps,
        gradient_clip_val=1.0,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[
            ProgressBar(refresh_rate=4, leave=True),
            MemProfilerCallback(schedule=Schedule(wait=max(0, steps // 3 - 3), warmup=1, active=2, repeat=2)),
        ],
        profiler=ExtendedPyTorchProfiler(record_shapes=True, profile_memory=True),
    )
    trainer.fit(LitGPT(config), batches)
    return Path(logger.log_dir)
