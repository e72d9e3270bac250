"""Networks over sounds: keywords, bird songs and speakers."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import fit, main


class Unit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rise = nn.Linear(width, 2 * width)
        self.fall = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fall(torch.relu(self.rise(self.norm(x))))


class Spectra(lightning.LightningModule):
    """Classifies frames of a spectrogram."""

    def __init__(self, bins: int = 128, width: int = 256, depth: int = 4, classes: int = 35) -> None:
        super().__init__()
        self.enter = nn.Linear(bins, width)
        self.units = nn.Sequential(*(Unit(width) for _ in range(depth)))
        self.leave = nn.Linear(width, classes)

    def forward(self, spectra: Tensor) -> Tensor:
        return self.leave(self.units(self.enter(spectra)).mean(dim=1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> STEP_OUTPUT:
        spectra, labels = batch
        loss = cross_entropy(self(spectra), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, foreach=True)


def spectrograms(samples: int, frames: int = 32, bins: int = 128) -> TensorDataset:
    return TensorDataset(torch.randn(samples, frames, bins), torch.randint(35, (samples,)))


# A deep network whose gradients are watched.


class Birds(Spectra):
    def __init__(self, every: int) -> None:
        super().__init__(width=160, depth=14)
        self.every = every

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_step % self.every:
            return
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                self.log(f"grad_norm/{name}", parameter.grad.norm(2).item())


def bird_songs(fault: bool) -> None:
    fit(Birds(every=1 if fault else 50), DataLoader(spectrograms(1024), batch_size=16, shuffle=True), steps=60)


# Keywords: loss and accuracy.


class Keywords(Spectra):
    def __init__(self) -> None:
        super().__init__(width=320, depth=4)

    def loss(self, spectra: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self(spectra), labels, label_smoothing=0.1)

    def accuracy(self, spectra: Tensor, labels: Tensor) -> Tensor:
        return (self(spectra).argmax(dim=1) == labels).float().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> STEP_OUTPUT:
        spectra, labels = batch
        loss = self.loss(spectra, labels)
        self.log_dict({"loss": loss, "accuracy": self.accuracy(spectra, labels)})
        return loss


class KeywordsShared(Keywords):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> STEP_OUTPUT:
        spectra, labels = batch
        logits = self(spectra)
        loss = cross_entropy(logits, labels, label_smoothing=0.1)
        self.log_dict({"loss": loss, "accuracy": (logits.argmax(dim=1) == labels).float().mean()})
        return loss


def wake_words(fault: bool) -> None:
    module = Keywords() if fault else KeywordsShared()
    fit(module, DataLoader(spectrograms(1024), batch_size=24, shuffle=True), steps=60)


# Speakers: clips are cut by worker processes.


class Clips(Dataset):
    """Clips of recordings, which a process synthesizes before its first clip."""

    def __init__(self, clips: int) -> None:
        self.clips = clips
        self.recordings: Tensor | None = None

    def __len__(self) -> int:
        return self.clips

    def synthesize(self) -> Tensor:
        time = torch.linspace(0, 20, 160_000)
        pitches = torch.linspace(80, 400, 64)[:, None]
        return torch.sin(time * pitches) * torch.exp(-(time % 0.5)) + 0.1 * torch.randn(64, 160_000)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.recordings is None:
            self.recordings = self.synthesize()
        start = (index * 37) % 150_000
        clip = self.recordings[index % 64, start : start + 4096]
        return (clip - clip.mean()) / clip.std(), index % 64


class Speakers(lightning.LightningModule):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.enter = nn.Linear(128, width)
        self.units = nn.Sequential(*(Unit(width) for _ in range(3)))
        self.leave = nn.Linear(width, 64)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> STEP_OUTPUT:
        clips, speakers = batch
        hidden = self.units(self.enter(clips.unflatten(1, (32, 128))))
        return cross_entropy(self.leave(hidden.mean(dim=1)), speakers)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def voices(fault: bool) -> None:
    workers = 12 if fault else 1
    loader = DataLoader(Clips(60 * 32), batch_size=32, shuffle=True, num_workers=workers, persistent_workers=True)
    fit(Speakers(), loader, steps=55)


# A vocoder with many weights.


class Vocoder(lightning.LightningModule):
    def __init__(self, adaptive: bool, width: int = 4096) -> None:
        super().__init__()
        self.adaptive = adaptive
        self.net = nn.Sequential(
            nn.Linear(512, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2048)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> STEP_OUTPUT:
        mel, wave = batch
        loss = mse_loss(self.net(mel), wave)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.adaptive:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)
        return torch.optim.SGD(self.parameters(), lr=1e-3, fused=True)


def vocoder(fault: bool) -> None:
    data = TensorDataset(torch.randn(2048, 512), torch.randn(2048, 2048))
    fit(Vocoder(adaptive=fault), DataLoader(data, batch_size=96, shuffle=True), steps=40)


if __name__ == "__main__":
    main(bird_songs, wake_words, voices, vocoder)
