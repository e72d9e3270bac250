"""Validation and checkpoints: too often, too slow or too large."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import BATCH, STEPS, Classifier, Trained, Vectors, fit, labeled, main, one_epoch, quiet, vector_batches
from small_models import Highway


class Validated(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, labels = batch
        self.log("val_loss", functional.cross_entropy(self(features), labels))


def frequent_validation(fault: bool) -> None:
    """Five batches are validated after each 4 steps; healthy: after the 60 of an epoch."""
    validation = DataLoader(Vectors(5), batch_size=BATCH)
    fit(Validated(), vector_batches(), validation, val_check_interval=4 if fault else STEPS)


class WeatherNet(Trained, optimizer=torch.optim.SGD, lr=1e-2):
    """Rain of the next hour from a map of the last ones."""

    def __init__(self, width: int = 36) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(4, width, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 2, stride=2),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        maps, rain = batch
        loss = functional.mse_loss(self.network(maps), rain)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        maps, rain = batch
        self.log("val_loss", functional.mse_loss(self.network(maps), rain))


def weather_maps(fault: bool) -> None:
    """15 batches are validated after each 5 steps; healthy: after 60."""
    training = TensorDataset(torch.rand(16 * 60, 4, 48, 48), torch.rand(16 * 60, 1, 48, 48))
    validation = TensorDataset(torch.rand(16 * 15, 4, 48, 48), torch.rand(16 * 15, 1, 48, 48))
    trainer = quiet(60, val_check_interval=5 if fault else 60, num_sanity_val_steps=0)
    trainer.fit(WeatherNet(), DataLoader(training, batch_size=16, shuffle=True), DataLoader(validation, batch_size=16))


class Patches(Trained, optimizer=torch.optim.SGD, lr=0.01, momentum=0.9):
    """An MLP-Mixer for small pictures."""

    def __init__(self, width: int = 256, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 4, 4)
        self.across = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))
        self.within = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.cut(image).flatten(2).transpose(1, 2)
        for across, within in zip(self.across, self.within, strict=True):
            x = x + across(x.transpose(1, 2)).transpose(1, 2)
            x = x + within(x)
        return self.head(x.mean(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self.log("val_loss", functional.cross_entropy(logits, batch[1]))
        self.log("val_accuracy", (logits.argmax(1) == batch[1]).float().mean())


def pictures(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3, 32, 32), torch.randint(10, (count,)))


def mixer(fault: bool) -> None:
    """20 batches are validated after each 6 steps; healthy: at the end of the epoch."""
    training, held_out = DataLoader(pictures(60 * 32), 32, shuffle=True), DataLoader(pictures(20 * 32), 32)
    one_epoch(val_check_interval=6 if fault else 1.0, num_sanity_val_steps=0).fit(Patches(), training, held_out)


class TideNet(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Predicts the water level of the next six hours from the last two days at eight gauges."""

    def __init__(self, gauges: int = 8, channels: int = 64, horizon: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(gauges, channels, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 5, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(8),
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * channels, horizon)

    def forward(self, levels: Tensor) -> Tensor:
        return self.head(self.body(levels))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        levels, target = batch
        return functional.mse_loss(self(levels), target)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        levels, target = batch
        self.log("val_mae", functional.l1_loss(self(levels), target))


def tide_levels(fault: bool) -> None:
    """16 batches are validated after each 10 steps; healthy: at the end of the epoch."""

    def gauges(samples: int) -> TensorDataset:
        return TensorDataset(torch.randn(samples, 8, 192), torch.randn(samples, 6))

    training = DataLoader(gauges(100 * 64), batch_size=64, shuffle=True)
    validation = DataLoader(gauges(16 * 64), batch_size=64)
    fitter = quiet(100, val_check_interval=10 if fault else 1.0)
    fitter.fit(TideNet(), training, validation)


class Plants(lightning.LightningDataModule):
    """Epochs of 4 batches, validated with 8."""

    def setup(self, stage: str) -> None:
        self.plants, self.others = labeled(4 * 512, 128), labeled(8 * 512, 128)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.plants, batch_size=512, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.others, batch_size=512)


class PlantClassifier(Trained, optimizer=torch.optim.SGD, lr=0.01):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(128, 320), *(Highway(320) for _ in range(3)), nn.Linear(320, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self.network(batch[0])
        self.log("val/accuracy", (scores.argmax(1) == batch[1]).float().mean())


def short_epochs(fault: bool) -> None:
    """Each epoch of 4 batches ends with a validation; healthy: each 12th."""
    options = {"check_val_every_n_epoch": 1 if fault else 12, "num_sanity_val_steps": 0}
    fit(PlantClassifier(), Plants(), steps=60, **options)  # type: ignore[arg-type]  # a data module


class Captions(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """Matches pictures and captions, and ranks the captions of a gallery for each picture in validation.

    Fault: a loop sorts the gallery for one picture after the other; healthy: one product, and ranks by counting.
    """

    def __init__(self, *, fault: bool, inputs: int = 256, width: int = 512, code: int = 64) -> None:
        super().__init__()
        self.fault = fault
        self.picture = nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, code))
        self.caption = nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, code))
        self.codes: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        pictures = functional.normalize(self.picture(batch[0]), dim=1)
        captions = functional.normalize(self.caption(batch[1]), dim=1)
        loss = functional.cross_entropy(pictures @ captions.T / 0.07, torch.arange(len(pictures)))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.codes.append((self.picture(batch[0]), self.caption(batch[1])))

    def on_validation_epoch_end(self) -> None:
        pictures, captions = (torch.cat(codes) for codes in zip(*self.codes, strict=True))
        self.codes.clear()
        ranks = self.ranks_in_turn(pictures, captions) if self.fault else self.ranks_at_once(pictures, captions)
        self.log("recall_at_10", (ranks < 10).float().mean())

    def ranks_in_turn(self, pictures: Tensor, captions: Tensor) -> Tensor:
        ranks = []
        for place, picture in enumerate(pictures):
            likeness = functional.cosine_similarity(picture.unsqueeze(0), captions)
            order = likeness.argsort(descending=True)
            ranks.append((order == place).nonzero().item())
        return torch.tensor(ranks)

    def ranks_at_once(self, pictures: Tensor, captions: Tensor) -> Tensor:
        likeness = functional.normalize(pictures, dim=1) @ functional.normalize(captions, dim=1).T
        return (likeness > likeness.diagonal()[:, None]).sum(dim=1)


def recall_in_turn(fault: bool) -> None:
    """The end of validation compares and sorts per query in a Python loop; healthy: all queries at once."""
    training = TensorDataset(torch.randn(20 * 256, 256), torch.randn(20 * 256, 256))
    validation = TensorDataset(torch.randn(1024, 256), torch.randn(1024, 256))
    loaders = (DataLoader(training, batch_size=256, shuffle=True), DataLoader(validation, batch_size=256))
    fit(Captions(fault=fault), *loaders, steps=80, num_sanity_val_steps=0)


def frequent_checkpoints(fault: bool) -> None:
    """A checkpoint is written after each 2 steps; healthy: after each 50."""
    saving = ModelCheckpoint(dirpath="checkpoints", every_n_train_steps=2 if fault else 50)
    fit(Classifier(depth=4), vector_batches(128), callbacks=[saving], enable_checkpointing=True)


class DynamicsModel(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """A large model of how a plant answers to its valves."""

    def __init__(self, width: int = 1280) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 256)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        valves, answer = batch
        loss = functional.mse_loss(self.network(valves), answer)
        self.log("loss", loss)
        return loss


def plant_dynamics(fault: bool) -> None:
    """A checkpoint is written after each 2 steps; healthy: after 60."""
    data = TensorDataset(torch.randn(512 * 60, 256), torch.randn(512 * 60, 256))
    with tempfile.TemporaryDirectory() as folder:
        keeper = ModelCheckpoint(folder, every_n_train_steps=2 if fault else 60, save_top_k=-1)
        trainer = quiet(60, callbacks=[keeper], enable_checkpointing=True)
        trainer.fit(DynamicsModel(), DataLoader(data, batch_size=512, shuffle=True))


class Speaker(Trained, optimizer=torch.optim.SGD, lr=0.01, momentum=0.9):
    """Which speaker a fixed-size voice print belongs to."""

    def __init__(self, width: int = 1536, speakers: int = 2000) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(640, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.head = nn.Linear(width, speakers)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self.head(self.net(batch[0])), batch[1])
        self.log("train_loss", loss)
        return loss


def speakers(fault: bool) -> None:
    """A checkpoint is written after each 2 steps; healthy: after 60."""
    with tempfile.TemporaryDirectory() as folder:
        keeper = ModelCheckpoint(
            folder, monitor="train_loss", save_top_k=1, save_last=True, every_n_train_steps=2 if fault else 60
        )
        data = TensorDataset(torch.randn(60 * 384, 640), torch.randint(2000, (60 * 384,)))
        run = one_epoch(enable_checkpointing=True, callbacks=[keeper])
        run.fit(Speaker(), DataLoader(data, 384, shuffle=True))


class PhasePicker(Trained, optimizer=torch.optim.SGD, lr=0.01, momentum=0.9):
    """Classifies three-component seismograms: noise, P, S, blast, quake."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(3 * 400, 1536),
            nn.ReLU(),
            nn.Linear(1536, 1536),
            nn.ReLU(),
            nn.Linear(1536, 1536),
            nn.ReLU(),
            nn.Linear(1536, 5),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        waves, phases = batch
        return functional.cross_entropy(self.layers(waves), phases)


def seismograms(fault: bool) -> None:
    """A checkpoint is written after each 5 steps; healthy: after 100."""
    data = TensorDataset(torch.randn(3000, 3, 400), torch.randint(5, (3000,)))
    saver = ModelCheckpoint(dirpath="checkpoints/seismograms", every_n_train_steps=5 if fault else 100)
    fitter = quiet(100, enable_checkpointing=True, callbacks=[saver])
    fitter.fit(PhasePicker(), DataLoader(data, batch_size=128, shuffle=True))


class Shop(Trained, optimizer=torch.optim.SGD, lr=0.05):
    """Recommends items by fixed features of their pictures.

    Fault: the features are a buffer of every checkpoint; healthy: the buffer is not persistent.
    """

    features: Tensor

    def __init__(self, features: Tensor, users: int = 2000, width: int = 64, *, fault: bool) -> None:
        super().__init__()
        self.register_buffer("features", features, persistent=fault)
        self.users = nn.Embedding(users, width)
        self.items = nn.Sequential(nn.Linear(features.shape[1], 256), nn.ReLU(), nn.Linear(256, width))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        users, bought, ignored = batch
        tastes = self.users(users).unsqueeze(1)
        liked = (tastes * self.items(self.features[bought])).sum(dim=2)
        others = (tastes * self.items(self.features[ignored])).sum(dim=2)
        loss = -functional.logsigmoid(liked - others).mean()
        self.log("loss", loss)
        return loss


def features_in_checkpoint(fault: bool) -> None:
    """Each checkpoint has 59 MiB of fixed features, a buffer; healthy: ``persistent=False``."""
    samples = 80 * 256
    bought = TensorDataset(
        torch.randint(2000, (samples,)), torch.randint(60_000, (samples, 1)), torch.randint(60_000, (samples, 7))
    )
    model = Shop(torch.randn(60_000, 256), fault=fault)
    with tempfile.TemporaryDirectory() as folder:
        saver = ModelCheckpoint(folder, every_n_train_steps=10)
        loader = DataLoader(bought, batch_size=256, shuffle=True)
        fit(model, loader, steps=80, callbacks=[saver], enable_checkpointing=True, logger=False)


if __name__ == "__main__":
    main(
        frequent_validation,
        weather_maps,
        mixer,
        tide_levels,
        short_epochs,
        recall_in_turn,
        frequent_checkpoints,
        plant_dynamics,
        speakers,
        seismograms,
        features_in_checkpoint,
    )
