"""Faults of the input and around the step: replay, augmentation, a second loader, reloads, hooks, histograms."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import fit, main

Transition = tuple[Tensor, Tensor, Tensor, Tensor]


class ReplayMemory:
    """A ring of transitions of an agent. Fault: each draw permutes all of them; healthy: it draws a batch of places."""

    def __init__(self, capacity: int, state: int, actions: int, *, fault: bool) -> None:
        self.fault = fault
        self.generator = np.random.default_rng(0)
        self.states = self.generator.standard_normal((capacity + 1, state), dtype=np.float32)
        self.actions = self.generator.integers(actions, size=capacity)
        self.rewards = self.generator.standard_normal(capacity, dtype=np.float32)

    def draw(self, count: int) -> Transition:
        size = len(self.actions)
        if self.fault:
            places = np.random.choice(size, count, replace=False)  # noqa: NPY002 the fault
        else:
            places = self.generator.choice(size, count, replace=False)
        chosen = (self.states[places], self.actions[places], self.rewards[places], self.states[places + 1])
        states, actions, rewards, following = (torch.from_numpy(part) for part in chosen)
        return states, actions, rewards, following


class Experience(IterableDataset[Transition]):
    """Endless batches out of the replay memory."""

    def __init__(self, memory: ReplayMemory, batch: int) -> None:
        self.memory = memory
        self.batch = batch

    def __iter__(self) -> Iterator[Transition]:
        while True:
            yield self.memory.draw(self.batch)


class DeepQ(lightning.LightningModule):
    """Deep Q-learning with a target network."""

    def __init__(self, state: int, actions: int, width: int = 768) -> None:
        super().__init__()
        self.online = self.network(state, actions, width)
        self.target = self.network(state, actions, width).requires_grad_(False)
        self.target.load_state_dict(self.online.state_dict())

    def network(self, state: int, actions: int, width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(state, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, actions)
        )

    def training_step(self, batch: Transition, batch_idx: int) -> Tensor:
        states, actions, rewards, following = batch
        values = self.online(states).gather(1, actions[:, None])[:, 0]
        with torch.no_grad():
            best = self.target(following).amax(dim=1)
        loss = functional.smooth_l1_loss(values, rewards + 0.99 * best)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step % 50 == 0:
            self.target.load_state_dict(self.online.state_dict())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.online.parameters(), lr=1e-3)


def permuting_replay(fault: bool) -> None:
    """Fault: the replay memory shuffles a million places for each batch; healthy: it draws only as many as it needs."""
    memory = ReplayMemory(1_000_000, 24, 6, fault=fault)
    fit(DeepQ(24, 6), DataLoader(Experience(memory, 1024), batch_size=None), steps=120)


class Slides(Dataset[tuple[Tensor, int]]):
    """Augmented crops of slides. Fault: slides are augmented, then cropped; healthy: crops are augmented."""

    def __init__(self, samples: int, side: int, crop: int, *, fault: bool) -> None:
        generator = np.random.default_rng(0)
        self.slides = generator.integers(256, size=(24, side, side, 3), dtype=np.uint8)
        self.labels = generator.integers(4, size=24)
        self.samples = samples
        self.crop = crop
        self.fault = fault

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        place = index % len(self.slides)
        image = Image.fromarray(self.slides[place])
        image = self.cropped(self.augmented(image)) if self.fault else self.augmented(self.cropped(image))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return pixels.float().div(255), int(self.labels[place])

    def augmented(self, image: Image.Image) -> Image.Image:
        blurred = image.filter(ImageFilter.GaussianBlur(float(torch.rand(())) + 0.5))
        return ImageEnhance.Color(blurred).enhance(0.8 + 0.4 * float(torch.rand(())))

    def cropped(self, image: Image.Image) -> Image.Image:
        left, top = torch.randint(image.width - self.crop, (2,)).tolist()
        return image.crop((left, top, left + self.crop, top + self.crop))


class Tissue(lightning.LightningModule):
    """A convolutional network that tells kinds of tissue."""

    def __init__(self, width: int = 32, kinds: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 4 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, kinds),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pixels, kinds = batch
        loss = functional.cross_entropy(self.layers(pixels), kinds)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def blur_before_crop(fault: bool) -> None:
    """Fault: blur and colors are changed on the whole slide, of which 4% is kept; healthy: on the crop alone."""
    slides = Slides(60 * 24, 480, 96, fault=fault)
    loader = DataLoader(slides, batch_size=24, shuffle=True, num_workers=1, persistent_workers=True)
    fit(Tissue(), loader, steps=60)


class Consistency(lightning.LightningModule):
    """Semi-supervised training on sensor readings.

    Fault: each step makes a new iterator over the unlabeled readings; healthy: one iterator serves all steps.
    """

    def __init__(self, unlabeled: DataLoader, *, fault: bool, channels: int = 16, width: int = 640) -> None:
        super().__init__()
        self.unlabeled = unlabeled
        self.fault = fault
        self.readings = iter(unlabeled)
        self.layers = nn.Sequential(
            nn.Linear(channels, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 5)
        )

    def more(self) -> Tensor:
        if self.fault:
            (readings,) = next(iter(self.unlabeled))
        else:
            (readings,) = next(self.readings)
        found: Tensor = readings
        return found

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        readings, states = batch
        extra = self.more()
        loss = functional.cross_entropy(self.layers(readings), states)
        weak = self.layers(extra + 0.01 * torch.randn_like(extra)).softmax(dim=1).detach()
        strong = self.layers(extra + 0.1 * torch.randn_like(extra))
        loss = loss + functional.cross_entropy(strong, weak)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def fresh_iterator(fault: bool) -> None:
    """Fault: ``next(iter(loader))`` in each step shuffles all unlabeled readings; healthy: the iterator is kept."""
    unlabeled = DataLoader(TensorDataset(torch.randn(600_000, 16)), batch_size=512, shuffle=True)
    labeled = TensorDataset(torch.randn(100 * 512, 16), torch.randint(5, (100 * 512,)))
    fit(Consistency(unlabeled, fault=fault), DataLoader(labeled, batch_size=512, shuffle=True), steps=100)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Scaled windows of a demand curve and the values that follow."""

    def __init__(self, demand: NDArray[np.float32], length: int, ahead: int) -> None:
        self.pairs = []
        for start in range(len(demand) - length - ahead):
            window = demand[start : start + length + ahead]
            scaled = (window - window.mean()) / (window.std() + 1e-6)
            self.pairs.append((torch.from_numpy(scaled[:length]), torch.from_numpy(scaled[length:])))

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pairs[index]


class Demand(lightning.LightningDataModule):
    """Windows of electricity demand. Fault: made anew for each epoch; healthy: made once, in ``setup``."""

    def __init__(self, *, fault: bool, hours: int = 9000, batch: int = 512) -> None:
        super().__init__()
        self.fault = fault
        self.hours = hours
        self.batch = batch

    def setup(self, stage: str) -> None:
        hours = np.arange(self.hours, dtype=np.float32)
        noise = np.random.default_rng(0).standard_normal(self.hours, dtype=np.float32)
        self.demand = (np.sin(hours / 24) + 0.2 * noise).astype(np.float32)
        if not self.fault:
            self.windows = Windows(self.demand, 168, 24)

    def train_dataloader(self) -> DataLoader:
        windows = Windows(self.demand, 168, 24) if self.fault else self.windows
        return DataLoader(windows, batch_size=self.batch, shuffle=True, drop_last=True)


class Forecaster(lightning.LightningModule):
    """Residual blocks that forecast a day from the last week and pass on what they do not explain, as N-BEATS does."""

    def __init__(self, blocks: int = 4, width: int = 384) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(168, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 168 + 24)
            )
            for _ in range(blocks)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rest, future = batch
        forecast = torch.zeros_like(future)
        for block in self.blocks:
            explained, part = block(rest).split((168, 24), dim=1)
            rest = rest - explained
            forecast = forecast + part
        loss = functional.mse_loss(forecast, future)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def rebuilt_windows(fault: bool) -> None:
    """Fault: the loader is reloaded each epoch and makes the same windows anew; healthy: windows are made once."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        max_steps=102,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        reload_dataloaders_every_n_epochs=1 if fault else 0,
    )
    trainer.fit(Forecaster(), datamodule=Demand(fault=fault))


class DeadUnits(lightning.Callback):
    """Watches the share of silent units in the encoder. Fault: its hooks stay on; healthy: they are removed."""

    def __init__(self, *, fault: bool) -> None:
        self.fault = fault
        self.handles: list[Any] = []
        self.silent: dict[str, Tensor] = {}

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for name, module in pl_module.named_modules():
            if name.startswith("encode") and isinstance(module, nn.ReLU):
                self.handles.append(module.register_forward_hook(self.watch(name)))

    def watch(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.silent[name] = (output.detach() == 0).float().mean()

        return hook

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        pl_module.log_dict(self.silent)
        if not self.fault:
            for handle in self.handles:
                handle.remove()
            self.handles.clear()


class Faces(lightning.LightningModule):
    """A convolutional autoencoder over small gray pictures."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(4 * width, 2 * width, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (pictures,) = batch
        loss = functional.mse_loss(self.decode(self.encode(pictures)), pictures)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def piling_hooks(fault: bool) -> None:
    """Fault: a callback adds forward hooks in each step and leaves them; healthy: it removes them after the step."""
    pictures = TensorDataset(torch.rand(20 * 48, 1, 64, 64))
    fit(Faces(), DataLoader(pictures, batch_size=48, shuffle=True), steps=50, callbacks=[DeadUnits(fault=fault)])


class Molecules(lightning.LightningModule):
    """Message passing over the atoms of a batch of molecules; predicts an energy for each molecule."""

    def __init__(self, rounds: int = 3, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.updates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.energy = nn.Linear(width, 1)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        atoms, bonds, molecules, energies = batch
        source, target = bonds
        hidden = self.embed(atoms)
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = functional.silu(message(torch.cat((hidden[source], hidden[target]), dim=1)))
            received = torch.zeros_like(hidden).scatter_add_(0, target[:, None].expand_as(sent), sent)
            hidden = hidden + functional.silu(update(torch.cat((hidden, received), dim=1)))
        members = molecules[:, None].expand_as(hidden)
        pooled = torch.zeros(len(energies), hidden.shape[1]).scatter_add_(0, members, hidden)
        loss = functional.l1_loss(self.energy(pooled)[:, 0], energies)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Structures(Dataset[tuple[Tensor, Tensor, Tensor, Tensor]]):
    """Batches of random molecules as one graph each."""

    def __init__(self, batches: int, molecules: int = 128, atoms: int = 20, bonds: int = 60) -> None:
        offsets = torch.arange(molecules).repeat_interleave(bonds) * atoms
        self.members = torch.arange(molecules).repeat_interleave(atoms)
        self.atoms = torch.randint(20, (batches, molecules * atoms))
        self.bonds = torch.randint(atoms, (batches, 2, molecules * bonds)) + offsets
        self.energies = torch.randn(batches, molecules)

    def __len__(self) -> int:
        return len(self.atoms)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.atoms[index], self.bonds[index], self.members, self.energies[index]


class Histograms(lightning.Callback):
    """Histograms of the matrices and their gradients for a logger. Fault: in each step; healthy: in each 50th."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if trainer.global_step % self.every == 0:
            writer = pl_module.logger.experiment
            for name, parameter in pl_module.named_parameters():
                if parameter.ndim < 2:
                    continue
                writer.add_histogram(f"weights/{name}", parameter, trainer.global_step)
                writer.add_histogram(f"gradients/{name}", parameter.grad, trainer.global_step)


def histograms_each_step(fault: bool) -> None:
    """Fault: TensorBoard gets histograms of matrices and their gradients in each step; healthy: in each 50th."""
    loader = DataLoader(Structures(80), batch_size=None, shuffle=True)
    fit(Molecules(), loader, steps=80, logger=TensorBoardLogger("."), callbacks=[Histograms(1 if fault else 50)])


if __name__ == "__main__":
    main(permuting_replay, blur_before_crop, fresh_iterator, rebuilt_windows, piling_hooks, histograms_each_step)
