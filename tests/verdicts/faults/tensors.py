"""Faults of memory: batches that are kept for another round, masks, distances."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import fit, main


def again_and_again(loader: Iterable[Any]) -> Iterator[Any]:
    """Start the loader anew whenever it ends."""
    while True:
        yield from loader


class Unlabeled(Dataset[Tensor]):
    """Images that are made when they are read."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3, 64, 64), (index % 256) / 256)


class SemiSupervised(lightning.LightningModule):
    """FixMatch: labeled images from the trainer, unlabeled ones from a loader of its own that never ends."""

    def __init__(self, unlabeled: Iterator[Tensor]) -> None:
        super().__init__()
        self.unlabeled = unlabeled
        self.network = nn.Sequential(
            nn.AvgPool2d(2),
            nn.Conv2d(3, 32, 5, stride=4, padding=2),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 10),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        others = next(self.unlabeled)
        with torch.no_grad():
            confidence, guesses = self.network(others).softmax(1).max(1)
        noisy = self.network(others + 0.1 * torch.randn_like(others))
        loss = functional.cross_entropy(self.network(images), labels)
        unsupervised = (functional.cross_entropy(noisy, guesses, reduction="none") * (confidence > 0.9)).mean()
        self.log("supervised", loss)
        return loss + unsupervised

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.9, nesterov=True)


def cycled_loader(fault: bool) -> None:
    """`itertools.cycle` keeps each batch of a loader for its next round; healthy: a generator starts it anew."""
    loader = DataLoader(Unlabeled(), batch_size=64)
    unlabeled = itertools.cycle(loader) if fault else again_and_again(loader)
    labeled = TensorDataset(torch.randn(16 * 20, 3, 64, 64), torch.randint(10, (16 * 20,)))
    fit(SemiSupervised(unlabeled), DataLoader(labeled, batch_size=16), steps=90)


class MaskedAttention(nn.Module):
    """Self-attention with a mask that is a buffer, as large as the longest sequence that the model could take."""

    bias: Tensor

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("bias", torch.ones(longest, longest).tril().log()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.project(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, self.bias[..., :length, :length])
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class Music(lightning.LightningModule):
    """Predicts the next note."""

    def __init__(self, longest: int, layers: int = 5, width: int = 96) -> None:
        super().__init__()
        self.notes = nn.Embedding(128, width)
        self.attentions = nn.ModuleList(MaskedAttention(width, 4, longest) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.next_note = nn.Linear(width, 128)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (notes,) = batch
        hidden = self.notes(notes[:, :-1])
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            hidden = hidden + attention(norm(hidden))
        return functional.cross_entropy(self.next_note(hidden).mT, notes[:, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def mask_per_layer(fault: bool) -> None:
    """Each of 5 layers has a mask for 3072 positions, 36 MiB each; healthy: for the 64 that occur."""
    notes = TensorDataset(torch.randint(128, (16 * 60, 65)))
    fit(Music(longest=3072 if fault else 64), DataLoader(notes, batch_size=16), steps=60)


class PointCloud(lightning.LightningModule):
    """Moves points of one cloud to those of another: the loss is the Chamfer distance."""

    def __init__(self, broadcast: bool) -> None:
        super().__init__()
        self.broadcast = broadcast
        self.network = nn.Sequential(
            *(nn.Linear(16, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU()),
            *(nn.Linear(320, 320), nn.ReLU(), nn.Linear(320, 16)),
        )

    def distances(self, ours: Tensor, theirs: Tensor) -> Tensor:
        if self.broadcast:
            return (ours[:, :, None] - theirs[:, None]).pow(2).sum(-1)
        return torch.cdist(ours, theirs).square()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before, after = batch
        distances = self.distances(self.network(before), after)
        loss = distances.min(1).values.mean() + distances.min(2).values.mean()
        self.log("chamfer", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def broadcast_distances(fault: bool) -> None:
    """Distances of all pairs of points from a tensor of all differences; healthy: `torch.cdist`."""
    clouds = TensorDataset(torch.randn(4 * 40, 320, 16), torch.randn(4 * 40, 320, 16))
    fit(PointCloud(broadcast=fault), DataLoader(clouds, batch_size=4), steps=50)


if __name__ == "__main__":
    main(cycled_loader, mask_per_layer, broadcast_distances)
