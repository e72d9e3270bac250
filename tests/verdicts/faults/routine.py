"""Faults of the routine around the model: validation, checkpoints, profiling, precision, batch size."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main, quiet


class TideNet(lightning.LightningModule):
    """Predicts the water level of the next six hours from the last two days at eight gauges."""

    def __init__(self, gauges: int = 8, channels: int = 64, horizon: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(gauges, channels, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 5, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(8),
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * channels, horizon)

    def forward(self, levels: Tensor) -> Tensor:
        return self.head(self.body(levels))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        levels, target = batch
        return functional.mse_loss(self(levels), target)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        levels, target = batch
        self.log("val_mae", functional.l1_loss(self(levels), target))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def tide_levels(fault: bool) -> None:
    def gauges(samples: int) -> TensorDataset:
        return TensorDataset(torch.randn(samples, 8, 192), torch.randn(samples, 6))

    training = DataLoader(gauges(100 * 64), batch_size=64, shuffle=True)
    validation = DataLoader(gauges(16 * 64), batch_size=64)
    fitter = quiet(100, val_check_interval=10 if fault else 1.0)
    fitter.fit(TideNet(), training, validation)


class PhasePicker(lightning.LightningModule):
    """Classifies three-component seismograms: noise, P, S, blast, quake."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(3 * 400, 1536),
            nn.ReLU(),
            nn.Linear(1536, 1536),
            nn.ReLU(),
            nn.Linear(1536, 1536),
            nn.ReLU(),
            nn.Linear(1536, 5),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        waves, phases = batch
        return functional.cross_entropy(self.layers(waves), phases)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def seismograms(fault: bool) -> None:
    data = TensorDataset(torch.randn(3000, 3, 400), torch.randint(5, (3000,)))
    saver = ModelCheckpoint(dirpath="checkpoints/seismograms", every_n_train_steps=5 if fault else 100)
    fitter = quiet(100, enable_checkpointing=True, callbacks=[saver])
    fitter.fit(PhasePicker(), DataLoader(data, batch_size=128, shuffle=True))


class FishCounter(lightning.LightningModule):
    """Counts fish in sonar frames."""

    def __init__(self, width: int = 24, depth: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 5, stride=4, padding=2)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.stem(frames)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean(dim=(2, 3))).squeeze(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        frames, counts = batch
        return functional.poisson_nll_loss(self(frames), counts)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fish_counts(fault: bool) -> None:
    data = TensorDataset(torch.randn(2000, 1, 64, 64), torch.randint(20, (2000,)).float())
    loader = DataLoader(data, batch_size=32, shuffle=True)
    tracing: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if fault:
        tracing = torch.profiler.profile(record_shapes=True, profile_memory=True, with_stack=True)
    with tracing:
        quiet(60).fit(FishCounter(), loader)


class Swings(Dataset):
    """States of a double pendulum and the states one tick later, simulated with np."""

    def __init__(self, samples: int, as_single: bool) -> None:
        random = np.random.default_rng(0)
        self.now = random.normal(size=(samples, 32))
        self.later = self.now + 0.01 * random.normal(size=(samples, 32))
        if as_single:
            self.now, self.later = self.now.astype(np.float32), self.later.astype(np.float32)

    def __len__(self) -> int:
        return len(self.now)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.now[index]), torch.from_numpy(self.later[index])


class Dynamics(lightning.LightningModule):
    """Predicts the next state of the pendulum."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 32),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        now, later = batch
        return functional.mse_loss(now + self.layers(now), later)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def pendulums(fault: bool) -> None:
    model = Dynamics()
    if fault:
        model = model.double()  # "expected scalar type Double but found Float"
    quiet(120).fit(model, DataLoader(Swings(20_000, as_single=not fault), batch_size=128, shuffle=True))


class WineTransformer(lightning.LightningModule):
    """Rates wines from eleven lab values, one token for each value."""

    def __init__(self, values: int = 11, width: int = 160, depth: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(values, width))
        self.shift = nn.Parameter(torch.zeros(values, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        values, rating = batch
        tokens = values.unsqueeze(-1) * self.scale + self.shift
        return functional.mse_loss(self.head(self.encoder(tokens).mean(dim=1)).squeeze(1), rating)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def wine_quality(fault: bool) -> None:
    data = TensorDataset(torch.randn(20_000, 11), torch.randn(20_000))
    loader = DataLoader(data, batch_size=8 if fault else 128, shuffle=True)
    quiet(300 if fault else 60).fit(WineTransformer(), loader)


if __name__ == "__main__":
    main(tide_levels, seismograms, fish_counts, pendulums, wine_quality)
