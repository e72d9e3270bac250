"""Faults around the computation: a thread, a transfer hook, parameter groups."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import fit, main


class Watch(lightning.Callback):
    """A thread that adds up the memory of each mapping of the process and keeps the highest sum."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.stopped = threading.Event()
        self.highest: dict[str, int] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.thread = threading.Thread(target=self.watch, name="memory-watch", daemon=True)
        self.thread.start()

    def watch(self) -> None:
        while not self.stopped.wait(self.seconds):
            for name, size in self.mappings().items():
                self.highest[name] = max(size, self.highest.get(name, 0))

    def mappings(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        name = ""
        for line in Path("/proc/self/smaps").read_text().splitlines():
            words = line.split()
            if not words[0].endswith(":"):
                name = words[5] if len(words) > 5 else "anonymous"
            elif words[-1] == "kB":
                key = f"{name}/{words[0]}"
                sizes[key] = sizes.get(key, 0) + int(words[1])
        return sizes

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.stopped.set()
        self.thread.join()


class Ratings(lightning.LightningModule):
    """Deep and cross network: products of features beside layers."""

    def __init__(self, width: int = 96, depth: int = 14) -> None:
        super().__init__()
        self.start = nn.Linear(40, width)
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.deep = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(depth))
        self.out = nn.Linear(2 * width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, ratings = batch
        first = crossed = hidden = self.start(features)
        for cross, deep in zip(self.crosses, self.deep, strict=True):
            crossed = first * cross(crossed).tanh() + crossed
            hidden = functional.relu(deep(hidden)) + hidden
        loss = functional.mse_loss(self.out(torch.cat([crossed, hidden], 1))[:, 0], ratings)
        self.log("rmse", loss.detach().sqrt())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def busy_watch(fault: bool) -> None:
    """A thread of a callback reads and parses /proc without much of a pause; healthy: each 10 seconds."""
    torch.set_num_threads(1)
    ratings = TensorDataset(torch.randn(512 * 150, 40), torch.randn(512 * 150))
    fit(Ratings(), DataLoader(ratings, batch_size=512), steps=150, callbacks=[Watch(0.06 if fault else 10.0)])


class RandomView(nn.Module):
    """Turns, scales and shifts images, each differently."""

    def matrices(self, count: int) -> Tensor:
        angle, scale, shift = torch.randn(count) * 0.3, 1 + torch.rand(count) * 0.2, torch.randn(count, 2) * 0.1
        cosine, sine = scale * angle.cos(), scale * angle.sin()
        rows = torch.stack([cosine, -sine, shift[:, 0], sine, cosine, shift[:, 1]], dim=1)
        return rows.view(count, 2, 3)

    def forward(self, images: Tensor) -> Tensor:
        grid = functional.affine_grid(self.matrices(len(images)), list(images.shape), align_corners=False)
        view = functional.grid_sample(images, grid, align_corners=False)
        brightness = 1 + 0.2 * torch.randn(len(images), 1, 1, 1)
        return (view * brightness).clamp(-3, 3)


class SelfSupervised(lightning.LightningModule):
    """Base class: two random views of each image, made after the transfer, one image after the other or all at once."""

    def __init__(self, one_by_one: bool) -> None:
        super().__init__()
        self.one_by_one = one_by_one
        self.random_view = RandomView()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not self.trainer.training:
            return batch
        (images,) = batch
        return self.augment(images), self.augment(images)

    @torch.no_grad()
    def augment(self, images: Tensor) -> Tensor:
        if self.one_by_one:
            return torch.cat([self.random_view(image[None]) for image in images])
        view: Tensor = self.random_view(images)
        return view


class SimCLR(SelfSupervised):
    """Two views of an image are closer to each other than to those of other images."""

    def __init__(self, one_by_one: bool) -> None:
        super().__init__(one_by_one)
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, 5, stride=2, padding=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        views = torch.cat(batch)
        codes = functional.normalize(self.projector(self.encoder(views)), dim=1)
        similarity = (codes @ codes.T / 0.2).fill_diagonal_(-1e4)
        loss = functional.cross_entropy(similarity, torch.arange(len(views)).roll(len(views) // 2))
        self.log("info_nce", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


def views_one_by_one(fault: bool) -> None:
    """`on_after_batch_transfer` augments image by image; healthy: the batch at once."""
    images = TensorDataset(torch.randn(64 * 60, 3, 32, 32))
    fit(SimCLR(one_by_one=fault), DataLoader(images, batch_size=64, drop_last=True), steps=60)


class Coupling(nn.Module):
    """Scales and shifts one half of the features by functions of the other half."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.scale = self.function(features // 2, width)
        self.shift = self.function(features // 2, width)

    @staticmethod
    def function(features: int, width: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, features)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, changed = x.chunk(2, dim=1)
        scale = self.scale(kept).tanh()
        return torch.cat([changed * scale.exp() + self.shift(kept), kept], dim=1), scale.sum(1)


class Flow(lightning.LightningModule):
    """The density of particle tracks. Weights decay, biases do not; coupling by coupling, the rates get smaller."""

    def __init__(self, merge_groups: bool, couplings: int = 20) -> None:
        super().__init__()
        self.merge_groups = merge_groups
        self.couplings = nn.ModuleList(Coupling(16, 64) for _ in range(couplings))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        volume: Tensor | float = 0.0
        for coupling in self.couplings:
            x, change = coupling(x)
            volume = volume + change
        return (0.5 * x.square().sum(1) - volume).mean()

    def parameter_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = []
        for name, parameter in self.named_parameters():
            group = {
                "params": [parameter],
                "lr": 1e-4 if int(name.split(".")[1]) < 10 else 3e-4,
                "weight_decay": 0.0 if name.endswith("bias") else 0.05,
            }
            groups.append(group)
        return merged(groups) if self.merge_groups else groups

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameter_groups(), fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def merged(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join groups that have the same settings."""
    found: dict[Any, dict[str, Any]] = {}
    for group in groups:
        settings = group["lr"], group["weight_decay"]
        found.setdefault(settings, {**group, "params": []})["params"] += group["params"]
    return list(found.values())


def group_per_parameter(fault: bool) -> None:
    """The optimizer has 240 groups, each of one tensor; healthy: 4 groups, one for each pair of settings."""
    tracks = TensorDataset(torch.randn(64 * 220, 16))
    fit(Flow(merge_groups=not fault), DataLoader(tracks, batch_size=64), steps=220)


if __name__ == "__main__":
    main(busy_watch, views_one_by_one, group_per_parameter)
