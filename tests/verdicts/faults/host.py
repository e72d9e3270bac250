"""Faults around the model's computation: Python, Lightning, callbacks, optimizers."""

from __future__ import annotations

import json
import sys
from collections import deque
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
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


if __name__ == "__main__":
    main(
        {
            "anomaly_detection": anomaly_detection,
            "live_objects": live_objects,
            "metric_each_step": metric_each_step,
            "rewriting_logger": rewriting_logger,
            "slow_hook": slow_hook,
            "frequent_validation": frequent_validation,
            "second_profiler": second_profiler,
            "looping_optimizer": looping_optimizer,
        }
    )
