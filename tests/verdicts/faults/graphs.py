"""Faults of the autograd graph and of tensors that stay in memory."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main, quiet


class CoinGan(lightning.LightningModule):
    """Draws coins. ``toggles``: the discriminator is frozen while the generator trains."""

    def __init__(self, cut: bool, toggles: bool = False, latent: int = 64) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.cut = cut
        self.toggles = toggles
        self.latent = latent
        self.generator = nn.Sequential(
            nn.Linear(latent, 128 * 8 * 8),
            nn.Unflatten(1, (128, 8, 8)),
            nn.ConvTranspose2d(128, 64, 4, stride=2, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 48, 4, stride=2, padding=1),
            nn.BatchNorm2d(48),
            nn.ReLU(),
            nn.Conv2d(48, 1, 3, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, 24, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(24, 48, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(48 * 8 * 8, 1),
        )

    def judge(self, coins: Tensor, real: bool) -> Tensor:
        verdict = self.discriminator(coins)
        return functional.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, float(real)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (coins,) = batch
        optimizer_g, optimizer_d = self.optimizers()

        fakes = self.generator(torch.randn(len(coins), self.latent))
        if self.cut:
            fakes = fakes.detach()
        loss_d = self.judge(coins, real=True) + self.judge(fakes, real=False)
        optimizer_d.zero_grad()
        self.manual_backward(loss_d)
        optimizer_d.step()

        if self.toggles:
            self.toggle_optimizer(optimizer_g)
        fakes = self.generator(torch.randn(len(coins), self.latent))
        loss_g = self.judge(fakes, real=True)
        optimizer_g.zero_grad()
        self.manual_backward(loss_g)
        optimizer_g.step()
        if self.toggles:
            self.untoggle_optimizer(optimizer_g)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=2e-4),
            torch.optim.SGD(self.discriminator.parameters(), lr=2e-4),
        ]


def roman_coins(fault: bool) -> None:
    data = TensorDataset(torch.rand(3000, 1, 32, 32) * 2 - 1)
    quiet(160).fit(CoinGan(cut=not fault), DataLoader(data, batch_size=32, shuffle=True))


def greek_coins(fault: bool) -> None:
    data = TensorDataset(torch.rand(3000, 1, 32, 32) * 2 - 1)
    quiet(160).fit(CoinGan(cut=not fault, toggles=True), DataLoader(data, batch_size=32, shuffle=True))


def reader(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 26),
    )


class HandwritingStudent(lightning.LightningModule):
    """Distills a large reader of handwriting into a small one."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.frozen = frozen
        self.student = reader(24)
        self.teacher = reader(32)

    def on_train_start(self) -> None:
        self.teacher.eval()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        glyphs, letters = batch
        if self.frozen:
            with torch.no_grad():
                taught = self.teacher(glyphs)
        else:
            taught = self.teacher(glyphs)
        answer = self.student(glyphs)
        soft = functional.kl_div(
            functional.log_softmax(answer / 2, dim=1), functional.softmax(taught / 2, dim=1), reduction="batchmean"
        )
        return functional.cross_entropy(answer, letters) + soft

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.student.parameters(), lr=0.01)


def handwriting(fault: bool) -> None:
    data = TensorDataset(torch.rand(3000, 1, 32, 32), torch.randint(26, (3000,)))
    quiet(80).fit(HandwritingStudent(frozen=not fault), DataLoader(data, batch_size=64, shuffle=True))


class TreeNet(lightning.LightningModule):
    """Names the species of a street tree and estimates its height."""

    def __init__(self, separate: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.separate = separate
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 48, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(48, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.species = nn.Linear(64, 30)
        self.height = nn.Linear(64, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        photos, species, height = batch
        optimizer = self.optimizers()
        features = self.trunk(photos)
        species_loss = functional.cross_entropy(self.species(features), species)
        height_loss = functional.mse_loss(self.height(features).squeeze(1), height)
        optimizer.zero_grad()
        if self.separate:
            self.manual_backward(species_loss, retain_graph=True)
            self.manual_backward(height_loss)
        else:
            self.manual_backward(species_loss + height_loss)
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def street_trees(fault: bool) -> None:
    data = TensorDataset(torch.rand(1000, 3, 48, 48), torch.randint(30, (1000,)), torch.rand(1000))
    quiet(80).fit(TreeNet(separate=fault), DataLoader(data, batch_size=32, shuffle=True))


class FloodMapper(lightning.LightningModule):
    """Segments radar images: land, water, flooded land and so on; reports the share of water at the end."""

    def __init__(self, keep_maps: bool, classes: int = 8) -> None:
        super().__init__()
        self.keep_maps = keep_maps
        self.outputs: list[Any] = []
        self.layers = nn.Sequential(
            nn.Conv2d(2, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, classes, 1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, classes = batch
        logits = self.layers(images)
        loss = functional.cross_entropy(logits, classes)
        if self.keep_maps:
            self.outputs.append({"loss": loss, "logits": logits})
        else:
            self.outputs.append({"loss": loss.item(), "water": logits[:, 1].gt(0).float().mean().item()})
        return loss

    def on_train_end(self) -> None:
        last = self.outputs[-1]
        print("water", last["logits"][:, 1].gt(0).float().mean().item() if self.keep_maps else last["water"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def flood_maps(fault: bool) -> None:
    data = TensorDataset(torch.rand(640, 2, 96, 96), torch.randint(8, (640, 96, 96)))
    quiet(100).fit(FloodMapper(keep_maps=fault), DataLoader(data, batch_size=16, shuffle=True))


class MosaicMatcher(lightning.LightningModule):
    """Matches the patches of two photos of a mosaic: each patch finds its partner among all patches of a batch."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once
        self.encoder = nn.Sequential(nn.Linear(192, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64))

    def rows_loss(self, rows: Tensor, others: Tensor, partners: Tensor) -> Tensor:
        similarity = rows @ others.T / 0.1
        return functional.cross_entropy(similarity, partners, reduction="sum")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        first, second = (functional.normalize(self.encoder(photo.flatten(0, 1)), dim=1) for photo in batch)
        partners = torch.arange(len(first))
        if self.at_once:
            return self.rows_loss(first, second, partners) / len(first)
        total = torch.zeros(())
        for rows, targets in zip(first.split(512), partners.split(512), strict=True):
            total = total + checkpoint(self.rows_loss, rows, second, targets, use_reentrant=False)
        return total / len(first)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def mosaics(fault: bool) -> None:
    data = TensorDataset(torch.rand(480, 64, 192), torch.rand(480, 64, 192))
    quiet(60).fit(MosaicMatcher(at_once=fault), DataLoader(data, batch_size=48, shuffle=True))


class KeepBest(Callback):
    """Keeps the model with the best loss of an epoch."""

    def __init__(self) -> None:
        self.best_loss = float("inf")
        self.best_model: lightning.LightningModule | None = None

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        loss = trainer.callback_metrics["loss"].item()
        if loss < self.best_loss:
            self.best_loss = loss
            self.best_model = copy.deepcopy(pl_module)


class CustomsNet(lightning.LightningModule):
    """Finds the tariff code of a customs form from its word counts."""

    def __init__(self, words: int = 8000, width: int = 4096, codes: int = 500) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(words, width), nn.ReLU(), nn.Linear(width, codes))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        counts, code = batch
        loss = functional.cross_entropy(self.layers(counts), code)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def customs_forms(fault: bool) -> None:
    data = TensorDataset(torch.rand(1280, 8000), torch.randint(500, (1280,)))
    callbacks = [KeepBest()] if fault else []
    quiet(80, callbacks=callbacks).fit(CustomsNet(), DataLoader(data, batch_size=64, shuffle=True))


if __name__ == "__main__":
    main(roman_coins, greek_coins, handwriting, street_trees, flood_maps, mosaics, customs_forms)
