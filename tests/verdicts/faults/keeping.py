"""Trainings that look at memory: inspection, pricing, scans, speech, genes, palettes and restoration of pictures."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as pl
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main


def fit(model: pl.LightningModule, *loaders: DataLoader, **options: Any) -> None:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    pl.Trainer(**{**settings, **options}).fit(model, *loaders)  # type: ignore[arg-type]  # at most two loaders


# ----------------------------------------------------------------------------- surface inspection


class Surfaces(Dataset[tuple[Tensor, Tensor]]):
    """Gray pictures of a surface, and which of four defects each pixel shows."""

    def __init__(self, samples: int, side: int = 128) -> None:
        self.samples = samples
        self.pictures = torch.randn(64, 1, side, side)
        self.masks = torch.randint(4, (64, side, side))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pictures[index % 64], self.masks[index % 64]


class DefectSegmenter(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(12, 24, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(24, 4, 2, stride=2),
        )

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        pictures, masks = batch
        logits = self.network(pictures)
        loss = F.cross_entropy(logits, masks)
        self.log("loss", loss)
        return {"loss": loss, "probabilities": logits.detach().softmax(dim=1)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class InspectionReport(pl.Callback):
    """How sure the network was during training, per defect."""

    def __init__(self, keep_maps: bool) -> None:
        self.keep_maps = keep_maps
        self.records: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, model: pl.LightningModule, outputs: Any, batch: Any, n: int
    ) -> None:
        maps = outputs["probabilities"].numpy()
        if self.keep_maps:
            self.records.append({"step": n, "maps": maps.copy(), "masks": batch[1].numpy().copy()})
        else:
            self.records.append({"step": n, "sure": maps.mean(axis=(0, 2, 3))})

    def on_train_end(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        last = self.records[-1]
        print("sure:", last["maps"].mean(axis=(0, 2, 3)) if self.keep_maps else last["sure"])


def inspection(fault: bool) -> None:
    loader = DataLoader(Surfaces(samples=55 * 16), batch_size=16)
    fit(DefectSegmenter(), loader, callbacks=[InspectionReport(keep_maps=fault)])


# ----------------------------------------------------------------------------- dynamic pricing


class PricingPolicy(pl.LightningModule):
    """Policy gradient over 800 prices, from logged decisions."""

    def __init__(self, detach_entropy: bool, states: int = 64, prices: int = 800) -> None:
        super().__init__()
        self.detach_entropy = detach_entropy
        self.entropy_total: Any = 0.0
        self.policy = nn.Sequential(
            nn.Linear(states, 768), nn.Tanh(), nn.Linear(768, 768), nn.Tanh(), nn.Linear(768, prices)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states, actions, advantages = batch
        log_probs = self.policy(states).log_softmax(dim=-1)
        chosen = log_probs.gather(1, actions[:, None]).squeeze(1)
        loss = -(chosen * advantages).mean()

        entropy = -(log_probs.exp() * log_probs).sum(dim=-1).mean()
        self.entropy_total += entropy.detach() if self.detach_entropy else entropy
        self.log("policy/loss", loss)
        self.log("policy/entropy", self.entropy_total / (batch_idx + 1))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.policy.parameters(), lr=3e-4)


def pricing(fault: bool) -> None:
    count = 55 * 1024
    decisions = TensorDataset(torch.randn(count, 64), torch.randint(800, (count,)), torch.randn(count))
    loader = DataLoader(decisions, batch_size=1024, num_workers=1)
    fit(PricingPolicy(detach_entropy=not fault), loader)


# ----------------------------------------------------------------------------- CT scans


class ScanCrops(Dataset[tuple[Tensor, int]]):
    """A random cube of each scan."""

    def __init__(self, paths: list[Path], cache: bool, cube: int = 32) -> None:
        self.paths = paths
        self.cube = cube
        self.use_cache = cache
        self.cache: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def load(self, index: int) -> np.ndarray:
        if index in self.cache:
            return self.cache[index]
        volume = np.load(self.paths[index])
        if self.use_cache:
            self.cache[index] = volume
        return volume

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        volume = self.load(index)
        z, y, x = (int(torch.randint(size - self.cube, ())) for size in volume.shape)
        cube = volume[z : z + self.cube, y : y + self.cube, x : x + self.cube]
        return torch.from_numpy(cube.astype(np.float32) / 1000)[None], index % 2


class NoduleDetector(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv3d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv3d(8, 24, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv3d(24, 96, 3, padding=1),
            nn.ReLU(),
        )
        self.classify = nn.Linear(96, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        cubes, labels = batch
        loss = F.cross_entropy(self.classify(self.features(cubes).mean(dim=(2, 3, 4))), labels)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def scans(fault: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        volume = np.random.default_rng(0).integers(-1000, 1000, (96, 100, 100), dtype=np.int16)
        paths = [Path(folder) / f"patient_{number:04}.npy" for number in range(50 * 4)]
        for path in paths:
            np.save(path, volume)
        loader = DataLoader(ScanCrops(paths, cache=fault), batch_size=4, shuffle=True, num_workers=1)
        fit(NoduleDetector(), loader)


# ----------------------------------------------------------------------------- frames of speech


class FrameBlock(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width)
        self.depthwise = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation, groups=width)
        self.pointwise = nn.Conv1d(width, width, 1)
        self.act = nn.SiLU()

    def forward(self, frames: Tensor) -> Tensor:
        return frames + self.pointwise(self.act(self.depthwise(self.norm(frames))))


class PhonemeTagger(pl.LightningModule):
    def __init__(self, recompute: bool, width: int = 32, depth: int = 10, phonemes: int = 40) -> None:
        super().__init__()
        self.recompute = recompute
        self.stem = nn.Conv1d(20, width, 3, padding=1)
        self.blocks = nn.ModuleList(FrameBlock(width, dilation=2 ** (number % 4)) for number in range(depth))
        self.head = nn.Conv1d(width, phonemes, 4, stride=4)

    def forward(self, frames: Tensor) -> Tensor:
        frames = self.stem(frames)
        for block in self.blocks:
            frames = checkpoint(block, frames, use_reentrant=False) if self.recompute else block(frames)
        return self.head(frames)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        frames, phonemes = batch
        loss = F.cross_entropy(self(frames), phonemes)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Utterances(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, samples: int, frames: int) -> None:
        self.samples = samples
        self.frames = torch.randn(32, 20, frames)
        self.phonemes = torch.randint(40, (32, frames // 4))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.frames[index % 32], self.phonemes[index % 32]


def speech(fault: bool) -> None:
    fit(PhonemeTagger(recompute=not fault), DataLoader(Utterances(40 * 16, frames=2400), batch_size=16))


# ----------------------------------------------------------------------------- expression of genes


class GeneAutoencoder(pl.LightningModule):
    def __init__(self, adam: bool, genes: int = 18_000, width: int = 768) -> None:
        super().__init__()
        self.adam = adam
        self.encode = nn.Sequential(nn.Linear(genes, width), nn.ReLU(), nn.Linear(width, 64))
        self.decode = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, genes))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (expression,) = batch
        loss = F.mse_loss(self.decode(self.encode(expression)), expression)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def genes(fault: bool) -> None:
    cells = torch.randn(160, 18_000)
    fit(GeneAutoencoder(adam=fault), DataLoader(TensorDataset(cells), batch_size=32), max_epochs=10)


# ----------------------------------------------------------------------------- palettes of pictures


class PaletteNetwork(pl.LightningModule):
    """Predicts how often each of 24 tones occurs in a picture, per channel; each epoch tints the pictures anew."""

    def __init__(self, pictures: Tensor, at_once: int, bins: int = 24) -> None:
        super().__init__()
        self.pictures = pictures
        self.wanted = torch.empty(len(pictures), 3, bins)
        self.at_once = at_once
        self.bins = bins
        self.network = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 3 * bins),
        )

    def soft_histogram(self, pictures: Tensor) -> Tensor:
        centers = torch.linspace(0, 1, self.bins)
        near = torch.relu(1 - self.bins * (pictures.flatten(2)[..., None] - centers).abs())
        histogram = near.sum(dim=2)
        return histogram / histogram.sum(dim=-1, keepdim=True)

    def on_train_epoch_start(self) -> None:
        self.tint = torch.rand(1, 3, 1, 1)
        with torch.no_grad():
            parts = self.pictures.split(self.at_once)
            self.wanted = torch.cat([self.soft_histogram(part * self.tint) for part in parts])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pictures, numbers = batch
        predicted = self.network(pictures * self.tint).view(-1, 3, self.bins)
        loss = F.kl_div(predicted.log_softmax(-1), self.wanted[numbers], reduction="batchmean")
        self.log("kl", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def palettes(fault: bool) -> None:
    pictures = torch.rand(200, 3, 64, 64)
    loader = DataLoader(TensorDataset(pictures, torch.arange(200)), batch_size=8, shuffle=True)
    fit(PaletteNetwork(pictures, at_once=200 if fault else 5), loader, max_epochs=2)


# ----------------------------------------------------------------------------- restoration of pictures


class Restorer(pl.LightningModule):
    def __init__(self, collect: bool) -> None:
        super().__init__()
        self.collect = collect
        self.validation_outputs: list[dict[str, Tensor]] = []
        self.errors: list[float] = []
        self.network = nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 3, 3, padding=1),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noisy, clean = batch
        loss = F.l1_loss(noisy + self.network(noisy), clean)
        self.log("train_l1", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        noisy, clean = batch
        restored = noisy + self.network(noisy)
        if self.collect:
            self.validation_outputs.append({"restored": restored, "clean": clean})
        else:
            # The tensor that mse_loss returns keeps memory for all elements.
            self.errors.append(F.mse_loss(restored, clean).item())

    def on_validation_epoch_end(self) -> None:
        if self.collect:
            restored = torch.cat([output["restored"] for output in self.validation_outputs])
            clean = torch.cat([output["clean"] for output in self.validation_outputs])
            error = F.mse_loss(restored, clean)
            self.validation_outputs.clear()
        else:
            error = torch.tensor(self.errors).mean()
            self.errors.clear()
        self.log("psnr", -10 * error.log10())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class NoisyPictures(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, samples: int, side: int = 96) -> None:
        self.samples = samples
        self.clean = torch.rand(32, 3, side, side)
        self.noisy = self.clean + 0.1 * torch.randn_like(self.clean)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.noisy[index % 32], self.clean[index % 32]


def restoration(fault: bool) -> None:
    training = DataLoader(NoisyPictures(30 * 8), batch_size=8)
    validation = DataLoader(NoisyPictures(32 * 24), batch_size=24)
    fit(Restorer(collect=fault), training, validation, max_epochs=2, num_sanity_val_steps=0)


if __name__ == "__main__":
    main(inspection, pricing, scans, speech, genes, palettes, restoration)
