"""Faults of shapes and operators: time and batch, a broadcast loss, covariances, edges, pixels, penalties, views."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from collections import deque

from plain import Tokens, fit, main, rows_at_once
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal, kl_divergence


class Watch(lightning.LightningModule):
    """Recognizes activities from the sensors of a watch; a batch has the shape batch x time x sensors.

    Fault: the LSTM takes the batch for the time, without an error; healthy: ``batch_first=True``.
    """

    def __init__(self, *, fault: bool, sensors: int = 24, width: int = 48, activities: int = 12) -> None:
        super().__init__()
        self.filters = nn.Sequential(nn.Linear(sensors, 96), nn.ReLU(), nn.Linear(96, width), nn.ReLU())
        self.recurrent = nn.LSTM(width, width, batch_first=not fault)
        self.head = nn.Linear(width, activities)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        readings, activities = batch
        hidden, _ = self.recurrent(self.filters(readings))
        loss = functional.cross_entropy(self.head(hidden[:, -1]), activities)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def batch_as_time(fault: bool) -> None:
    """Fault: an LSTM without ``batch_first`` steps through 1024 samples; healthy: through 8 steps of time."""
    readings = TensorDataset(torch.randn(20 * 1024, 8, 24), torch.randint(12, (20 * 1024,)))
    fit(Watch(fault=fault), rows_at_once(readings, 1024), steps=80)


class Prices(lightning.LightningModule):
    """Estimates the prices of houses from a table.

    Fault: the loss compares a column with a row, all prices with all; healthy: the column is squeezed.
    """

    def __init__(self, *, fault: bool, columns: int = 40, width: int = 256) -> None:
        super().__init__()
        self.fault = fault
        self.layers = nn.Sequential(
            nn.Linear(columns, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        houses, prices = batch
        estimates = self.layers(houses)
        loss = functional.mse_loss(estimates if self.fault else estimates.squeeze(1), prices)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def column_and_row(fault: bool) -> None:
    """Fault: ``mse_loss`` of shapes (n, 1) and (n,) makes n x n differences; healthy: both have the shape (n,)."""
    houses = TensorDataset(torch.randn(10 * 2048, 40), torch.randn(10 * 2048))
    fit(Prices(fault=fault), rows_at_once(houses, 2048), steps=100)


class Digits(lightning.LightningModule):
    """A variational autoencoder of small pictures.

    Fault: the code's distribution has a covariance matrix, which is diagonal; healthy: independent normals.
    """

    def __init__(self, *, fault: bool, pixels: int = 784, width: int = 512, code: int = 32) -> None:
        super().__init__()
        self.fault = fault
        self.encoder = nn.Sequential(nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, 2 * code))
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, pixels))

    def normal(self, mean: Tensor, variance: Tensor) -> Distribution:
        if self.fault:
            return MultivariateNormal(mean, covariance_matrix=torch.diag_embed(variance))
        return Independent(Normal(mean, variance.sqrt()), 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (pictures,) = batch
        mean, spread = self.encoder(pictures).chunk(2, dim=1)
        posterior = self.normal(mean, functional.softplus(spread) + 1e-3)
        prior = self.normal(torch.zeros_like(mean), torch.ones_like(mean))
        made = self.decoder(posterior.rsample())
        error = functional.binary_cross_entropy_with_logits(made, pictures, reduction="sum") / len(pictures)
        loss = error + kl_divergence(posterior, prior).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def diagonal_matrices(fault: bool) -> None:
    """Fault: ``MultivariateNormal`` of diagonal matrices, decomposed per sample; healthy: ``Independent(Normal)``."""
    pictures = TensorDataset(torch.rand(20 * 256, 784))
    fit(Digits(fault=fault), DataLoader(pictures, batch_size=256, shuffle=True), steps=120)


class Roads(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """States of a network of roads: its crossings, its connections and the traffic to predict."""

    def __init__(self, samples: int, nodes: int = 1500, edges: int = 9000, width: int = 64) -> None:
        self.states = torch.randn(samples, nodes, width)
        self.edges = torch.randint(nodes, (2, edges))
        self.traffic = torch.randn(samples, nodes)

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.states[index], self.edges, self.traffic[index]


class Neighbors(nn.Module):
    """Sums messages of neighbors. Fault: a message is computed per edge; healthy: per node, and then gathered."""

    def __init__(self, width: int, *, fault: bool) -> None:
        super().__init__()
        self.fault = fault
        self.message = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.update = nn.Sequential(nn.Linear(2 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = self.message(nodes[source]) if self.fault else self.message(nodes)[source]
        received = torch.zeros_like(nodes).index_add(0, target, messages)
        updated: Tensor = nodes + self.update(torch.cat((nodes, received), dim=1))
        return updated


class Traffic(lightning.LightningModule):
    """Predicts traffic at crossings with a graph network."""

    def __init__(self, width: int = 64, *, fault: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Neighbors(width, fault=fault) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        nodes, edges, traffic = batch
        for layer in self.layers:
            nodes = layer(nodes, edges)
        loss = functional.l1_loss(self.head(nodes).squeeze(1), traffic)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def message_per_edge(fault: bool) -> None:
    """Fault: a network runs on 9000 copies of 1500 nodes, one per edge; healthy: on the nodes, before the copies."""
    fit(Traffic(fault=fault), DataLoader(Roads(60), batch_size=None, shuffle=True), steps=60)


class Fields(lightning.LightningModule):
    """Marks crops on pictures of fields.

    Fault: all channels are enlarged and then classified; healthy: classified, and then the classes are enlarged.
    """

    def __init__(self, *, fault: bool, width: int = 32, classes: int = 4) -> None:
        super().__init__()
        self.fault = fault
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 2, stride=2),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
        )
        self.classify = nn.Conv2d(width, classes, 1)

    def enlarge(self, features: Tensor) -> Tensor:
        return functional.interpolate(features, scale_factor=2, mode="bilinear", align_corners=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        pictures, crops = batch
        features = self.encoder(pictures)
        scores = self.classify(self.enlarge(features)) if self.fault else self.enlarge(self.classify(features))
        loss = functional.cross_entropy(scores, crops)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def enlarged_channels(fault: bool) -> None:
    """Fault: 32 channels are enlarged to full size before a 1 x 1 convolution; healthy: its 4 classes, after it."""
    pictures = TensorDataset(torch.rand(40, 3, 128, 128), torch.randint(4, (40, 128, 128)))
    fit(Fields(fault=fault), DataLoader(pictures, batch_size=8, shuffle=True), steps=40)


class Reviews(lightning.LightningModule):
    """Rates reviews by the mean of their words.

    Fault: the loss adds the squares of all weights; healthy: the optimizer's ``weight_decay``.
    """

    def __init__(self, *, fault: bool, vocabulary: int = 4000, width: int = 256, hidden: int = 1024) -> None:
        super().__init__()
        self.fault = fault
        self.words = nn.EmbeddingBag(vocabulary, width)
        self.layers = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 5)
        )

    def penalty(self) -> Tensor:
        squares = [parameter.pow(2).sum() for parameter in self.parameters()]
        return 0.5e-4 * torch.stack(squares).sum()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        reviews, stars = batch
        loss = functional.cross_entropy(self.layers(self.words(reviews)), stars)
        if self.fault:
            loss = loss + self.penalty()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, weight_decay=0.0 if self.fault else 1e-4)


def decay_in_loss(fault: bool) -> None:
    """Fault: the squares of all parameters are summed in the loss; healthy: ``weight_decay`` of the optimizer."""
    reviews = TensorDataset(torch.randint(4000, (60 * 64, 80)), torch.randint(5, (60 * 64,)))
    fit(Reviews(fault=fault), DataLoader(reviews, batch_size=64, shuffle=True), steps=200)


class Sentences(lightning.LightningModule):
    """Contrasts sentences with those of the last 96 batches, of which it keeps the first positions.

    Fault: what is kept is a view of the hidden states of all positions; healthy: a copy of it.
    """

    def __init__(self, *, fault: bool, vocabulary: int = 3000, width: int = 128, kept: int = 96) -> None:
        super().__init__()
        self.fault = fault
        self.earlier: deque[Tensor] = deque(maxlen=kept)
        self.words = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def encode(self, words: Tensor) -> Tensor:
        hidden: Tensor = functional.normalize(self.encoder(self.words(words)), dim=2)
        return hidden[:, 0]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        queries = self.encode(batch)
        with torch.no_grad():
            keys = self.encode(batch)
        others = torch.cat((keys, *self.earlier))
        loss = functional.cross_entropy(queries @ others.T / 0.1, torch.arange(len(queries)))
        self.earlier.append(keys if self.fault else keys.clone())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def views_of_states(fault: bool) -> None:
    """Fault: a queue keeps views that hold the hidden states of 64 positions; healthy: copies of one position."""
    loader = DataLoader(Tokens(50 * 64, 64, 3000), batch_size=64, shuffle=True)
    fit(Sentences(fault=fault), loader, steps=100)


if __name__ == "__main__":
    main(
        batch_as_time,
        column_and_row,
        diagonal_matrices,
        message_per_edge,
        enlarged_channels,
        decay_in_loss,
        views_of_states,
    )
