"""The training of ``lightning-memprof demo``: a small GPT on text that needs no download.

The model has token and position embeddings, pre-norm blocks, and an output layer tied to the embedding. Everything that
profiling takes is in :func:`train_demo`.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, Schedule
from lightning_memprof.errors import ConfigError, MemprofError
from lightning_memprof.units import MIB


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


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The size of a model; the default has 2.75 million parameters."""

    vocabulary: int = 256
    context: int = 192
    width: int = 192
    heads: int = 6
    layers: int = 6


class Attention(nn.Module):
    """Causal self-attention with all heads in one projection."""

    def __init__(self, config: GPTConfig) -> None:
        """Build the projections."""
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, width)`` to the same shape."""
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        return projected


class Block(nn.Module):
    """Attention, then a feed-forward network, each on a normalized copy of the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        """Build both halves."""
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, width)`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        transformed: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return transformed


class GPT(nn.Module):
    """A decoder-only transformer."""

    def __init__(self, config: GPTConfig) -> None:
        """Build the layers and draw their weights."""
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token.weight
        self.apply(_draw_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``(batch, time)`` to logits ``(batch, time, vocabulary)``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token(tokens) + self.position(positions)
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


def _draw_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


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
            MemProfilerCallback(schedule=Schedule(wait=max(0, steps // 3 - 3), warmup=1, active=2, repeat=2)),
        ],
        profiler=ExtendedPyTorchProfiler(record_shapes=True, profile_memory=True),
    )
    trainer.fit(LitGPT(config), batches)
    return Path(logger.log_dir)
