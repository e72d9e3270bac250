"""The training behind ``lightning-memprof demo``: everything that profiling it takes is in ``train_demo``."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, Schedule
from lightning_memprof.demo.model import GPT, GPTConfig
from lightning_memprof.errors import ConfigError, MemprofError
from lightning_memprof.units import MIB

__all__ = ["ByteWindows", "LitGPT", "read_library", "train_demo"]


def read_library(limit: int = 2 * MIB) -> Tensor:
    """Read the first ``limit`` bytes of the standard library's modules, in alphabetical order; no download is needed.

    Returns:
        ``uint8``, one-dimensional, at most ``limit`` long.

    Raises:
        MemprofError: this Python has no sources of its library.

    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for module in sorted(folder.glob("*.py")):
        text += module.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise MemprofError(
            f"no *.py file in {folder}: the demo trains on the standard library's sources, install Python with them"
        )
    return torch.frombuffer(text, dtype=torch.uint8)[:limit]


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of ``context`` bytes; the target of each is the same sequence one byte later."""

    def __init__(self, text: Tensor, context: int) -> None:
        """Keep ``text``, a one-dimensional ``uint8`` tensor, without copying it."""
        self.text = text
        self.context = context

    def __len__(self) -> int:
        """Return the number of whole sequences."""
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return input and target, both ``int64`` of shape ``(context,)``."""
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


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


class ProgressBar(RichProgressBar):
    """Lightning's progress bar with the loss, without the version number: it fits 80 columns."""

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the logged metrics without Lightning's ``v_num``."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


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
