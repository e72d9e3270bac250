"""Trainings of two processes: dictation, weather, portraits, products and retrieval of pictures."""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Sampler

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main

STEPS = 50


def fit(model: pl.LightningModule, *callbacks: pl.Callback, **options: Any) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=-1,
        max_steps=STEPS,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model)


# --- dictation ---------------------------------------------------------------------------------------------------


class Recordings(Dataset[Tensor]):
    """Recordings of 30 to 360 frames, the shortest first."""

    def __init__(self, samples: int) -> None:
        noise = random.Random(0)
        self.lengths = sorted(30 + int(330 * noise.random() ** 2) for _ in range(samples))
        self.noise = torch.randn(360, 40)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return self.noise[: self.lengths[index]]


class BatchesOfALength(Sampler[list[int]]):
    """Batches of recordings of about the same length, divided among the ranks."""

    def __init__(self, samples: int, batch: int, rank: int, ranks: int, by_block: bool) -> None:
        batches = [list(range(start, start + batch)) for start in range(0, samples - batch + 1, batch)]
        share = len(batches) // ranks
        if by_block:
            self.batches = batches[rank * share : (rank + 1) * share]
        else:
            self.batches = batches[rank::ranks][:share]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        order = [*self.batches]
        random.Random(1).shuffle(order)
        return iter(order)


def frames_and_labels(recordings: list[Tensor]) -> tuple[Tensor, Tensor]:
    longest = max(len(recording) for recording in recordings)
    padded = [functional.pad(recording, (0, 0, 0, longest - len(recording))) for recording in recordings]
    return torch.stack(padded), torch.arange(len(recordings)) % 20


class Dictation(pl.LightningModule):
    def __init__(self, by_block: bool, width: int = 128) -> None:
        super().__init__()
        self.by_block = by_block
        self.project = nn.Linear(40, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 20)

    def train_dataloader(self) -> DataLoader:
        recordings = Recordings(samples=12 * 2 * STEPS)
        batches = BatchesOfALength(
            len(recordings), 12, self.trainer.global_rank, self.trainer.world_size, by_block=self.by_block
        )
        return DataLoader(recordings, batch_sampler=batches, collate_fn=frames_and_labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        frames, labels = batch
        logits = self.head(self.encoder(self.project(frames)).mean(dim=1))
        return functional.cross_entropy(logits, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def dictation(fault: bool) -> None:
    fit(Dictation(by_block=fault), use_distributed_sampler=False)


# --- weather -----------------------------------------------------------------------------------------------------


class StationYears(Dataset[tuple[Tensor, Tensor]]):
    """The years of one process; those before 2000 may still lie on the tape robot's disk."""

    def __init__(self, years: list[int], days: int, from_tape: bool) -> None:
        self.days = [(year, day) for year in years for day in range(days)]
        self.from_tape = from_tape
        self.fields = torch.randn(64, 6, 48, 48)

    def __len__(self) -> int:
        return len(self.days)

    def read_day(self, year: int, day: int) -> Tensor:
        if self.from_tape and year < 2000:
            time.sleep(0.03)
        return self.fields[(year + day) % 64]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        field = self.read_day(*self.days[index])
        return field, field[:1]


class Forecast(pl.LightningModule):
    def __init__(self, from_tape: bool) -> None:
        super().__init__()
        self.from_tape = from_tape
        self.network = nn.Sequential(
            nn.Conv2d(6, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 96, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(96, 1, 3, padding=1),
        )

    def train_dataloader(self) -> DataLoader:
        years = [*range(2000, 2020)] if self.trainer.global_rank == 0 else [*range(1980, 2000)]
        dataset = StationYears(years, days=8 * STEPS // 20, from_tape=self.from_tape)
        return DataLoader(dataset, batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        fields, following = batch
        return functional.mse_loss(self.network(fields), following)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def weather(fault: bool) -> None:
    fit(Forecast(from_tape=fault), use_distributed_sampler=False)


# --- portraits ---------------------------------------------------------------------------------------------------


class Portraits(Dataset[Tensor]):
    def __init__(self, samples: int, side: int = 64) -> None:
        self.samples = samples
        self.pictures = torch.rand(64, 3, side, side)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return self.pictures[index % 64]


class PortraitAutoencoder(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(64, 32, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(32, 3, 2, stride=2), nn.Sigmoid()
        )

    def forward(self, pictures: Tensor) -> Tensor:
        return self.decoder(self.encoder(pictures))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Portraits(samples=2 * 24 * STEPS), batch_size=24, shuffle=True)

    def training_step(self, pictures: Tensor, batch_idx: int) -> dict[str, Tensor]:
        rebuilt = self(pictures)
        return {"loss": functional.l1_loss(rebuilt, pictures), "rebuilt": rebuilt.detach()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class SavePreview(pl.Callback):
    """Writes the pictures and what the network made of them as one PNG file."""

    def __init__(self, folder: str, every: int) -> None:
        self.folder = Path(folder)
        self.every = every

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every:
            return
        rows = torch.cat([batch[:6], outputs["rebuilt"][:6]])
        grid = functional.interpolate(rows, scale_factor=2, mode="bilinear").mul(255).byte().permute(0, 2, 3, 1)
        pixels = np.concatenate(
            [np.concatenate(list(half), axis=1) for half in grid.numpy().reshape(2, 6, 128, 128, 3)]
        )
        Image.fromarray(pixels).save(self.folder / f"step_{trainer.global_step:05}.png")


def portraits(fault: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fit(PortraitAutoencoder(), SavePreview(folder, every=1 if fault else 25))


# --- products ----------------------------------------------------------------------------------------------------


@dataclass
class Product:
    number: int
    title: str
    tags: list[str]


class ProductMatcher(pl.LightningModule):
    """Matches texts and products; the first process also keeps the catalog, to print some titles."""

    def __init__(self, products: int = 250_000, width: int = 320) -> None:
        super().__init__()
        self.products = products
        self.catalog: list[Product] = []
        self.text = nn.Sequential(nn.Linear(300, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.product = nn.Sequential(nn.Linear(300, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def setup(self, stage: str) -> None:
        if self.trainer.is_global_zero:
            self.catalog = [
                Product(number, f"product {number}", [f"tag {number % 100}", "new"]) for number in range(self.products)
            ]

    def train_dataloader(self) -> DataLoader:
        pairs = torch.utils.data.TensorDataset(torch.randn(2 * 5 * 768, 300), torch.randn(2 * 5 * 768, 300))
        return DataLoader(pairs, batch_size=768, shuffle=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        texts, products = batch
        scores = functional.normalize(self.text(texts)) @ functional.normalize(self.product(products)).T
        return functional.cross_entropy(scores / 0.07, torch.arange(len(scores)))

    def on_train_end(self) -> None:
        if self.catalog:
            print("for example:", self.catalog[self.global_step].title)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class KeepMemoryLow(pl.Callback):
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % 2:
            gc.collect()


def products(fault: bool) -> None:
    fit(ProductMatcher(), *([KeepMemoryLow()] if fault else []))


# --- retrieval ---------------------------------------------------------------------------------------------------


class PictureRetrieval(pl.LightningModule):
    """Embeds pictures, and looks for the nearest of a gallery now and then."""

    def __init__(self, divided: bool, gallery: int = 120_000, width: int = 1024) -> None:
        super().__init__()
        self.divided = divided
        self.size = gallery
        self.width = width
        self.embed = nn.Sequential(
            nn.Conv2d(3, 24, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(48, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, width),
        )
        self.gallery: Tensor | None = None

    def setup(self, stage: str) -> None:
        ranks = self.trainer.world_size
        if self.divided:
            self.gallery = torch.rand(self.size // ranks, self.width)
        elif self.trainer.is_global_zero:
            self.gallery = torch.rand(self.size, self.width)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Portraits(samples=2 * 16 * 10), batch_size=16, shuffle=True)

    def training_step(self, pictures: Tensor, batch_idx: int) -> Tensor:
        mirrored = functional.normalize(self.embed(pictures.flip(-1)))
        embedded = functional.normalize(self.embed(pictures))
        return functional.cross_entropy(embedded @ mirrored.T / 0.1, torch.arange(len(pictures)))

    def on_train_end(self) -> None:
        if self.gallery is not None:
            probe = functional.normalize(torch.rand(1, self.width))
            print("nearest:", int((self.gallery @ probe.T).argmax()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def retrieval(fault: bool) -> None:
    fit(PictureRetrieval(divided=not fault))


if __name__ == "__main__":
    main(dictation, weather, portraits, products, retrieval)
