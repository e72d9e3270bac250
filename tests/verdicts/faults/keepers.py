"""Faults of memory: outputs of an epoch, a logger, a cache."""

from __future__ import annotations

import functools
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import fit, main


class EpochSummary(lightning.LightningModule):
    """Base class: reports the error of an epoch, from the outputs of all its steps or from a running sum."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.keep = keep
        self.epoch_outputs: list[dict[str, Tensor]] = []
        self.error = torch.zeros(())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.keep:
            self.epoch_outputs.append({"restored": outputs["restored"], "clean": outputs["clean"]})
        else:
            self.error += functional.l1_loss(outputs["restored"], outputs["clean"])

    def on_train_epoch_end(self) -> None:
        for outputs in self.epoch_outputs:
            self.error += functional.l1_loss(outputs["restored"], outputs["clean"])
        self.epoch_outputs.clear()
        self.log("epoch/l1", self.error)


class Restorer(EpochSummary):
    """Removes noise from images of 3 x 72 x 72 pixels."""

    def __init__(self, keep: bool) -> None:
        super().__init__(keep)
        layers: list[nn.Module] = []
        for before, after in pairwise((3, 8, 8, 3)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        (clean,) = batch
        restored = self.layers(clean + 0.2 * torch.randn_like(clean))
        return {"loss": functional.mse_loss(restored, clean), "restored": restored.detach(), "clean": clean}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def unread_outputs(fault: bool) -> None:
    """A base class keeps images of all steps for the end of the epoch; healthy: a running sum."""
    images = TensorDataset(torch.rand(64, 3, 72, 72))
    loader = DataLoader(images, batch_size=32, sampler=[number % 64 for number in range(32 * 60)])
    fit(Restorer(keep=fault), loader, steps=60)


class Notebook(Logger):
    """Notes metrics in memory and writes them when the training ends."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def name(self) -> str:
        return "notebook"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *args: Any, **options: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.pages.append((step, metrics))

    def finalize(self, status: str) -> None:
        lines = (f"{step} {name} {float(value):.4f}" for step, page in self.pages for name, value in page.items())
        Path("notebook.txt").write_text("\n".join(lines))


class Recognizer(lightning.LightningModule):
    """Tells 4000 products apart. Notes how certain it is."""

    def __init__(self, attached: bool) -> None:
        super().__init__()
        self.attached = attached
        self.network = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 1024), nn.GELU())
        self.products = nn.Linear(1024, 4000)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        scores = self.products(self.network(features))
        logs = scores.log_softmax(1)
        entropy = -(logs.exp() * logs).sum(1).mean()
        metric = entropy if self.attached else entropy.item()
        self.logger.log_metrics({"entropy": metric}, step=self.global_step)
        return functional.cross_entropy(scores, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def attached_records(fault: bool) -> None:
    """A logger gets a metric with its graph and keeps it; healthy: a number."""
    products = TensorDataset(torch.randn(128 * 60, 128), torch.randint(4000, (128 * 60,)))
    fit(Recognizer(attached=fault), DataLoader(products, batch_size=128), steps=60, logger=Notebook())


def waves(start: int, length: int, width: int) -> Tensor:
    """Sines and cosines of the positions from ``start``, shape (length, width)."""
    positions = torch.arange(start, start + length)[:, None]
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
    return torch.cat([(positions * rates).sin(), (positions * rates).cos()], 1)


class Scanner(lightning.LightningModule):
    """Reads windows of a long signal. Looks up the encoding of each window's positions."""

    def __init__(self, tables: int | None) -> None:
        super().__init__()
        self.encoding = functools.lru_cache(maxsize=tables)(waves)
        self.embed = nn.Linear(8, 256)
        self.mix = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
        self.head = nn.Linear(256, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        windows, starts, heights = batch
        length = windows.shape[1]
        positions = torch.stack([self.encoding(start, length, 256) for start in starts.tolist()])
        hidden = self.mix(self.embed(windows) + positions)
        return functional.mse_loss(self.head(hidden.mean(1))[:, 0], heights)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def memoized_tables(fault: bool) -> None:
    """An unlimited `lru_cache` keeps tables of positions that never come again; healthy: 8 tables."""
    samples = 8 * 60
    starts = 1000 + 37 * torch.randperm(samples)
    signal = TensorDataset(torch.randn(64, 512, 8).repeat(8, 1, 1)[:samples], starts, torch.randn(samples))
    fit(Scanner(tables=None if fault else 8), DataLoader(signal, batch_size=8), steps=60)


if __name__ == "__main__":
    main(unread_outputs, attached_records, memoized_tables)
