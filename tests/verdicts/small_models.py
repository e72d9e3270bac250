"""Models that trainings of several subjects share."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from plain import Classifier, Trained
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class PictureClassifier(Trained, optimizer=torch.optim.SGD, lr=0.01, momentum=0.9):
    def __init__(self, channels: int = 3, width: int = 32, classes: int = 8) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            convolution(channels, width, stride=2),
            convolution(width, 2 * width),
            convolution(2 * width, 2 * width, stride=2),
            convolution(2 * width, 4 * width),
            convolution(4 * width, 4 * width, stride=2),
            convolution(4 * width, 8 * width),
        )
        self.head = nn.Linear(8 * width, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.backbone(pictures).mean(dim=(2, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pictures, labels = batch
        loss = functional.cross_entropy(self(pictures), labels)
        self.log("train_loss", loss)
        return loss


def halving(channels: int, out: int, kernel: int = 3) -> nn.Sequential:
    """Halve the resolution."""
    return nn.Sequential(
        nn.Conv2d(channels, out, kernel, stride=2, padding=kernel // 2), nn.BatchNorm2d(out), nn.ReLU()
    )


class HalvingClassifier(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """A small convolutional network."""

    def __init__(self, channels: int, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        sizes = (channels, *widths)
        self.body = nn.Sequential(*(halving(a, b) for a, b in pairwise(sizes)))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(dim=(2, 3)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        pictures, labels = batch
        loss = functional.cross_entropy(self(pictures), labels)
        self.log("train_loss", loss)
        return loss


class LeafNet(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    def __init__(self, width: int = 16, classes: int = 12) -> None:
        super().__init__()
        self.features = nn.Sequential(
            convolution(3, width, 2),
            convolution(width, 2 * width, 2),
            convolution(2 * width, 2 * width),
            convolution(2 * width, 4 * width, 2),
        )
        self.classifier = nn.Linear(4 * width, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.classifier(self.features(pictures).mean(dim=(2, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pictures, labels = batch
        loss = functional.cross_entropy(self(pictures), labels)
        self.log("train/loss", loss)
        return loss


class SeriesModel(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Convolutions along the time, for a class."""

    def __init__(self, channels: int, width: int, classes: int, stride: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(channels, width, 7, stride=stride, padding=3),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(width, classes),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        series, label = batch
        loss = functional.cross_entropy(self.net(series), label)
        self.log("train_loss", loss)
        return loss


BANDS = 40


class SoundNet(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Convolutions over time of frames with ``BANDS`` values, and a mean over the frames that count."""

    def __init__(self, width: int = 192, depth: int = 3, classes: int = 20) -> None:
        super().__init__()
        self.first = nn.Linear(BANDS, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, frames: Tensor, mask: Tensor) -> Tensor:
        hidden = self.first(frames).transpose(1, 2)
        for layer in self.layers:
            hidden = hidden + functional.relu(layer(hidden))
        hidden = hidden * mask[:, None]
        return self.head(hidden.sum(dim=2) / mask.sum(dim=1, keepdim=True))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = torch.arange(batch["frames"].shape[1])[None] < batch["lengths"][:, None]
        loss = functional.cross_entropy(self(batch["frames"], mask.float()), batch["label"])
        self.log("loss", loss, batch_size=len(mask))
        return loss


class Unit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rise = nn.Linear(width, 2 * width)
        self.fall = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fall(torch.relu(self.rise(self.norm(x))))


class Spectra(Trained, optimizer=torch.optim.SGD, lr=0.01, foreach=True):
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
        loss = functional.cross_entropy(self(spectra), labels)
        self.log("loss", loss)
        return loss


def spectrograms(samples: int, frames: int = 32, bins: int = 128) -> TensorDataset:
    return TensorDataset(torch.randn(samples, frames, bins), torch.randint(35, (samples,)))


def perceptron(inputs: int, width: int, depth: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(inputs, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class Regressor(Trained, optimizer=torch.optim.SGD, lr=1e-3):
    def __init__(self, inputs: int, width: int = 1280) -> None:
        super().__init__()
        self.network = perceptron(inputs, width, 2, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.network(rows).squeeze(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows, target = batch
        loss = functional.mse_loss(self(rows), target)
        self.log("mse", loss)
        return loss


VOCAB = 2000


class Corpus(Dataset):
    def __init__(self, sentences: int, length: int) -> None:
        self.tokens = torch.randint(VOCAB, (sentences, length + 1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.tokens[i]


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


def sinusoids(length: int, dim: int) -> torch.Tensor:
    position = torch.arange(length).unsqueeze(1)
    div_term = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    pe = torch.zeros(length, dim)
    pe[:, 0::2] = torch.sin(position * div_term)
    pe[:, 1::2] = torch.cos(position * div_term)
    return pe


class StoredPositionalEncoding(nn.Module):
    def __init__(self, dim: int, max_len: int = 8192) -> None:
        super().__init__()
        self.pe: torch.Tensor
        self.register_buffer("pe", sinusoids(max_len, dim), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pe[: x.size(1)]


class MiniGPT(Trained, optimizer=torch.optim.SGD, lr=0.05):
    def __init__(self, positions: nn.Module, dim: int = 256, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.positions = positions
        self.blocks = nn.Sequential(*(Block(dim, 4) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.positions(self.embed(tokens)))))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss


class Highway(nn.Module):
    """Two layers of which one is a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.candidate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(x, functional.gelu(self.candidate(x)), self.gate(x).sigmoid())


class Tabular(Classifier, optimizer=torch.optim.Adam, lr=1e-3, fused=True):
    """The same network, trained by a fused Adam."""
