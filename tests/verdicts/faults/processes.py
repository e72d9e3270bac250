"""Faults of the main process, of a worker and of two ranks, which ``ddp_spawn`` starts."""

from __future__ import annotations

import lzma
import sys
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main, quiet


class RipenessNet(lightning.LightningModule):
    """Estimates the sugar of grapes from drone photos."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 24, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(48, 1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        photos, sugar = batch
        prediction = self.layers(photos).squeeze(1)
        return {"loss": functional.mse_loss(prediction, sugar), "prediction": prediction.detach()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Diary(Callback):
    """Notes what the model saw and said, for the report after the training."""

    def __init__(self, with_photos: bool) -> None:
        self.with_photos = with_photos
        self.entries: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        photos, sugar = batch
        entry = {"step": trainer.global_step, "error": float((outputs["prediction"] - sugar).abs().mean())}
        if self.with_photos:
            entry["photos"] = photos.numpy().copy()
            entry["prediction"] = outputs["prediction"].numpy().copy()
        self.entries.append(entry)


def vineyards(fault: bool) -> None:
    data = TensorDataset(torch.rand(1600, 3, 64, 64), torch.rand(1600))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    quiet(150, callbacks=[Diary(with_photos=fault)]).fit(RipenessNet(), loader)


class Fossils(Dataset):
    """Photos of fossils, stored as bytes and turned into floats."""

    def __init__(self, samples: int, cached: bool) -> None:
        self.photos = np.random.default_rng(0).integers(256, size=(samples, 3, 64, 64), dtype=np.uint8)
        self.cached = cached
        self.cache: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.photos)

    def load(self, index: int) -> Tensor:
        return torch.from_numpy(self.photos[index]).float() / 255

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not self.cached:
            return self.load(index), index % 12
        if index not in self.cache:
            self.cache[index] = self.load(index)
        return self.cache[index], index % 12


class FossilNet(lightning.LightningModule):
    """Classifies fossils."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 24, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(48, 12),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        photos, species = batch
        return functional.cross_entropy(self.layers(photos), species)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fossils(fault: bool) -> None:
    data = Fossils(9600, cached=fault)
    loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=1, persistent_workers=True)
    quiet(150).fit(FossilNet(), loader)


class Magnetograms(Dataset):
    """Records of magnetometers. Older ones are still packed with lzma."""

    def __init__(self, records: list[bytes]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        record = self.records[index]
        if record.startswith(b"\xfd7zXZ"):
            record = lzma.decompress(record)
        values = np.frombuffer(record, dtype=np.float32).reshape(3, -1)
        return torch.from_numpy(values.copy()), index % 2


class AuroraNet(lightning.LightningModule):
    """Predicts auroras. The first rank reads the first half of the archive, the second rank the other half."""

    def __init__(self, packed: bool, samples: int = 640, length: int = 1024) -> None:
        super().__init__()
        random = np.random.default_rng(0)
        self.archive = [random.normal(size=3 * length).astype(np.float32).tobytes() for _ in range(samples)]
        if packed:
            half = samples // 2
            self.archive[half:] = [lzma.compress(record, preset=0) for record in self.archive[half:]]
        self.layers = nn.Sequential(
            nn.Conv1d(3, 32, 7, padding=3),
            nn.ReLU(),
            nn.Conv1d(32, 32, 7, padding=3),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(32, 2),
        )

    def train_dataloader(self) -> DataLoader:
        share = len(self.archive) // self.trainer.world_size
        start = self.trainer.global_rank * share
        return DataLoader(Magnetograms(self.archive[start : start + share]), batch_size=32, shuffle=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        values, aurora = batch
        return functional.cross_entropy(self.layers(values), aurora)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def auroras(fault: bool) -> None:
    quiet(100, devices=2, strategy="ddp_spawn", use_distributed_sampler=False).fit(AuroraNet(packed=fault))


class OrbitNet(lightning.LightningModule):
    """Fits the orbits of comets."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(60, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 6),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        sightings, elements = batch
        return functional.mse_loss(self.layers(sightings), elements)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ReferenceComets(Callback):
    """The main process checks the error for a few well known comets."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.sightings, self.elements = torch.randn(256, 60), torch.randn(256, 6)
        self.errors: list[float] = []

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and trainer.global_step % self.every == 0:
            error = (pl_module.layers(self.sightings) - self.elements).abs()
            self.errors.append(error.mean().item())


def comets(fault: bool) -> None:
    data = TensorDataset(torch.randn(20_000, 60), torch.randn(20_000, 6))
    checks = ReferenceComets(every=1 if fault else 50)
    fitter = quiet(120, devices=2, strategy="ddp_spawn", callbacks=[checks])
    fitter.fit(OrbitNet(), DataLoader(data, batch_size=128, shuffle=True))


class IceNet(lightning.LightningModule):
    """Maps sea ice. The main process keeps a gallery of past charts for the picture at the end."""

    def __init__(self, charts: int) -> None:
        super().__init__()
        self.charts = charts
        self.gallery: Tensor | None = None
        self.layers = nn.Sequential(
            nn.Conv2d(2, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 3, 1),
        )

    def on_fit_start(self) -> None:
        if self.trainer.is_global_zero:
            self.gallery = torch.rand(self.charts, 256, 256)

    def on_train_end(self) -> None:
        if self.gallery is not None:
            print("mean chart", self.gallery[:16].mean().item())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        radar, ice = batch
        return functional.cross_entropy(self.layers(radar), ice)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def sea_ice(fault: bool) -> None:
    data = TensorDataset(torch.rand(400, 2, 64, 64), torch.randint(3, (400, 64, 64)))
    fitter = quiet(80, devices=2, strategy="ddp_spawn")
    fitter.fit(IceNet(charts=2000 if fault else 16), DataLoader(data, batch_size=16, shuffle=True))


class TramNet(lightning.LightningModule):
    """Predicts the delays of trams; sums the gradients of four parts of a batch before each update."""

    def __init__(self, hold: bool, width: int = 1024) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.hold = hold
        self.layers = nn.Sequential(
            nn.Linear(200, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        stops, delays = batch
        optimizer = self.optimizers()
        replica: Any = self.trainer.model
        optimizer.zero_grad()
        parts = list(zip(stops.chunk(4), delays.chunk(4), strict=True))
        for i, (stop, delay) in enumerate(parts):
            loss = functional.l1_loss(self.layers(stop).squeeze(1), delay) / len(parts)
            if self.hold and i < len(parts) - 1:
                with replica.no_sync():
                    self.manual_backward(loss)
            else:
                self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def tram_delays(fault: bool) -> None:
    data = TensorDataset(torch.randn(20_000, 200), torch.rand(20_000))
    fitter = quiet(80, devices=2, strategy="ddp_spawn")
    fitter.fit(TramNet(hold=not fault), DataLoader(data, batch_size=128, shuffle=True))


if __name__ == "__main__":
    main(vineyards, fossils, auroras, comets, sea_ice, tram_delays)
