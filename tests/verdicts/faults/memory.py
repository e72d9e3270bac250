"""Faults that cost memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import BATCH, STEPS, Classifier, LanguageModel, Tokens, Vectors, fit, main


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


if __name__ == "__main__":
    main(
        {
            "host_growth": host_growth,
            "validation_outputs": validation_outputs,
            "activations": activations,
            "caching_workers": caching_workers,
        }
    )
