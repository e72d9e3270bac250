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

from plain import BATCH, Classifier, Vectors, fit, main


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
    main({"double_precision": double_precision, "memory_format": memory_format})
