"""Training scripts around tables: sales, payments, baskets, power load."""

from __future__ import annotations

import gc
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import BinaryAUROC

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main, quiet


def perceptron(inputs: int, width: int, outputs: int, depth: int = 3) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(inputs, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class SalesHistory(Dataset):
    """Sales of a shop's articles in the last weeks, in memory."""

    def __init__(self, count: int, weeks: int = 256) -> None:
        self.history = np.random.default_rng(0).random((count, weeks), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.history)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.float32]:
        row = self.history[index]
        return (row - row.mean()) / (row.std() + 1e-6), row[-1]


class Regressor(lightning.LightningModule):
    def __init__(self, inputs: int, width: int = 1280) -> None:
        super().__init__()
        self.network = perceptron(inputs, width, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.network(rows).squeeze(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows, target = batch
        loss = functional.mse_loss(self(rows), target)
        self.log("mse", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def shop_sales(fault: bool) -> None:
    loader = DataLoader(
        SalesHistory(4 * 256), batch_size=256, shuffle=True, num_workers=2, persistent_workers=not fault
    )
    quiet(64).fit(Regressor(256), loader)


class PaymentModel(lightning.LightningModule):
    """Finds fraudulent payments."""

    def __init__(self, running: bool) -> None:
        super().__init__()
        self.running = running
        self.network = perceptron(48, 256, 1)
        self.auroc = BinaryAUROC()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        payments, fraud = batch
        scores = self.network(payments).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(scores, fraud.float())
        self.auroc.update(scores.detach(), fraud)
        if self.running:
            self.log("train/auroc_so_far", self.auroc.compute())
        self.log("train/loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train/auroc", self.auroc.compute())
        self.auroc.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Batches(Dataset):
    """Payments in ready batches."""

    def __init__(self, batches: int, size: int) -> None:
        self.payments = torch.randn(batches, size, 48)
        self.fraud = (torch.rand(batches, size) < 0.02).long()

    def __len__(self) -> int:
        return len(self.payments)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.payments[index], self.fraud[index]


def card_payments(fault: bool) -> None:
    quiet(60).fit(PaymentModel(running=fault), DataLoader(Batches(60, 6144), batch_size=None, shuffle=True))


class Article:
    def __init__(self, number: int) -> None:
        self.number = number
        self.tags = [f"tag{number % 97}", f"tag{number % 89}"]
        self.prices = {"list": number % 50 + 0.99, "sale": number % 40 + 0.49}


class BasketModel(lightning.LightningModule):
    """Predicts the next article of a basket; the catalogue says what each article is."""

    def __init__(self, tidy: bool, articles: int = 6_000, width: int = 128) -> None:
        super().__init__()
        self.tidy = tidy
        self.catalogue = {number: Article(number) for number in range(articles)}
        self.embedding = nn.Embedding(4000, width)
        self.network = perceptron(8 * width, 2048, 4000, depth=2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        basket, following = batch
        loss = functional.cross_entropy(self.network(self.embedding(basket).flatten(1)), following)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.tidy:
            gc.collect()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def shopping_baskets(fault: bool) -> None:
    data = TensorDataset(torch.randint(4000, (256 * 60, 8)), torch.randint(4000, (256 * 60,)))
    quiet(60).fit(BasketModel(tidy=fault), DataLoader(data, batch_size=256, shuffle=True))


class JsonHistory(Logger):
    """Keeps the metrics of a run in a file that a dashboard reads."""

    def __init__(self, path: Path, whole: bool) -> None:
        super().__init__()
        self.path = path
        self.whole = whole
        self.history: list[dict[str, Any]] = []

    @property
    def name(self) -> str:
        return "history"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        record = {"step": step, "metrics": dict(metrics), "host": [random.random() for _ in range(600)]}
        if self.whole:
            self.history.append(record)
            self.path.write_text(json.dumps(self.history, indent=1))
        else:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")


def turbine_output(fault: bool) -> None:
    data = TensorDataset(torch.randn(60 * 256, 256), torch.randn(60 * 256))
    with tempfile.TemporaryDirectory() as folder:
        logger = JsonHistory(Path(folder) / "history.json", whole=fault)
        loader = DataLoader(data, batch_size=256, shuffle=True)
        quiet(60, logger=logger, log_every_n_steps=1).fit(Regressor(256), loader)


class LoadForecaster(lightning.LightningModule):
    """Predicts tomorrow's power load from the last two weeks."""

    def __init__(self, hours: int) -> None:
        super().__init__()
        self.network = perceptron(hours, 1280, 24)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        past, tomorrow = batch
        loss = functional.l1_loss(self.network(past), tomorrow)
        self.log("mae", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def power_load(fault: bool) -> None:
    hours = 14 * 24
    series = np.random.default_rng(2).normal(50.0, 12.0, (60 * 256, hours + 24))
    series = (series - series.mean()) / series.std()
    model = LoadForecaster(hours)
    if fault:
        model = model.double()
    else:
        series = series.astype(np.float32)
    rows = torch.from_numpy(series)
    loader = DataLoader(TensorDataset(rows[:, :hours], rows[:, hours:]), batch_size=256, shuffle=True)
    quiet(60).fit(model, loader)


if __name__ == "__main__":
    main(shop_sales, card_payments, shopping_baskets, turbine_output, power_load)
