"""Faults that cost memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import BATCH, WIDTH, Classifier, Vectors, fit, main


class Recorded(Classifier):
    """Keeps the results of all steps for a summary: with their graphs, or as numbers."""

    def __init__(self, complete: bool) -> None:
        super().__init__(classes=4000)
        self.complete = complete
        self.results: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        logits = self(features)
        loss = functional.cross_entropy(logits, labels)
        self.results.append({"loss": loss, "logits": logits} if self.complete else {"loss": loss.item()})
        return loss


def tensor_leak(fault: bool) -> None:
    """The module keeps the loss and the logits of each step; healthy: a number."""
    fit(Recorded(complete=fault), DataLoader(Vectors(), batch_size=BATCH))


class CachedVectors(Vectors):
    """Adds noise to a sample when it is read and caches the result, although no index comes twice."""

    def __init__(self, cache: bool) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] | None = {} if cache else None

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        features, label = super().__getitem__(index)
        augmented = features.repeat(8) + 0.01 * torch.randn(8 * WIDTH)
        if self.cache is not None:
            self.cache[index] = augmented
        return augmented.view(8, WIDTH).mean(0), label


def worker_cache(fault: bool) -> None:
    """Each worker's copy of the data set grows by 4 MiB per batch; healthy: no cache."""
    torch.set_num_threads(1)
    loader = DataLoader(CachedVectors(cache=fault), batch_size=BATCH, num_workers=2, persistent_workers=True)
    fit(Classifier(), loader)


class Wide(Classifier):
    """25 million parameters and an optimizer with or without state."""

    def __init__(self, state: bool) -> None:
        super().__init__(width=1024, depth=3)
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x, x], dim=1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.state:
            return torch.optim.Adam(self.parameters(), lr=1e-4, fused=True)
        return torch.optim.SGD(self.parameters(), lr=0.01, fused=True)


def optimizer_state(fault: bool) -> None:
    """Adam's state takes twice as much as the parameters; healthy: SGD has none."""
    fit(Wide(state=fault), DataLoader(Vectors(batch=64), batch_size=64), steps=50)


class Remembering(lightning.LightningModule):
    """Compares a loss with the one before: the tensor with its graph, or a number."""

    def __init__(self, retain: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.retain = retain
        self.network = Classifier(width=128, depth=8)
        self.previous: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        features, labels = batch
        optimizer = self.optimizers()
        loss = functional.cross_entropy(self.network(features.view(-1, 128)), labels.repeat_interleave(4))
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=self.retain)
        optimizer.step()
        if self.previous is not None:
            self.log("improvement", float(self.previous) - float(loss))
        self.previous = loss if self.retain else float(loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def retained_graph(fault: bool) -> None:
    """`retain_graph=True` and the loss on the module keep a step's activations during the next; healthy: neither."""
    fit(Remembering(retain=fault), DataLoader(Vectors(40, 800), batch_size=800), steps=40)


if __name__ == "__main__":
    main(
        {
            "tensor_leak": tensor_leak,
            "worker_cache": worker_cache,
            "optimizer_state": optimizer_state,
            "retained_graph": retained_graph,
        }
    )
