"""Faults of the layers, the loss and the update: loops, operators by hand, dense gradients."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main, quiet, rows_at_once


class BeatClassifier(lightning.LightningModule):
    """Classifies heartbeats in an ECG of twelve leads."""

    def __init__(self, each_moment: bool, width: int = 48) -> None:
        super().__init__()
        self.each_moment = each_moment
        self.embed = nn.Sequential(nn.Linear(12, width), nn.GELU(), nn.Linear(width, width), nn.LayerNorm(width))
        self.body = nn.Sequential(
            nn.Conv1d(width, 80, 7, padding=3),
            nn.ReLU(),
            nn.Conv1d(80, 80, 7, padding=3),
            nn.ReLU(),
            nn.Conv1d(80, 80, 7, padding=3),
            nn.ReLU(),
        )
        self.head = nn.Linear(80, 5)

    def encode(self, signal: Tensor) -> Tensor:
        if self.each_moment:
            moments = [self.embed(signal[:, t]) for t in range(signal.shape[1])]
            return torch.stack(moments, dim=1)
        return self.embed(signal)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        signal, beat = batch
        hidden = self.body(self.encode(signal).transpose(1, 2))
        return functional.cross_entropy(self.head(hidden.mean(dim=2)), beat)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def heartbeats(fault: bool) -> None:
    data = TensorDataset(torch.randn(3000, 100, 12), torch.randint(5, (3000,)))
    quiet(80).fit(BeatClassifier(each_moment=fault), DataLoader(data, batch_size=64, shuffle=True))


class SpectrumAutoencoder(lightning.LightningModule):
    """Compresses star spectra; the loss weighs each pixel by its measurement error."""

    def __init__(self, star_by_star: bool, pixels: int = 1024) -> None:
        super().__init__()
        self.star_by_star = star_by_star
        self.encoder = nn.Sequential(nn.Linear(pixels, 2048), nn.GELU(), nn.Linear(2048, 32))
        self.decoder = nn.Sequential(nn.Linear(32, 2048), nn.GELU(), nn.Linear(2048, pixels))

    def chi_square(self, rebuilt: Tensor, flux: Tensor, error: Tensor) -> Tensor:
        if self.star_by_star:
            total = torch.zeros(())
            for i in range(len(flux)):
                residual = (rebuilt[i] - flux[i]) / error[i]
                total = total + residual.pow(2).mean()
            return total / len(flux)
        return ((rebuilt - flux) / error).pow(2).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        flux, error = batch
        return self.chi_square(self.decoder(self.encoder(flux)), flux, error)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def star_spectra(fault: bool) -> None:
    data = TensorDataset(torch.randn(6000, 1024), 0.5 + torch.rand(6000, 1024))
    quiet(120).fit(SpectrumAutoencoder(star_by_star=fault), DataLoader(data, batch_size=128, shuffle=True))


class MoveAttention(nn.Module):
    """Causal self-attention over the moves of a game."""

    def __init__(self, width: int, heads: int, by_hand: bool) -> None:
        super().__init__()
        self.heads = heads
        self.by_hand = by_hand
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        if self.by_hand:
            scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
            future = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=1)
            scores = scores.masked_fill(future, float("-inf"))
            mixed = torch.softmax(scores, dim=-1) @ value
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class ChessModel(lightning.LightningModule):
    """Predicts the next move."""

    def __init__(self, by_hand: bool, moves: int = 1000, width: int = 128, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(moves, width)
        self.attentions = nn.ModuleList(MoveAttention(width, 4, by_hand) for _ in range(depth))
        self.feedforwards = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, moves)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (games,) = batch
        x = self.embedding(games[:, :-1])
        for norm, attention, feedforward in zip(self.norms, self.attentions, self.feedforwards, strict=True):
            x = x + attention(norm(x))
            x = x + feedforward(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), games[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def chess_games(fault: bool) -> None:
    data = TensorDataset(torch.randint(1000, (800, 401)))
    quiet(60).fit(ChessModel(by_hand=fault), DataLoader(data, batch_size=8, shuffle=True))


class LayerNorm(nn.Module):
    """Layer normalization as in the paper."""

    def __init__(self, features: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.gain * (x - mean) / (std + self.eps) + self.bias


class TrafficMixer(lightning.LightningModule):
    """Forecasts the flow at road sensors; every block mixes features."""

    def __init__(self, norm: type[nn.Module], width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(24, width)
        self.norms = nn.ModuleList(norm(width) for _ in range(depth))
        self.mixers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, 12)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        past, future = batch
        x = self.embed(past)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return functional.l1_loss(self.head(x), future)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def traffic_flow(fault: bool) -> None:
    data = TensorDataset(torch.randn(1000, 200, 24), torch.randn(1000, 200, 12))
    model = TrafficMixer(LayerNorm if fault else nn.LayerNorm)
    quiet(80).fit(model, DataLoader(data, batch_size=32, shuffle=True))


class RecipeRanker(lightning.LightningModule):
    """Predicts how a cook rates a recipe."""

    def __init__(self, sparse: bool, cooks: int = 120_000, recipes: int = 20_000, width: int = 32) -> None:
        super().__init__()
        self.cooks = nn.Embedding(cooks, width, sparse=sparse)
        self.recipes = nn.Embedding(recipes, width, sparse=sparse)
        self.tower = nn.Sequential(
            nn.Linear(2 * width, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU(), nn.Linear(1536, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        pairs, rating = batch
        both = torch.cat([self.cooks(pairs[:, 0]), self.recipes(pairs[:, 1])], dim=1)
        return functional.mse_loss(self.tower(both).squeeze(1), rating)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.01)


def recipes(fault: bool) -> None:
    count = 50_000
    pairs = torch.stack([torch.randint(120_000, (count,)), torch.randint(20_000, (count,))], dim=1)
    data = TensorDataset(pairs, torch.rand(count))
    quiet(80).fit(RecipeRanker(sparse=not fault), rows_at_once(data, 768))


class MyAdam(torch.optim.Optimizer):
    """Adam as in the paper."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["t"] = 0
                    state["m"] = torch.zeros_like(p)
                    state["v"] = torch.zeros_like(p)
                state["t"] += 1
                state["m"] = group["beta1"] * state["m"] + (1 - group["beta1"]) * p.grad
                state["v"] = group["beta2"] * state["v"] + (1 - group["beta2"]) * p.grad**2
                m_hat = state["m"] / (1 - group["beta1"] ** state["t"])
                v_hat = state["v"] / (1 - group["beta2"] ** state["t"])
                p.sub_(group["lr"] * m_hat / (v_hat.sqrt() + group["eps"]))
        return loss


class GlacierNet(lightning.LightningModule):
    """Estimates the yearly melt of a glacier from weather and terrain columns."""

    def __init__(self, own_adam: bool, width: int = 256, depth: int = 24) -> None:
        super().__init__()
        self.own_adam = own_adam
        self.embed = nn.Linear(40, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        columns, melt = batch
        x = self.embed(columns)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return functional.mse_loss(self.head(x).squeeze(1), melt)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.own_adam:
            return MyAdam(self.parameters(), lr=1e-3)
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


def glaciers(fault: bool) -> None:
    data = TensorDataset(torch.randn(10_000, 40), torch.randn(10_000))
    quiet(120).fit(GlacierNet(own_adam=fault), DataLoader(data, batch_size=128, shuffle=True))


if __name__ == "__main__":
    main(heartbeats, star_spectra, chess_games, traffic_flow, recipes, glaciers)
