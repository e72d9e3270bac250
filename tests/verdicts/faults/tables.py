"""Recommendations and tables: large embeddings, deep narrow networks, wide layers, records that workers decode."""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.optim import SGD, AdamW, Optimizer, SparseAdam
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import fit, main

# ------------------------------------------------------------------ next item


class TwoTower(LightningModule):
    """Scores items for users; items come from a catalogue of 60,000."""

    def __init__(self, sparse: bool, items: int = 60_000, width: int = 64) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.items = nn.Embedding(items, width, sparse=sparse)
        self.user = nn.Sequential(
            nn.Linear(20 * width, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, width)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        history, chosen, clicked = batch
        user = self.user(self.items(history).flatten(1))
        scores = (user * self.items(chosen)).sum(dim=1)
        loss = binary_cross_entropy_with_logits(scores, clicked)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self) -> list[Optimizer]:
        rows = list(self.items.parameters())
        table: Optimizer = SparseAdam(rows, lr=1e-3) if self.items.sparse else torch.optim.Adam(rows, lr=1e-3)
        return [table, SGD(self.user.parameters(), lr=0.01)]


def catalogue(fault: bool) -> None:
    clicks = 20_000
    data = TensorDataset(
        torch.randint(60_000, (clicks, 20)), torch.randint(60_000, (clicks,)), (torch.rand(clicks) < 0.2).float()
    )
    fit(TwoTower(sparse=not fault), DataLoader(data, batch_size=256, shuffle=True), steps=100)


# ------------------------------------------------------------------ deep narrow networks


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


class DeepTable(LightningModule):
    def __init__(self, columns: int = 40, width: int = 64, depth: int = 60) -> None:
        super().__init__()
        self.enter = nn.Linear(columns, width)
        self.blocks = nn.Sequential(*(Gated(width) for _ in range(depth)))
        self.leave = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x))).squeeze(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        columns, price = batch
        loss = mse_loss(self(columns), price)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.01, foreach=True)


class AdaBelief(Optimizer):
    """Adapts the step size by the belief in observed gradients."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-12, "weight_decay": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(p)
                    state["variance"] = torch.zeros_like(p)
                    state["largest"] = torch.zeros_like(p)
                mean, variance = state["mean"], state["variance"]
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                mean.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                residual = p.grad - mean
                variance.mul_(beta2).addcmul_(residual, residual, value=1 - beta2).add_(group["eps"])
                correction = math.sqrt(1 - beta2 ** state["step"])
                torch.maximum(state["largest"], variance, out=state["largest"])
                denominator = state["largest"].sqrt().div_(correction).add_(group["eps"])
                p.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1 ** state["step"]))
        return loss


class AdaBeliefTogether(AdaBelief):
    """The same update for all tensors of a group at once: they become views of one vector."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            weights = torch.cat([p.detach().view(-1) for p in group["params"]])
            for p, part in zip(group["params"], weights.split([p.numel() for p in group["params"]]), strict=True):
                p.data = part.view_as(p)
            zeros = torch.zeros_like(weights)
            group["flat"] = {"step": 0, "weights": weights, "mean": zeros}
            group["flat"] |= {"variance": zeros.clone(), "largest": zeros.clone()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            flat = group["flat"]
            beta1, beta2 = group["betas"]
            weights, mean, variance = flat["weights"], flat["mean"], flat["variance"]
            flat["step"] += 1
            gradient = torch.cat([p.grad.view(-1) for p in group["params"]])
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
            residual = gradient - mean
            variance.mul_(beta2).addcmul_(residual, residual, value=1 - beta2).add_(group["eps"])
            correction = math.sqrt(1 - beta2 ** flat["step"])
            torch.maximum(flat["largest"], variance, out=flat["largest"])
            denominator = flat["largest"].sqrt().div_(correction).add_(group["eps"])
            weights.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1 ** flat["step"]))
        return loss


class Appraisal(DeepTable):
    def __init__(self, rule: type[AdaBelief]) -> None:
        super().__init__()
        self.rule = rule

    def configure_optimizers(self) -> Optimizer:
        return self.rule(self.parameters(), lr=1e-3)


def houses(rows: int = 20_000) -> TensorDataset:
    return TensorDataset(torch.randn(rows, 40), torch.rand(rows))


def house_prices(fault: bool) -> None:
    rule = AdaBelief if fault else AdaBeliefTogether
    fit(Appraisal(rule), DataLoader(houses(), batch_size=96, shuffle=True), steps=60)


class Premium(DeepTable):
    """Keeps the weights small."""

    def __init__(self, decay: float, strength: float) -> None:
        super().__init__()
        self.decay, self.strength = decay, strength

    def penalty(self) -> Tensor:
        total = torch.zeros(())
        for weight in self.parameters():
            total = total + weight.abs().sum() + weight.pow(2).sum()
        return total

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        columns, price = batch
        loss = mse_loss(self(columns), price)
        if self.strength:
            loss = loss + self.strength * self.penalty()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.01, weight_decay=self.decay, foreach=True)


def insurance(fault: bool) -> None:
    module = Premium(0.0, 1e-4) if fault else Premium(1e-4, 0.0)
    fit(module, DataLoader(houses(), batch_size=192, shuffle=True), steps=60)


# ------------------------------------------------------------------ a wide layer


class GeneExpression(LightningModule):
    """An autoencoder over 9,000 genes."""

    def __init__(self, options: dict[str, Any], genes: int = 9000, width: int = 512) -> None:
        super().__init__()
        self.options = options
        self.net = nn.Sequential(
            nn.Linear(genes, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, genes)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (cells,) = batch
        loss = mse_loss(self.net(cells), cells)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.net.parameters(), lr=1e-4, **self.options)


def cells(fault: bool) -> None:
    data = TensorDataset(torch.rand(1500, 9000))
    fit(GeneExpression({} if fault else {"fused": True}), DataLoader(data, batch_size=96, shuffle=True), steps=60)


# ------------------------------------------------------------------ compressed sensor records


class Records(Dataset):
    """Windows of a sensor, compressed in memory."""

    def __init__(self, windows: int, reuse: bool, length: int = 40_000) -> None:
        rng = np.random.default_rng(0)
        shapes = [np.repeat(rng.standard_normal(length // 50, dtype=np.float32), 50) for _ in range(32)]
        self.packed = [zlib.compress(shape.tobytes(), 1) for shape in shapes]
        self.windows = windows
        self.reuse = reuse
        self.unpacked: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.windows

    def load(self, index: int) -> np.ndarray:
        return np.frombuffer(zlib.decompress(self.packed[index % len(self.packed)]), dtype=np.float32) * 0.5

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        if not self.reuse:
            signal = self.load(index)
        elif index in self.unpacked:
            signal = self.unpacked[index]
        else:
            signal = self.unpacked[index] = self.load(index)
        start = index % 1000
        return torch.from_numpy(signal[start : start + 2048]), float(signal[start + 2048])


class Forecast(LightningModule):
    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2048, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        signal, following = batch
        loss = mse_loss(self.net(signal).squeeze(1), following.float())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=1e-3)


def wind_farms(fault: bool) -> None:
    data = Records(80 * 48, reuse=fault)
    loader = DataLoader(data, batch_size=48, shuffle=True, num_workers=2, persistent_workers=True)
    fit(Forecast(), loader, steps=75)


if __name__ == "__main__":
    main(catalogue, house_prices, insurance, cells, wind_farms)
