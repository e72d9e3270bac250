"""Faults around the model's computation: Python, Lightning, callbacks, optimizers."""

from __future__ import annotations

import copy
import gc
import math
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import BATCH, STEPS, WIDTH, Classifier, Vectors, fit, main


def loader(batch: int = BATCH) -> DataLoader:
    return DataLoader(Vectors(STEPS, batch), batch_size=batch)


def many_threads(fault: bool) -> None:
    """Operators use 32 threads on few cores; healthy: torch's default."""
    if fault:
        torch.set_num_threads(32)
    fit(Classifier(), loader())


class Collecting(Classifier):
    """Calls Python's collector after each batch, against a leak that was once suspected."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        gc.collect()


def forced_collection(fault: bool) -> None:
    """Each step ends with a full garbage collection; healthy: it does not."""
    fit(Collecting() if fault else Classifier(), loader())


class Checked(Classifier):
    """Looks for invalid features: number by number, or with one operator."""

    def __init__(self, loop: bool) -> None:
        super().__init__(depth=2)
        self.loop = loop

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        if self.is_invalid(features) if self.loop else not torch.isfinite(features).all():
            raise ValueError(f"batch {batch_idx} is invalid")
        return functional.cross_entropy(self(features), labels)

    def is_invalid(self, features: Tensor) -> bool:
        return not all(math.isfinite(value.item()) for value in features[:, ::8].flatten())


def scalar_loop(fault: bool) -> None:
    """16,384 `.item()` calls per step; healthy: one operator."""
    fit(Checked(loop=fault), loader())


class Verbose(Classifier):
    """Logs the mean of each feature, or of all."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.each = each

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        means = batch[0].mean(0)
        if self.each:
            for index, mean in enumerate(means[:300]):
                self.log(f"feature_{index}", mean)
        else:
            self.log("features", means.mean())
        return super().training_step(batch, batch_idx)


def log_volume(fault: bool) -> None:
    """300 calls of `self.log` per step; healthy: 2."""
    fit(Verbose(each=fault), loader())


class Heartbeat(lightning.Callback):
    """Reports to a slow server after each batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.04)


def slow_callback(fault: bool) -> None:
    """A callback waits 40 ms per step; healthy: it is not there."""
    fit(Classifier(), loader(), callbacks=[Heartbeat()] if fault else [])


class AverageWeights(lightning.Callback):
    """An exponential average of the weights, from a copy of the whole model after each `every` batches."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.every:
            return
        state = copy.deepcopy(pl_module.state_dict())
        self.average = {name: 0.99 * self.average.get(name, value) + 0.01 * value for name, value in state.items()}


def copied_average(fault: bool) -> None:
    """The model is copied and averaged at each step; healthy: each 30 steps."""
    model = Classifier(width=WIDTH, depth=4)
    fit(model, loader(128), callbacks=[AverageWeights(every=1 if fault else 30)])


def frequent_checkpoints(fault: bool) -> None:
    """A checkpoint is written after each 2 steps; healthy: after each 50."""
    saving = ModelCheckpoint(dirpath="checkpoints", every_n_train_steps=2 if fault else 50)
    fit(Classifier(depth=4), loader(128), callbacks=[saving], enable_checkpointing=True)


class Smoothed(Classifier):
    """Smooths the features of a sample, one after another or with one matrix."""

    def __init__(self, loop: bool) -> None:
        super().__init__(depth=1)
        self.loop = loop
        self.rate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.one_by_one(x) if self.loop else self.at_once(x))

    def one_by_one(self, x: Tensor) -> Tensor:
        running = x[:, 0]
        columns = [running]
        for index in range(1, WIDTH):
            running = (1 - self.rate) * running + self.rate * x[:, index]
            columns.append(running)
        return torch.stack(columns, dim=1)

    def at_once(self, x: Tensor) -> Tensor:
        distance = torch.arange(WIDTH).unsqueeze(0) - torch.arange(WIDTH).unsqueeze(1)
        weights = self.rate * (1 - self.rate) ** distance.clamp(min=0)
        return x @ weights.triu()


def tiny_operators(fault: bool) -> None:
    """A loop of thousands of operators over 64 numbers; healthy: one matrix product."""
    fit(Smoothed(loop=fault), loader(64))


class Recommender(lightning.LightningModule):
    """A table of 150,000 items, of which a batch reads 1024."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.sparse = sparse
        self.items = nn.EmbeddingBag(150_000, 64, mode="sum", sparse=sparse)
        self.project = nn.Linear(64, WIDTH)
        self.ranker = Classifier()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        features, labels = batch
        numbers = (features[:, :4].abs() * 40_000).long() % 150_000
        loss = functional.cross_entropy(self.ranker(features + self.project(self.items(numbers))), labels)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        adam = torch.optim.SparseAdam if self.sparse else torch.optim.Adam
        rest = [*self.project.parameters(), *self.ranker.parameters()]
        return [adam(list(self.items.parameters()), lr=1e-3), torch.optim.SGD(rest, lr=0.01)]


def dense_embedding(fault: bool) -> None:
    """Adam updates the whole table at each step; healthy: sparse gradients and SparseAdam."""
    fit(Recommender(sparse=not fault), loader(), steps=2 * 45)


if __name__ == "__main__":
    main(
        {
            "many_threads": many_threads,
            "forced_collection": forced_collection,
            "scalar_loop": scalar_loop,
            "log_volume": log_volume,
            "slow_callback": slow_callback,
            "copied_average": copied_average,
            "frequent_checkpoints": frequent_checkpoints,
            "tiny_operators": tiny_operators,
            "dense_embedding": dense_embedding,
        }
    )
