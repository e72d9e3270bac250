"""Faults of the input pipeline: texts, small files, archives, a remote store."""

from __future__ import annotations

import multiprocessing
import re
import sys
import time
from itertools import pairwise
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import fit, main


class Vocabulary:
    """Numbers of lower-case words and punctuation marks."""

    pattern = re.compile(r"[a-z]+|[^\sa-z]")

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, text: str) -> Tensor:
        words = (match.group() for match in self.pattern.finditer(text.lower()))
        return torch.tensor([1 + sum(map(ord, word)) % (self.size - 1) for word in words])


class Reviews(lightning.LightningDataModule):
    """Reviews of 45 to 90 words: texts until a batch is made, or numbers from the start."""

    def __init__(self, encode_first: bool) -> None:
        super().__init__()
        self.encode_first = encode_first
        self.vocabulary = Vocabulary(4000)
        self.reviews: list[Any] = []

    def setup(self, stage: str) -> None:
        numbers = np.random.default_rng(1)
        syllables = [f"{first}{second}" for first in "bdgklmnprst" for second in ("a", "en", "ir", "o", "un")]
        for _ in range(2000):
            words = numbers.choice(syllables, (int(numbers.integers(45, 90)), 3))
            text = ", ".join("".join(word).capitalize() for word in words)
            self.reviews.append(self.vocabulary.encode(text) if self.encode_first else text)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.reviews * 9, batch_size=256, collate_fn=self.together)  # type: ignore[arg-type]  # a list

    def together(self, reviews: list[Any]) -> Tensor:
        rows = reviews if self.encode_first else [self.vocabulary.encode(text) for text in reviews]
        return pad_sequence(rows, batch_first=True)


class Sentiment(lightning.LightningModule):
    """A bag of words and a deep head."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(4000, 512, padding_idx=0)
        self.head = nn.Sequential(nn.Linear(512, 1400), nn.GELU(), nn.Linear(1400, 1400), nn.GELU(), nn.Linear(1400, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scores = self.head(self.bag(batch))[:, 0]
        return functional.binary_cross_entropy_with_logits(scores, (batch[:, 0] % 2).float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def raw_texts(fault: bool) -> None:
    """Collating a batch splits its texts into tokens; healthy: `setup` did."""
    data = Reviews(encode_first=not fault)
    fit(Sentiment(), data, steps=70)  # type: ignore[arg-type]  # a Trainer takes a data module, too


SENSORS, LENGTH = 18, 160


class Recordings(Dataset[Tensor]):
    """Short recordings of sensors, from a file of each or from one for all."""

    recordings = 300

    def __init__(self, folder: Path, separate: bool) -> None:
        folder.mkdir()
        values = np.random.default_rng(2).normal(size=(self.recordings, SENSORS, LENGTH)).astype(np.float32)
        self.folder = folder
        self.separate = separate
        np.save(folder / "all.npy", values)
        for number, recording in enumerate(values if separate else ()):
            for sensor, series in enumerate(recording):
                np.save(folder / f"{number:05}-{sensor}.npy", series)
        self.all = np.load(folder / "all.npy", mmap_mode="r")

    def __len__(self) -> int:
        return 64 * 80

    def __getitem__(self, index: int) -> Tensor:
        number = index % self.recordings
        if not self.separate:
            return torch.from_numpy(self.all[number].copy())
        return torch.from_numpy(np.stack([self.part(number, sensor) for sensor in range(SENSORS)]))

    def part(self, number: int, sensor: int) -> np.ndarray:
        return np.load(self.folder / f"{number:05}-{sensor}.npy")


class Denoiser(lightning.LightningModule):
    """A convolutional autoencoder of series."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise((SENSORS, 64, 64, 64, SENSORS)):
            layers += [nn.Conv1d(before, after, 5, padding=2), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self.layers(batch + 0.1 * torch.randn_like(batch)), batch)
        self.log("mse", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def scattered_files(fault: bool) -> None:
    """A worker opens and parses 18 files per sample; healthy: it reads from one memory map."""
    torch.set_num_threads(1)  # the other core reads
    recordings = Recordings(Path("recordings"), separate=fault)
    loader = DataLoader(recordings, batch_size=64, shuffle=True, num_workers=1, persistent_workers=True)
    fit(Denoiser(), loader, steps=70)


class Archive:
    """Rows behind a slow disk. A handle that is shared takes one reader at a time."""

    def __init__(self, guard: Lock | None, seconds: float) -> None:
        self.rows = torch.randn(512, 400)
        self.guard = guard
        self.seconds = seconds

    def read(self, row: int) -> Tensor:
        if self.guard is None:
            return self.seek(row)
        with self.guard:
            return self.seek(row)

    def seek(self, row: int) -> Tensor:
        time.sleep(self.seconds)
        return self.rows[row % len(self.rows)]


class Spectra(Dataset[Tensor]):
    """Samples from an archive."""

    def __init__(self, archive: Archive, samples: int) -> None:
        self.archive = archive
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return self.archive.read(index)


class Autoencoder(lightning.LightningModule):
    """Spectra through a bottleneck and back."""

    def __init__(self, width: int = 1200) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Linear(400, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.up = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 400))

    def training_step(self, spectra: Tensor, batch_idx: int) -> Tensor:
        loss = functional.l1_loss(self.up(self.down(spectra)), spectra)
        self.log("l1", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def locked_archive(fault: bool) -> None:
    """Three workers share a handle and its lock, so that one reads at a time; healthy: each has its own handle."""
    torch.set_num_threads(1)
    spectra = Spectra(Archive(multiprocessing.Lock() if fault else None, seconds=4e-4), 256 * 80)
    fit(Autoencoder(), DataLoader(spectra, batch_size=256, num_workers=3, persistent_workers=True), steps=60)


class RemoteStore:
    """Answers in a millisecond, however many clients ask."""

    def get(self, key: int) -> np.ndarray:
        time.sleep(1e-3)
        return np.full((3, 16, 16), key % 10, dtype=np.float32)


class Thumbnails(Dataset[Any]):
    """Images of a store, asked for one after another."""

    def __init__(self, store: RemoteStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return 128 * 80

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.store.get(index), index % 10


class Patches(lightning.LightningModule):
    """A mixer of 16 patches of 48 numbers."""

    def __init__(self, width: int = 192, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.across = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.within = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        patches = self.embed(images).flatten(2)
        for across, within in zip(self.across, self.within, strict=True):
            patches = patches + across(patches)
            patches = patches + within(patches.mT).mT
        return functional.cross_entropy(self.head(patches.mean(2)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def lone_worker(fault: bool) -> None:
    """One worker waits for a remote store longer than a step takes; healthy: four wait at the same time."""
    torch.set_num_threads(1)
    workers = 1 if fault else 4
    loader = DataLoader(Thumbnails(RemoteStore()), batch_size=128, num_workers=workers, persistent_workers=True)
    fit(Patches(), loader, steps=60)


if __name__ == "__main__":
    main(raw_texts, scattered_files, locked_archive, lone_worker)
