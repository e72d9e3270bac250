"""Faults around the model's computation: Python, Lightning, callbacks, optimizers."""

from __future__ import annotations

import copy
import gc
import json
import math
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAUROC

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import BATCH, STEPS, WIDTH, Classifier, Vectors, fit, main


def loader(batch: int = BATCH) -> DataLoader:
    return DataLoader(Vectors(STEPS, batch), batch_size=batch)


class Deep(Classifier):
    """Many layers, so many operators for autograd."""

    def __init__(self) -> None:
        super().__init__(width=192, depth=16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :192])


def anomaly_detection(fault: bool) -> None:
    """Anomaly detection stays on after debugging; healthy: it is off."""
    fit(Deep(), loader(128), detect_anomaly=fault)


class Replay(lightning.Callback):
    """Keeps the latest predictions for error analysis: as Python objects, or as arrays."""

    def __init__(self, objects: bool) -> None:
        self.objects = objects
        self.recent: deque[Any] = deque(maxlen=24)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        features, labels = batch
        if not self.objects:
            self.recent.append((features.numpy().copy(), labels.numpy().copy()))
            return
        rows = features[:, :200].tolist()
        self.recent.append(
            [
                {"label": label, "parts": [[at, value] for at, value in enumerate(row)]}
                for label, row in zip(labels.tolist(), rows, strict=True)
            ]
        )


def live_objects(fault: bool) -> None:
    """A buffer of a million small lists makes Python's collector slow; healthy: a buffer of arrays."""
    fit(Classifier(), loader(), callbacks=[Replay(objects=fault)])


class Ranked(Classifier):
    """Computes the area under the ROC curve of everything seen so far: at each step, or each 50."""

    def __init__(self, every: int) -> None:
        super().__init__(classes=40)
        self.every = every
        self.auroc = MulticlassAUROC(num_classes=40, thresholds=None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        logits = self(features)
        self.auroc.update(logits.detach().softmax(-1), labels)
        if batch_idx % self.every == self.every - 1:
            self.log("auroc", self.auroc.compute())
        return functional.cross_entropy(logits, labels)


def metric_each_step(fault: bool) -> None:
    """A metric over all predictions is computed at each step; healthy: each 50 steps."""
    fit(Ranked(every=1 if fault else 50), loader())


class JsonLogger(Logger):
    """Keeps all metrics in one JSON file: rewritten at each call, or one line appended."""

    def __init__(self, rewrite: bool) -> None:
        super().__init__()
        self.rewrite = rewrite
        self.path = Path("metrics.json")
        # A resumed training has a history.
        self.rows = [{"step": step, "loss": 1.0 / (step + 1), "accuracy": step / 2e4} for step in range(8000)]

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({"step": step or 0, **metrics})
        if self.rewrite:
            self.path.write_text(json.dumps(self.rows))
        else:
            with self.path.open("a") as lines:
                lines.write(json.dumps(self.rows[-1]) + "\n")


def rewriting_logger(fault: bool) -> None:
    """The logger writes its whole history again at each call; healthy: it appends."""
    fit(Classifier(depth=2), loader(), logger=JsonLogger(rewrite=fault), log_every_n_steps=1)


def histogram(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """A forward hook that someone added to look at activations."""
    counts, _ = np.histogram(output.detach().numpy(), bins=100)
    module.spread = int((counts > 0).sum())  # type: ignore[assignment]  # a module takes any attribute


def slow_hook(fault: bool) -> None:
    """A forward hook of each layer computes a histogram; healthy: no hook."""
    model = Classifier()
    for module in model.blocks.modules() if fault else ():
        module.register_forward_hook(histogram)
    fit(model, loader())


class Validated(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, labels = batch
        self.log("val_loss", functional.cross_entropy(self(features), labels))


def frequent_validation(fault: bool) -> None:
    """Five batches are validated after each 4 steps; healthy: after the 60 of an epoch."""
    validation = DataLoader(Vectors(5), batch_size=BATCH)
    fit(Validated(), loader(), validation, val_check_interval=4 if fault else STEPS)


class SelfProfiled(Deep):
    """A torch profiler that was left in the training step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.profiler.profile(record_shapes=True) as profiler:
            loss = super().training_step(batch, batch_idx)
        self.log("operators", float(len(profiler.key_averages())))
        return loss


def second_profiler(fault: bool) -> None:
    """The training step runs inside the user's own torch profiler; healthy: it does not."""
    fit(SelfProfiled() if fault else Deep(), loader(128))


class Ensemble(Classifier):
    """Hundreds of small experts, so thousands of small parameters."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(1500))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.stack(list(self.scales)).mean(0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=False, fused=self.fused)


def looping_optimizer(fault: bool) -> None:
    """AdamW updates 1500 small parameters in a Python loop; healthy: in one fused call."""
    fit(Ensemble(fused=not fault), loader())


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
        anomaly_detection,
        live_objects,
        metric_each_step,
        rewriting_logger,
        slow_hook,
        frequent_validation,
        second_profiler,
        looping_optimizer,
        many_threads,
        forced_collection,
        scalar_loop,
        log_volume,
        slow_callback,
        copied_average,
        frequent_checkpoints,
        tiny_operators,
        dense_embedding,
    )
