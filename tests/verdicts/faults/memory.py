"""Faults that cost memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import BATCH, STEPS, WIDTH, Classifier, LanguageModel, Tokens, Vectors, fit, main


class WeightHistory(lightning.Callback):
    """Follows the weights of the first layer: all of them at each step, or their mean."""

    def __init__(self, complete: bool) -> None:
        self.complete = complete
        self.history: list[np.ndarray] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        weights = pl_module.blocks[0].expand.weight.detach().numpy()
        self.history.append(weights.copy() if self.complete else weights.mean())


def host_growth(fault: bool) -> None:
    """A callback keeps 4 MiB of weights per step in a list; healthy: one number."""
    fit(Classifier(), DataLoader(Vectors(), batch_size=BATCH), callbacks=[WeightHistory(complete=fault)])


class Evaluated(Classifier):
    """Compares the hidden features of all validation batches at the end: complete, or as a mean per batch."""

    def __init__(self, complete: bool) -> None:
        super().__init__()
        self.complete = complete
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.blocks[0].get_submodule("expand")(batch[0])
        self.outputs.append(hidden if self.complete else hidden.mean(0, keepdim=True))

    def on_validation_epoch_end(self) -> None:
        self.log("feature_mean", torch.cat(self.outputs).mean())
        self.outputs.clear()


def validation_outputs(fault: bool) -> None:
    """Validation keeps 2 MiB of features per batch until its end; healthy: their mean."""
    training, validation = DataLoader(Vectors(), batch_size=BATCH), DataLoader(Vectors(60), batch_size=BATCH)
    fit(Evaluated(complete=fault), training, validation, val_check_interval=30)


class LongContext(LanguageModel):
    """A language model over 512 tokens that may recompute its layers in backward."""

    def __init__(self, recompute: bool) -> None:
        super().__init__(layers=16, width=64)
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.recompute else layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def activations(fault: bool) -> None:
    """Sixteen layers save the activations of long sequences; healthy: activation checkpointing."""
    fit(LongContext(recompute=not fault), DataLoader(Tokens(STEPS * 4, 513), batch_size=4), steps=40)


class Remembering(Vectors):
    """Vectors that a worker process prepares: it keeps each of them for later, or not."""

    def __init__(self, remember: bool) -> None:
        super().__init__()
        self.remember = remember
        self.prepared: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        features, label = super().__getitem__(index)
        prepared = features.repeat(16).sqrt()
        if self.remember:
            self.prepared[index] = prepared
        return prepared[: len(features)].nan_to_num(), label


def caching_workers(fault: bool) -> None:
    """A worker process keeps each sample, 8 MiB per batch; healthy: it keeps none."""
    loader = DataLoader(Remembering(fault), batch_size=BATCH, num_workers=1, persistent_workers=True)
    fit(Classifier(), loader)


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


class Comparing(lightning.LightningModule):
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
    fit(Comparing(retain=fault), DataLoader(Vectors(40, 800), batch_size=800), steps=40)


if __name__ == "__main__":
    main(
        host_growth,
        validation_outputs,
        activations,
        caching_workers,
        tensor_leak,
        worker_cache,
        optimizer_state,
        retained_graph,
    )
