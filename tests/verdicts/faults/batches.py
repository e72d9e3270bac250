"""Faults of the input pipeline: histories of users, rows of a table, nested targets, a file that is read again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import fit, main


class Purchases:
    """A log of purchases, in the order in which they happened, and the histories of its users."""

    def __init__(self, users: int, items: int, rows: int) -> None:
        numbers = np.random.default_rng(0)
        self.users = numbers.integers(0, users, rows)
        self.items = numbers.integers(1, items, rows)

    def history(self, user: int) -> np.ndarray:
        return self.items[self.users == user]


class GroupedPurchases(Purchases):
    """The same, with the rows of each user side by side."""

    def __init__(self, users: int, items: int, rows: int) -> None:
        super().__init__(users, items, rows)
        order = np.argsort(self.users, kind="stable")
        self.grouped = self.items[order]
        self.bounds = np.searchsorted(self.users[order], np.arange(users + 1))

    def history(self, user: int) -> np.ndarray:
        return self.grouped[self.bounds[user] : self.bounds[user + 1]]


class NextPurchase(Dataset[tuple[Tensor, int]]):
    """The last 24 purchases of a user and the one that follows them."""

    def __init__(self, purchases: Purchases, users: int) -> None:
        self.purchases = purchases
        self.users = users

    def __len__(self) -> int:
        return 40 * self.users

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        recent = self.purchases.history(index % self.users)[-25:]
        row = torch.zeros(24, dtype=torch.long)
        row[: len(recent) - 1] = torch.from_numpy(recent[:-1])
        return row, int(recent[-1])


class Recommender(lightning.LightningModule):
    """An average of items and a small network that scores all items."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.items = nn.EmbeddingBag(items, 256, padding_idx=0)
        self.user_tower = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        self.score = nn.Linear(512, items)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        histories, following = batch
        return functional.cross_entropy(self.score(self.user_tower(self.items(histories))), following)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def scanned_histories(fault: bool) -> None:
    """Each sample compares the whole log with its user; healthy: the rows of a user are found by their bounds."""
    users, items = 2000, 1500
    purchases = (Purchases if fault else GroupedPurchases)(users, items, 120_000)
    loader = DataLoader(NextPurchase(purchases, users), batch_size=256, shuffle=True)
    fit(Recommender(items), loader, steps=120)


class Churn(lightning.LightningModule):
    """Categories and numbers of a customer through a network."""

    def __init__(self) -> None:
        super().__init__()
        self.category = nn.Embedding(50, 8)
        self.network = nn.Sequential(
            *(nn.Linear(24 + 4 * 8, 288), nn.SiLU(), nn.Linear(288, 288), nn.SiLU()),
            *(nn.Linear(288, 288), nn.SiLU(), nn.Linear(288, 1)),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers, categories, churned = batch
        features = torch.cat([numbers, self.category(categories).flatten(1)], dim=1)
        loss = functional.binary_cross_entropy_with_logits(self.network(features)[:, 0], churned)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class Customers(lightning.LightningDataModule):
    """A table that fits into memory, in large batches."""

    def __init__(self, batch_size: int, whole_batches: bool) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.whole_batches = whole_batches

    def setup(self, stage: str) -> None:
        rows = 60_000
        self.table = TensorDataset(
            torch.randn(rows, 24), torch.randint(50, (rows, 4)), torch.randint(2, (rows,)).float()
        )

    def train_dataloader(self) -> DataLoader:
        if self.whole_batches:
            sampler = BatchSampler(RandomSampler(self.table), self.batch_size, drop_last=True)
            return DataLoader(self.table, sampler=sampler, batch_size=None)
        return DataLoader(self.table, batch_size=self.batch_size, shuffle=True, drop_last=True)


def single_rows_of_table(fault: bool) -> None:
    """4096 rows of a table are taken one by one and stacked; healthy: a batch is taken at once."""
    fit(Churn(), Customers(4096, whole_batches=not fault), steps=60)  # type: ignore[arg-type]  # a data module


class Scenes(Dataset[tuple[Tensor, Any]]):
    """Images with outlines of their objects, as an annotation file has them."""

    def __init__(self, samples: int) -> None:
        numbers = np.random.default_rng(0)
        self.images = torch.randn(64, 3, 32, 32)
        self.targets: list[Any] = [
            {
                "image_id": index,
                "boxes": numbers.random((6, 4)).tolist(),
                "outlines": numbers.random((6, 24)).tolist(),
                "labels": numbers.integers(0, 8, 6).tolist(),
            }
            for index in range(256)
        ]
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return self.images[index % 64], self.targets[index % 256]


class TensorScenes(Scenes):
    """The same, with tensors."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.targets = [{key: torch.tensor(value) for key, value in target.items()} for target in self.targets]


def scenes_together(samples: list[tuple[Tensor, Any]]) -> tuple[Tensor, list[Any]]:
    """As detectors want it: images in a tensor, targets in a list."""
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), list(targets)


class Detector(lightning.LightningModule):
    """Finds the boxes and what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.boxes = nn.Linear(512, 6 * 4)
        self.labels = nn.Linear(512, 6 * 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        features = self.backbone(images)
        boxes = torch.stack([torch.as_tensor(target["boxes"]) for target in targets])
        labels = torch.stack([torch.as_tensor(target["labels"]) for target in targets])
        box_loss = functional.smooth_l1_loss(self.boxes(features).view(-1, 6, 4), boxes)
        label_loss = functional.cross_entropy(self.labels(features).view(-1, 8, 6), labels)
        self.log_dict({"loss/box": box_loss, "loss/label": label_loss}, batch_size=len(images))
        return box_loss + label_loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def nested_targets(fault: bool) -> None:
    """Targets are lists of numbers, and the transfer to the device visits each of them; healthy: they are tensors."""
    scenes = (Scenes if fault else TensorScenes)(64 * 90)
    fit(Detector(), DataLoader(scenes, batch_size=64, collate_fn=scenes_together), steps=90)


class Weather(lightning.LightningDataModule):
    """Hourly measurements that are read from a text file of a station."""

    file = Path("station.csv")

    def prepare_data(self) -> None:
        rows = np.random.default_rng(0).normal(size=(3001, 40))
        self.file.write_text("\n".join(",".join(f"{value:.4f}" for value in row) for row in rows))

    def train_dataloader(self) -> DataLoader:
        lines = self.file.read_text().splitlines()
        rows = torch.tensor([[float(value) for value in line.split(",")] for line in lines])
        standardized = (rows - rows.mean(0)) / rows.std(0)
        return DataLoader(TensorDataset(standardized[:-1], standardized[1:]), batch_size=500, shuffle=True)


class Nowcast(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(40, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 40))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before, after = batch
        return functional.mse_loss(self.network(before), after)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


def reread_station(fault: bool) -> None:
    """`reload_dataloaders_every_n_epochs=1` parses the file anew for each epoch of 6 batches; healthy: once."""
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1 if fault else 0}
    fit(Nowcast(), Weather(), steps=150, **options)  # type: ignore[arg-type]  # a data module


if __name__ == "__main__":
    main(scanned_histories, single_rows_of_table, nested_targets, reread_station)
