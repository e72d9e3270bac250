"""Faults around the model: copied samples, statistics, windows, a ranking, the collector, checkpoints, two ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

import contextlib
import copy
import gc
import tempfile
from typing import Any

from plain import fit, main

KINDS = 16
Molecule = dict[str, Tensor]


class Molecules(Dataset[tuple[Molecule, Tensor]]):
    """Molecules with one masked atom, whose kind is to be predicted.

    Fault: a molecule is copied deeply before its atom is masked; healthy: only the atoms' kinds are copied.
    """

    def __init__(self, samples: int, atoms: int = 32, *, fault: bool) -> None:
        self.fault = fault
        self.atoms = atoms
        self.molecules = [self.molecule() for _ in range(samples)]

    def molecule(self) -> Molecule:
        bonded = (torch.rand(self.atoms, self.atoms) < 0.08).float()
        return {
            "kinds": torch.randint(KINDS, (self.atoms,)),
            "charges": torch.randn(self.atoms),
            "positions": torch.randn(self.atoms, 3),
            "bonded": bonded,
            "lengths": torch.rand(self.atoms, self.atoms),
        }

    def __len__(self) -> int:
        return len(self.molecules)

    def __getitem__(self, index: int) -> tuple[Molecule, Tensor]:
        if self.fault:
            molecule = copy.deepcopy(self.molecules[index])
        else:
            molecule = dict(self.molecules[index])
            molecule["kinds"] = molecule["kinds"].clone()
        kind = molecule["kinds"][0].clone()
        molecule["kinds"][0] = KINDS
        return molecule, kind


class MaskedAtoms(lightning.LightningModule):
    """Message passing between the atoms of a molecule."""

    def __init__(self, width: int = 96, rounds: int = 2) -> None:
        super().__init__()
        self.kinds = nn.Embedding(KINDS + 1, width)
        self.place = nn.Linear(4, width)
        self.messages = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.head = nn.Linear(width, KINDS)

    def training_step(self, batch: tuple[Molecule, Tensor], batch_idx: int) -> Tensor:
        molecule, kind = batch
        place = torch.cat((molecule["positions"], molecule["charges"].unsqueeze(-1)), dim=-1)
        atoms = self.kinds(molecule["kinds"]) + self.place(place)
        strength = molecule["bonded"] * torch.exp(-molecule["lengths"])
        for message in self.messages:
            atoms = atoms + functional.relu(strength @ message(atoms))
        loss = functional.cross_entropy(self.head(atoms[:, 0]), kind)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def copied_samples(fault: bool) -> None:
    """Fault: ``copy.deepcopy`` of each molecule, to change one atom; healthy: the one changed tensor is copied."""
    loader = DataLoader(Molecules(60 * 128, fault=fault), batch_size=128, shuffle=True)
    fit(MaskedAtoms(), loader, steps=120)


class Load(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a server's measurements, standardized, and the values that follow.

    Fault: mean and deviation of the whole series for each window; healthy: computed once.
    """

    def __init__(self, samples: int, past: int = 96, future: int = 12, *, fault: bool) -> None:
        self.fault = fault
        self.samples = samples
        self.past = past
        self.future = future
        self.series = torch.randn(10_000, 6).cumsum(dim=0)
        self.mean, self.deviation = self.statistics()

    def statistics(self) -> tuple[Tensor, Tensor]:
        return self.series.mean(dim=0), self.series.std(dim=0)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        mean, deviation = self.statistics() if self.fault else (self.mean, self.deviation)
        window = (self.series[index : index + self.past + self.future] - mean) / deviation
        return window[: self.past], window[self.past :]


class Forecast(lightning.LightningModule):
    """Predicts the next values of a series with convolutions over time."""

    def __init__(self, channels: int = 6, width: int = 64, future: int = 12) -> None:
        super().__init__()
        self.future = future
        self.layers = nn.Sequential(
            nn.Conv1d(channels, width, 5, padding=2),
            nn.GELU(),
            nn.Conv1d(width, width, 5, padding=4, dilation=2),
            nn.GELU(),
            nn.Conv1d(width, width, 5, padding=8, dilation=4),
            nn.GELU(),
        )
        self.head = nn.Linear(width, future * channels)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        past, future = batch
        hidden = self.layers(past.transpose(1, 2))[:, :, -1]
        loss = functional.l1_loss(self.head(hidden).view_as(future), future)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def statistics_each_item(fault: bool) -> None:
    """Fault: each sample computes the mean and deviation of the whole series; healthy: ``__init__`` does, once."""
    loader = DataLoader(Load(9_800, fault=fault), batch_size=64, shuffle=True)
    fit(Forecast(), loader, steps=120)


class Strides(Dataset[Tensor]):
    """Overlapping windows of a recording of movements.

    Fault: every window is a copy, so that each value is held 256 times; healthy: windows are cut when they are read.
    """

    def __init__(self, samples: int, length: int = 256, channels: int = 6, *, fault: bool) -> None:
        self.samples = samples
        self.length = length
        self.recording = torch.randn(samples + length, channels)
        self.windows: Tensor | None = None
        if fault:
            self.windows = torch.stack([self.window(start) for start in range(samples)])

    def window(self, start: int) -> Tensor:
        return self.recording[start : start + self.length]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return self.window(index) if self.windows is None else self.windows[index]


class Gait(lightning.LightningModule):
    """Reconstructs windows of movements from a short code."""

    def __init__(self, channels: int = 6, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(channels, width, 8, stride=4, padding=2),
            nn.ReLU(),
            nn.Conv1d(width, 16, 8, stride=4, padding=2),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose1d(16, width, 8, stride=4, padding=2),
            nn.ReLU(),
            nn.ConvTranspose1d(width, channels, 8, stride=4, padding=2),
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        movements = batch.transpose(1, 2)
        loss = functional.mse_loss(self.decoder(self.encoder(movements)), movements)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def copied_windows(fault: bool) -> None:
    """Fault: all overlapping windows of a series are stacked in memory; healthy: a window is a slice, when read."""
    loader = DataLoader(Strides(40_000, fault=fault), batch_size=64, shuffle=True)
    fit(Gait(), loader, steps=200)


class Captions(lightning.LightningModule):
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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def recall_in_turn(fault: bool) -> None:
    """Fault: the end of validation compares and sorts per query in a Python loop; healthy: all queries at once."""
    training = TensorDataset(torch.randn(20 * 256, 256), torch.randn(20 * 256, 256))
    validation = TensorDataset(torch.randn(1024, 256), torch.randn(1024, 256))
    loaders = (DataLoader(training, batch_size=256, shuffle=True), DataLoader(validation, batch_size=256))
    fit(Captions(fault=fault), *loaders, steps=80, num_sanity_val_steps=0)


class Phrase:
    """A node of a sentence's tree, that knows its parent and its parts."""

    def __init__(self, meaning: Tensor, parts: tuple[Phrase, ...] = ()) -> None:
        self.meaning = meaning
        self.parts = parts
        self.parent: Phrase | None = None
        for part in parts:
            part.parent = self


class Trees(lightning.LightningModule):
    """Composes the meaning of sentences from words, pair by pair."""

    def __init__(self, width: int = 128, vocabulary: int = 2000, classes: int = 5) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.compose = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, classes)

    def tree(self, words: Tensor) -> Phrase:
        phrases = [Phrase(meaning) for meaning in self.words(words).unbind(dim=1)]
        while len(phrases) > 1:
            pairs = zip(phrases[::2], phrases[1::2], strict=True)
            phrases = [
                Phrase(self.compose(torch.cat((left.meaning, right.meaning), dim=1)), (left, right))
                for left, right in pairs
            ]
        return phrases[0]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        words, moods = batch
        loss = functional.cross_entropy(self.head(self.tree(words).meaning), moods)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.01)


class NoPauses(lightning.Callback):
    """Turns Python's garbage collector off during the training."""

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        gc.disable()

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        gc.enable()


def disabled_collector(fault: bool) -> None:
    """Fault: a callback calls ``gc.disable()`` while trees with cycles hold tensors; healthy: the collector runs."""
    sentences = TensorDataset(torch.randint(2000, (60 * 128, 16)), torch.randint(5, (60 * 128,)))
    callbacks: list[Any] = [NoPauses()] if fault else []
    fit(Trees(), DataLoader(sentences, batch_size=128, shuffle=True), steps=60, callbacks=callbacks)


class Shop(lightning.LightningModule):
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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def features_in_checkpoint(fault: bool) -> None:
    """Fault: each checkpoint has 59 MiB of fixed features, a buffer; healthy: ``persistent=False``."""
    samples = 80 * 256
    bought = TensorDataset(
        torch.randint(2000, (samples,)), torch.randint(60_000, (samples, 1)), torch.randint(60_000, (samples, 7))
    )
    model = Shop(torch.randn(60_000, 256), fault=fault)
    with tempfile.TemporaryDirectory() as folder:
        saver = ModelCheckpoint(folder, every_n_train_steps=10)
        loader = DataLoader(bought, batch_size=256, shuffle=True)
        fit(model, loader, steps=80, callbacks=[saver], enable_checkpointing=True, logger=False)


class Notes(lightning.LightningModule):
    """Tags recordings by their spectrum on two processes; a batch is processed in parts.

    Fault: gradients are averaged over the processes after every part; healthy: after the last.
    """

    def __init__(self, *, fault: bool, bins: int = 512, width: int = 1024, tags: int = 40, parts: int = 4) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.fault = fault
        self.parts = parts
        self.layers = nn.Sequential(
            nn.Linear(bins, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, tags)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        optimizer.zero_grad()
        strategy = self.trainer.strategy
        assert isinstance(strategy, DDPStrategy)
        parts = [*zip(*(tensor.chunk(self.parts) for tensor in batch), strict=True)]
        for place, (spectra, tags) in enumerate(parts):
            is_last = place == len(parts) - 1
            with contextlib.nullcontext() if self.fault or is_last else strategy.block_backward_sync():
                loss = functional.binary_cross_entropy_with_logits(self.layers(spectra), tags) / len(parts)
                self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def synced_each_part(fault: bool) -> None:
    """Fault: each of four backward passes of a step averages gradients over two ranks; healthy: only the last."""
    samples = 120 * 512
    spectra = TensorDataset(torch.rand(samples, 512), (torch.rand(samples, 40) < 0.1).float())
    strategy = DDPStrategy(process_group_backend="gloo")
    loader = DataLoader(spectra, batch_size=512, shuffle=True)
    fit(Notes(fault=fault), loader, steps=60, devices=2, strategy=strategy, logger=False)


if __name__ == "__main__":
    main(
        copied_samples,
        statistics_each_item,
        copied_windows,
        recall_in_turn,
        disabled_collector,
        features_in_checkpoint,
        synced_each_part,
    )
