"""Faults of the computation itself."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import BATCH, STEPS, WIDTH, Attention, Classifier, LanguageModel, Residual, Tokens, Vectors, fit, main


class LoopedAttention(Attention):
    """The same attention, one head after another with its own mask and softmax."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[2]
        heads = []
        for head in range(self.heads):
            scores = query[:, head] @ key[:, head].transpose(-2, -1) / query.shape[-1] ** 0.5
            mask = torch.ones(length, length).tril() == 0
            heads.append(scores.masked_fill(mask, float("-inf")).softmax(-1) @ value[:, head])
        return torch.stack(heads, dim=1)


class Looped(LanguageModel):
    def attention(self, width: int, heads: int) -> nn.Module:
        return LoopedAttention(width, heads)


def looped_attention(fault: bool) -> None:
    """Attention is a Python loop over 8 heads; healthy: one fused call."""
    model = (Looped if fault else LanguageModel)(heads=8)
    fit(model, DataLoader(Tokens(STEPS * 8, 257), batch_size=8))


class Adversarial(lightning.LightningModule):
    """A generator and a discriminator, each with an optimizer."""

    def __init__(self, detach: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.detach = detach
        self.generator = nn.Sequential(Residual(WIDTH), Residual(WIDTH), Residual(WIDTH))
        self.discriminator = nn.Sequential(Residual(WIDTH), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        made = self.generator(torch.randn_like(real))
        for _ in range(2):
            optimizer_d.zero_grad()
            judged = self.discriminator(made.detach() if self.detach else made)
            loss = functional.softplus(judged).mean() + functional.softplus(-self.discriminator(real)).mean()
            self.manual_backward(loss, retain_graph=not self.detach)
            optimizer_d.step()
        optimizer_g.zero_grad()
        self.manual_backward(functional.softplus(-self.discriminator(made)).mean())
        optimizer_g.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.generator, self.discriminator)]


def attached_generator(fault: bool) -> None:
    """The discriminator's loss is propagated through the generator, in vain; healthy: its samples are detached."""
    fit(Adversarial(detach=not fault), DataLoader(Vectors(), batch_size=BATCH), steps=3 * 45)


class Mixer(nn.Module):
    """Mixes all samples of a batch: three products of large matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, width)
        self.between = nn.Linear(width, width)
        self.out = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.out(functional.relu(self.between(functional.relu(self.into(x)))))
        return x + mixed


class Mixed(Classifier):
    def __init__(self, width: int) -> None:
        super().__init__(depth=3)
        self.mixer = Mixer(width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mixer(x))


def dominant_module(fault: bool) -> None:
    """One module takes most of the step; healthy: it takes as long as each of its neighbors."""
    fit(Mixed(width=2560 if fault else 1024), DataLoader(Vectors(), batch_size=BATCH))


def small_batch(fault: bool) -> None:
    """Two samples per batch, so that a step is mostly overhead; healthy: 256."""
    batch = 2 if fault else BATCH
    steps = 240 if fault else 80
    fit(Deep(), DataLoader(Vectors(steps, batch), batch_size=batch), steps=steps)


class Deep(Classifier):
    """Many narrow layers."""

    def __init__(self) -> None:
        super().__init__(width=128, depth=40)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :128])


class Precise(Classifier):
    """Takes vectors in double precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inputs = dtype
        self.to(dtype)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        return super().training_step((features.to(self.inputs), labels), batch_idx)


def double_precision(fault: bool) -> None:
    """Features come as float64 from numpy, and the model was converted to match; healthy: float32."""
    fit(Precise(torch.float64 if fault else torch.float32), DataLoader(Vectors(), batch_size=BATCH))


class Convolutional(lightning.LightningModule):
    """Four convolutions over images of batch x 3 x 48 x 48."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.memory_format = memory_format
        channels = (3, 64, 64, 64, 64)
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(64, 10)
        self.to(memory_format=memory_format)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        features = self.features(images.contiguous(memory_format=self.memory_format))
        return functional.cross_entropy(self.head(features), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def memory_format(fault: bool) -> None:
    """Convolutions in the default memory format; healthy: channels_last."""
    images = TensorDataset(torch.randn(16 * 45, 3, 48, 48), torch.randint(10, (16 * 45,)))
    model = Convolutional(torch.contiguous_format if fault else torch.channels_last)
    fit(model, DataLoader(images, batch_size=16), steps=45)


if __name__ == "__main__":
    main(looped_attention, attached_generator, dominant_module, small_batch, double_precision, memory_format)
