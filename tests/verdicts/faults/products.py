"""Faults of what a model computes: unscored logits, unread attention weights, one-hot lookups, exact norms."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

import itertools

from plain import Tokens, fit, main

IGNORED = -100


class MaskedTokens(lightning.LightningModule):
    """A masked language model over a large vocabulary.

    Fault: the head scores every position and the loss ignores 85% of them; healthy: it scores the masked ones.
    """

    def __init__(self, *, fault: bool, vocabulary: int = 4000, width: int = 192) -> None:
        super().__init__()
        self.fault = fault
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary + 1, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        masked = torch.rand(batch.shape) < 0.15
        hidden = self.encoder(self.embedding(batch.masked_fill(masked, self.vocabulary)))
        if self.fault:
            labels = batch.masked_fill(~masked, IGNORED)
            loss = functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        else:
            loss = functional.cross_entropy(self.head(hidden[masked]), batch[masked])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def scored_unmasked(fault: bool) -> None:
    """Fault: logits of 4000 words at all positions, of which 15% count; healthy: logits at the masked positions."""
    loader = DataLoader(Tokens(60 * 8, 96, 4000), batch_size=8, shuffle=True)
    fit(MaskedTokens(fault=fault), loader, steps=60)


class Block(nn.Module):
    """Attention between the frames of a recording. Fault: it returns its weights; healthy: it does not."""

    def __init__(self, width: int, heads: int, *, fault: bool) -> None:
        super().__init__()
        self.fault = fault
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feedforward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, frames: Tensor) -> Tensor:
        normed = self.norm(frames)
        mixed, _ = self.attention(normed, normed, normed, need_weights=self.fault)
        frames = frames + mixed
        found: Tensor = frames + self.feedforward(frames)
        return found


class Speech(lightning.LightningModule):
    """Recognizes commands in the frames of a recording."""

    def __init__(self, *, fault: bool, width: int = 128, commands: int = 30) -> None:
        super().__init__()
        self.project = nn.Linear(80, width)
        self.blocks = nn.Sequential(*(Block(width, 4, fault=fault) for _ in range(2)))
        self.head = nn.Linear(width, commands)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        frames, commands = batch
        hidden = self.blocks(self.project(frames))
        loss = functional.cross_entropy(self.head(hidden.mean(dim=1)), commands)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def unread_weights(fault: bool) -> None:
    """Fault: ``MultiheadAttention`` returns weights that nobody reads; healthy: ``need_weights=False``."""
    recordings = TensorDataset(torch.randn(60 * 4, 480, 80), torch.randint(30, (60 * 4,)))
    fit(Speech(fault=fault), DataLoader(recordings, batch_size=4, shuffle=True), steps=60)


class Baskets(lightning.LightningModule):
    """Predicts the next item out of the items of a basket.

    Fault: items are looked up by a product of one-hot vectors and the table; healthy: by ``embedding``.
    """

    def __init__(self, *, fault: bool, items: int = 1400, width: int = 96) -> None:
        super().__init__()
        self.fault = fault
        self.table = nn.Parameter(0.02 * torch.randn(items, width))
        self.mix = nn.Sequential(
            nn.Linear(16 * width, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, width)
        )

    def lookup(self, items: Tensor) -> Tensor:
        if self.fault:
            return functional.one_hot(items, len(self.table)).float() @ self.table
        return functional.embedding(items, self.table)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        items, following = batch
        wanted = self.mix(self.lookup(items).flatten(1))
        loss = functional.cross_entropy(wanted @ self.table.T, following)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def one_hot_lookup(fault: bool) -> None:
    """Fault: one-hot vectors of 1400 items times the embedding table; healthy: rows of the table are looked up."""
    baskets = TensorDataset(torch.randint(1400, (80 * 256, 16)), torch.randint(1400, (80 * 256,)))
    fit(Baskets(fault=fault), DataLoader(baskets, batch_size=256, shuffle=True), steps=80)


class Critic(lightning.LightningModule):
    """Estimates a distance between distributions with layers whose largest singular values are penalized.

    Fault: the values come from a full decomposition of each matrix; healthy: from one step of power iteration.
    """

    def __init__(self, *, fault: bool, inputs: int = 128, width: int = 320) -> None:
        super().__init__()
        self.fault = fault
        sizes = (inputs, width, width, width)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        self.score = nn.Linear(width, 1)
        self.directions = [torch.randn(size) for size in sizes[:-1]]

    def forward(self, samples: Tensor) -> Tensor:
        for layer in self.layers:
            samples = functional.leaky_relu(layer(samples), 0.2)
        scores: Tensor = self.score(samples)
        return scores

    def stretch(self, place: int) -> Tensor:
        weight = self.layers[place].get_parameter("weight")
        if self.fault:
            return torch.linalg.matrix_norm(weight, ord=2)
        with torch.no_grad():
            left = functional.normalize(weight @ self.directions[place], dim=0)
            right = functional.normalize(weight.T @ left, dim=0)
            self.directions[place] = right
        return left @ weight @ right

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        real, made = batch
        loss = self(made).mean() - self(real).mean()
        for place in range(len(self.layers)):
            loss = loss + (self.stretch(place) - 1).square()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4, betas=(0.0, 0.9))


def exact_norms(fault: bool) -> None:
    """Fault: singular value decompositions of all layers in each step; healthy: one step of power iteration."""
    samples = TensorDataset(torch.randn(20 * 2048, 128), torch.rand(20 * 2048, 128))
    fit(Critic(fault=fault), DataLoader(samples, batch_size=2048, shuffle=True, drop_last=True), steps=60)


if __name__ == "__main__":
    main(scored_unmasked, unread_weights, one_hot_lookup, exact_norms)
