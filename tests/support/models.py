"""Small models of every kind that training must not be changed for, and what a fit of one came to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from training import loader, trainer

STEPS = 6

Outcome = list[torch.Tensor]


class TracedModel(pl.LightningModule):
    """Keeps its losses and its gradients; the batch is 4 rows of 8 numbers."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.seen: Outcome = []
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.seen.append(loss.detach().clone())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.extend(
            parameter.grad.detach().clone() for parameter in self.parameters() if parameter.grad is not None
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Mlp(TracedModel):
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).square().mean()


class InPlaceCnn(TracedModel):
    def build(self) -> None:
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3), nn.Flatten()
        )

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch.view(1, 1, 4, 8)).square().mean()


class SharedEmbeddings(TracedModel):
    def build(self) -> None:
        self.embedding = nn.Embedding(32, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embedding.weight

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        tokens = (batch.abs() * 10).long() % 32
        logits = self.head(self.encoder(self.embedding(tokens)))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Lstm(TracedModel):
    def build(self) -> None:
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.1)
        self.head = nn.Linear(8, 1)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(batch.view(4, 1, 8))[0]).square().mean()


class GradientPenalty(Mlp):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        given = batch.clone().requires_grad_()
        out = functional.softplus(self.net(given)).sum()
        (slope,) = torch.autograd.grad(out, given, create_graph=True)
        return out + slope.square().sum()


class Checkpointed(TracedModel):
    reentrant: ClassVar[bool] = False

    def build(self) -> None:
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 8)) for _ in range(3)
        )

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        value = batch.clone().requires_grad_()
        for block in self.blocks:
            value = checkpoint(block, value, use_reentrant=self.reentrant)
        return value.square().mean()


class ReentrantCheckpointed(Checkpointed):
    reentrant = True


class Compiled(Mlp):
    def build(self) -> None:
        super().build()
        self.net[3].compile(backend="aot_eager")


class TwoOptimizers(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def build(self) -> None:
        super().build()
        self.other = nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for optimizer, part in zip(self.optimizers(), (self.net, self.other), strict=True):
            loss = part(batch).square().mean()
            self.seen.append(loss.detach().clone())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.net.parameters(), 1e-2), torch.optim.SGD(self.other.parameters(), 1e-2)]


class HalfPrecision(Mlp):
    options: ClassVar[dict[str, Any]] = {"precision": "bf16-mixed"}


class Accumulated(Mlp):
    options: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 3}


MODELS: dict[str, type[TracedModel]] = {
    "MLP": Mlp,
    "CNN with in-place ReLU and BatchNorm": InPlaceCnn,
    "transformer with shared embeddings": SharedEmbeddings,
    "LSTM": Lstm,
    "double backward": GradientPenalty,
    "checkpoint": Checkpointed,
    "reentrant checkpoint": ReentrantCheckpointed,
    "compiled": Compiled,
    "manual optimization with two optimizers": TwoOptimizers,
    "AMP bf16": HalfPrecision,
    "accumulation": Accumulated,
}


def fit(kind: type[TracedModel], directory: Path, *callbacks: pl.Callback, **options: Any) -> Outcome:
    """Train a few steps; give losses, gradients, weights, buffers and the random generator's state."""
    torch.manual_seed(11)
    model = kind()
    trainer(directory, *callbacks, **{**kind.options, **options}).fit(model, loader(STEPS))
    return [*model.seen, *(value.clone() for value in model.state_dict().values()), torch.get_rng_state()]
