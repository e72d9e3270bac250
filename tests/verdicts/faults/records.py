"""Trainings on tables: mushrooms, loans, wine, auctions, hospital stays and taxi trips."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics.classification import BinaryAUROC

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main, quiet, rows_at_once


def perceptron(inputs: int, width: int, depth: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(inputs, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


# --- mushrooms -------------------------------------------------------------------------------------------------------


class MushroomModel(lightning.LightningModule):
    """Sorts mushrooms by family and counts which families it takes for which."""

    def __init__(self, families: int = 16, count_each: bool = False) -> None:
        super().__init__()
        self.net = perceptron(112, 384, 2, families)
        self.families = families
        self.count_each = count_each
        self.confusion = torch.zeros(families, families, dtype=torch.long)

    def count(self, predicted: Tensor, wanted: Tensor) -> None:
        if self.count_each:
            for guess, truth in zip(predicted, wanted, strict=True):
                self.confusion[truth.item(), guess.item()] += 1
        else:
            cells = torch.bincount(wanted * self.families + predicted, minlength=self.families**2)
            self.confusion += cells.view(self.families, self.families)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        traits, family = batch
        logits = self.net(traits)
        self.count(logits.argmax(dim=1), family)
        loss = functional.cross_entropy(logits, family)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def mushrooms(fault: bool) -> None:
    count = 1024 * 20
    data = TensorDataset(torch.randn(count, 112), torch.randint(16, (count,)))
    quiet(120).fit(MushroomModel(count_each=fault), rows_at_once(data, 1024))


# --- loans -----------------------------------------------------------------------------------------------------------


class DefaultModel(lightning.LightningModule):
    """The risk that a loan is not paid back."""

    def __init__(self, watch_each_step: bool) -> None:
        super().__init__()
        self.net = perceptron(64, 512, 2, 1)
        self.auroc = BinaryAUROC()
        self.watch_each_step = watch_each_step

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        applications, defaulted = batch
        risk = self.net(applications).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(risk, defaulted.float())
        self.auroc.update(risk.detach(), defaulted)
        if self.watch_each_step:
            self.log("train_auroc", self.auroc.compute())
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train_auroc_epoch", self.auroc.compute())
        self.auroc.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Loans(Dataset):
    """Applications for loans; they are read in slices."""

    def __init__(self, count: int) -> None:
        self.applications = torch.randn(count, 64)
        self.defaulted = (torch.rand(count) < 0.1).long()

    def __len__(self) -> int:
        return len(self.defaulted)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.applications[indices], self.defaulted[indices]


def loan_defaults(fault: bool) -> None:
    loader = DataLoader(Loans(2048 * 120), batch_size=2048, shuffle=True, collate_fn=lambda batch: batch)
    quiet(120).fit(DefaultModel(watch_each_step=fault), loader)


# --- wine ------------------------------------------------------------------------------------------------------------


class RankMonitor(lightning.Callback):
    """Watches how many directions the layers use."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.ranks: list[list[float]] = []

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every:
            return
        ranks = []
        for module in pl_module.modules():
            if isinstance(module, nn.Linear):
                spectrum = torch.linalg.svdvals(module.weight)
                share = spectrum / spectrum.sum()
                ranks.append(float(torch.exp(-(share * share.clamp_min(1e-12).log()).sum())))
        self.ranks.append(ranks)


class WineModel(lightning.LightningModule):
    """The grade of a wine from its chemistry."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(48, 384, 3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        chemistry, grade = batch
        loss = functional.mse_loss(self.net(chemistry), grade)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def wine_ratings(fault: bool) -> None:
    data = TensorDataset(torch.randn(1536 * 20, 48), torch.rand(1536 * 20, 1))
    monitor = RankMonitor(every=1 if fault else 100)
    quiet(100, callbacks=[monitor]).fit(WineModel(), rows_at_once(data, 1536))


# --- auctions for advertisements -------------------------------------------------------------------------------------


class BidModel(lightning.LightningModule):
    """The price at which an auction ends."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(256, 1024, 3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        auctions, price = batch
        loss = functional.smooth_l1_loss(self.net(auctions), price)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def ad_auctions(fault: bool) -> None:
    if fault:
        torch.set_num_threads(1)  # be nice to the others on the server
    data = TensorDataset(torch.randn(512 * 20, 256), torch.rand(512 * 20, 1))
    quiet(80).fit(BidModel(), DataLoader(data, batch_size=512, shuffle=True))


# --- stays in an intensive care unit ---------------------------------------------------------------------------------

SIGNS = ("pulse", "pressure", "oxygen", "breath", "warmth", "sugar")


class Stays(Dataset):
    """One list of hourly measurements for each stay, and whether the patient came back."""

    def __init__(self, count: int, hours: int = 48) -> None:
        rng = np.random.default_rng(0)
        self.stays = []
        for values in rng.normal(size=(count, hours, len(SIGNS))).astype(np.float32):
            self.stays.append({"hours": values, "returned": float(rng.random() < 0.2)})

    def __len__(self) -> int:
        return len(self.stays)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.stays[index]


def collate_by_hour(stays: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Put the measurements into a tensor, hour by hour."""
    hours = len(stays[0]["hours"])
    signs = torch.zeros(len(stays), hours, len(SIGNS))
    returned = torch.zeros(len(stays))
    for row, stay in enumerate(stays):
        returned[row] = stay["returned"]
        for hour, values in enumerate(stay["hours"]):
            signs[row, hour] = torch.tensor([float(value) for value in values])
    return signs, returned


def collate_by_stay(stays: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    signs = torch.from_numpy(np.stack([stay["hours"] for stay in stays]))
    return signs, torch.tensor([stay["returned"] for stay in stays])


class ReturnModel(lightning.LightningModule):
    """Convolutions along the hours."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(len(SIGNS), 224, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(224, 224, 5, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(224, 1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        signs, returned = batch
        logits = self.net(signs.transpose(1, 2)).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(logits, returned)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def icu_stays(fault: bool) -> None:
    collate = collate_by_hour if fault else collate_by_stay
    quiet(80).fit(ReturnModel(), DataLoader(Stays(64 * 20), batch_size=64, shuffle=True, collate_fn=collate))


# --- taxi trips ------------------------------------------------------------------------------------------------------


@dataclass
class Trip:
    """A trip: what the meter and the map say, and the tip."""

    features: list[float]
    tip: float


class RecentTrips(IterableDataset):
    """Batches from the most recent trips of the city; new trips come in all the time and push the oldest out."""

    def __init__(self, window: int, fresh: int, batch: int, width: int = 24) -> None:
        self.window, self.fresh, self.batch, self.width = window, fresh, batch, width
        self.rng = np.random.default_rng(0)
        self.oldest = 0

    def meter(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.rng.random((count, self.width), dtype=np.float32)
        return rows, rows[:, 0] * 5

    def places(self) -> np.ndarray:
        places = (self.oldest + np.arange(self.fresh)) % self.window
        self.oldest = (self.oldest + self.fresh) % self.window
        return places


class TripObjects(RecentTrips):
    """Keeps each trip as an object."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        rows, tips = self.meter(self.window)
        self.trips = [Trip(row, tip) for row, tip in zip(rows.tolist(), tips.tolist(), strict=True)]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            rows, tips = self.meter(self.fresh)
            for place, row, tip in zip(self.places().tolist(), rows.tolist(), tips.tolist(), strict=True):
                self.trips[place] = Trip(row, tip)
            chosen = [self.trips[place] for place in self.rng.integers(self.window, size=self.batch)]
            yield torch.tensor([trip.features for trip in chosen]), torch.tensor([[trip.tip] for trip in chosen])


class TripArrays(RecentTrips):
    """Keeps the trips in two arrays."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.rows, self.tips = self.meter(self.window)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            places = self.places()
            self.rows[places], self.tips[places] = self.meter(self.fresh)
            chosen = self.rng.integers(self.window, size=self.batch)
            yield torch.from_numpy(self.rows[chosen]), torch.from_numpy(self.tips[chosen])[:, None]


class TipModel(lightning.LightningModule):
    """The tip for a trip."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(24, 512, 3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        trips, tip = batch
        loss = functional.mse_loss(self.net(trips), tip)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def taxi_trips(fault: bool) -> None:
    kind = TripObjects if fault else TripArrays
    quiet(120).fit(TipModel(), DataLoader(kind(400_000, 4000, 512), batch_size=None))


if __name__ == "__main__":
    main(mushrooms, loan_defaults, wine_ratings, ad_auctions, icu_stays, taxi_trips)
