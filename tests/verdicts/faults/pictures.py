"""Trainings on pictures: galaxies, corals, traffic signs, the moon and snowflakes."""

from __future__ import annotations

import copy
import gc
import sys
import time
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main, quiet, rows_at_once


def conv(channels: int, out: int, kernel: int = 3) -> nn.Sequential:
    """Halve the resolution."""
    return nn.Sequential(
        nn.Conv2d(channels, out, kernel, stride=2, padding=kernel // 2), nn.BatchNorm2d(out), nn.ReLU()
    )


class PictureClassifier(lightning.LightningModule):
    """A small convolutional network."""

    def __init__(self, channels: int, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        sizes = (channels, *widths)
        self.body = nn.Sequential(*(conv(a, b) for a, b in pairwise(sizes)))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(dim=(2, 3)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        pictures, labels = batch
        loss = functional.cross_entropy(self(pictures), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


# --- the shape of galaxies -------------------------------------------------------------------------------------------


def compress_plate(plate: np.ndarray) -> bytes:
    """Differences along each row, then zlib: as the survey stores its plates."""
    return zlib.compress(np.diff(plate, axis=1, prepend=np.int16(0)).astype(np.int16).tobytes(), 6)


def decode_plate(blob: bytes, side: int) -> np.ndarray:
    """Undo the compression, take the sky away and stretch the faint parts."""
    differences = np.frombuffer(zlib.decompress(blob), dtype=np.int16).reshape(side, side)
    plate = np.cumsum(differences, axis=1, dtype=np.int32).astype(np.float32)
    sky = np.median(plate)
    noise = np.median(np.abs(plate - sky)) + 1e-6
    return np.arcsinh((plate - sky) / (3 * noise)).astype(np.float32)


class GalaxyPlates(Dataset):
    """Galaxies from a survey, kept as the compressed plates of the archive."""

    def __init__(self, count: int, side: int = 128, decode_first: bool = False) -> None:
        rng = np.random.default_rng(0)
        y, x = np.mgrid[-1 : 1 : side * 1j, -1 : 1 : side * 1j]
        self.side = side
        self.labels = rng.integers(0, 5, count)
        self.blobs = []
        for label in self.labels:
            stretch = 1 + 0.5 * label
            light = 4000 * np.exp(-8 * np.sqrt(x**2 + (stretch * y) ** 2))
            self.blobs.append(compress_plate((light + rng.normal(200, 12, (side, side))).astype(np.int16)))
        self.plates = [decode_plate(blob, side) for blob in self.blobs] if decode_first else None

    def __len__(self) -> int:
        return len(self.blobs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        plate = decode_plate(self.blobs[index], self.side) if self.plates is None else self.plates[index]
        return torch.from_numpy(plate)[None], int(self.labels[index])


def galaxies(fault: bool) -> None:
    plates = GalaxyPlates(640, decode_first=not fault)
    loader = DataLoader(plates, batch_size=48, shuffle=True, drop_last=True)
    quiet(60).fit(PictureClassifier(1, (20, 40, 56), 5), loader)


# --- the health of corals --------------------------------------------------------------------------------------------


class ReefArchive(Dataset):
    """Photos of a reef in a remote archive, which needs a while to answer each request."""

    def __init__(self, count: int, latency: float = 0.0045) -> None:
        self.count = count
        self.latency = latency

    def __len__(self) -> int:
        return self.count

    def download(self, index: int) -> np.ndarray:
        time.sleep(self.latency)
        return np.full((3, 64, 64), index % 251, dtype=np.uint8)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        photo = self.download(index)
        return torch.from_numpy(photo).float() / 255, index % 4


def coral_photos(fault: bool) -> None:
    workers = 1 if fault else 3
    loader = DataLoader(ReefArchive(32 * 60), batch_size=32, shuffle=True, num_workers=workers)
    quiet(60).fit(PictureClassifier(3, (64, 128, 160), 4), loader)


# --- traffic signs ---------------------------------------------------------------------------------------------------


def equalize(picture: np.ndarray) -> np.ndarray:
    """Spread the histogram of each color over the full range."""
    equal = np.empty_like(picture)
    for channel, values in enumerate(picture):
        histogram, edges = np.histogram(values, bins=64, range=(0, 1))
        cumulated = histogram.cumsum() / values.size
        equal[channel] = np.interp(values.ravel(), edges[:-1], cumulated).reshape(values.shape)
    return equal


def equalize_all(pictures: Tensor) -> Tensor:
    return torch.stack([torch.from_numpy(equalize(picture)) for picture in pictures.numpy()])


class SignClassifier(PictureClassifier):
    """Recognizes signs in pictures of equal contrast."""

    def __init__(self, equalize_batches: bool) -> None:
        super().__init__(3, (80, 112, 144), 43)
        self.equalize_batches = equalize_batches

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        pictures, labels = batch
        if self.equalize_batches:
            pictures = equalize_all(pictures)
        return [pictures, labels]


def traffic_signs(fault: bool) -> None:
    pictures = torch.rand(128 * 16, 3, 32, 32) * torch.rand(128 * 16, 1, 1, 1)
    labels = torch.randint(43, (len(pictures),))
    if not fault:
        pictures = equalize_all(pictures)
    loader = DataLoader(TensorDataset(pictures, labels), batch_size=128, shuffle=True)
    quiet(70).fit(SignClassifier(equalize_batches=fault), loader)


# --- craters on the moon ---------------------------------------------------------------------------------------------


class CraterNet(lightning.LightningModule):
    """Finds the center and the radius of a crater; validates with the averaged weights."""

    def __init__(self, copied_average: bool, decay: float = 0.99) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(48 * 48, 768), nn.GELU(), nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 3)
        )
        self.decay = decay
        self.copied_average = copied_average
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        patches, circles = batch
        loss = functional.smooth_l1_loss(self.net(patches), circles)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.copied_average:
            old = copy.deepcopy(self.average.state_dict())
            new = copy.deepcopy(self.net.state_dict())
            mixed = {name: self.decay * old[name] + (1 - self.decay) * new[name] for name in old}
            self.average.load_state_dict(mixed)
        else:
            with torch.no_grad():
                torch._foreach_lerp_(list(self.average.parameters()), list(self.net.parameters()), 1 - self.decay)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.01)


def lunar_craters(fault: bool) -> None:
    data = TensorDataset(torch.randn(640 * 9, 1, 48, 48), torch.rand(640 * 9, 3))
    quiet(90).fit(CraterNet(copied_average=fault), rows_at_once(data, 640))


# --- snowflakes ------------------------------------------------------------------------------------------------------


class FlakeClassifier(PictureClassifier):
    """Sorts snowflakes by their form."""

    def __init__(self, tidy: bool) -> None:
        super().__init__(1, (64, 96, 128), 8)
        self.tidy = tidy

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.tidy:
            gc.collect()  # keep the memory low


def snowflakes(fault: bool) -> None:
    data = TensorDataset(torch.randn(64 * 20, 1, 72, 72), torch.randint(8, (64 * 20,)))
    quiet(50).fit(FlakeClassifier(tidy=fault), DataLoader(data, batch_size=64, shuffle=True))


if __name__ == "__main__":
    main(galaxies, coral_photos, traffic_signs, lunar_craters, snowflakes)
