"""Faults of two ranks, which are processes of this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import LanguageModel, fit, main

RANKS: dict[str, Any] = {"devices": 2, "strategy": "ddp"}


class MultiTask(lightning.LightningModule):
    """A shared trunk and a head for each of 18 properties of a molecule, with a loss and an error of each."""

    def __init__(self, sync: bool, tasks: int = 18) -> None:
        super().__init__()
        self.sync = sync
        self.trunk = nn.Sequential(
            nn.Linear(200, 512), nn.SiLU(), nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 512), nn.SiLU()
        )
        self.heads = nn.Linear(512, tasks)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        fingerprints, properties = batch
        errors = self.heads(self.trunk(fingerprints)) - properties
        losses = functional.smooth_l1_loss(errors, torch.zeros_like(errors), reduction="none").mean(0)
        for task, (loss, error) in enumerate(zip(losses, errors.detach().abs().mean(0), strict=True)):
            self.log(f"train/loss_{task}", loss, sync_dist=self.sync)
            self.log(f"train/error_{task}", error, sync_dist=self.sync)
        return losses.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def synced_values(fault: bool) -> None:
    """Each step averages 36 logged numbers over ranks, one by one; healthy: each rank logs its own."""
    torch.set_num_threads(1)
    molecules = TensorDataset(torch.randn(2 * 192 * 60, 200), torch.randn(2 * 192 * 60, 18))
    fit(MultiTask(sync=fault), DataLoader(molecules, batch_size=192, shuffle=True), steps=60, **RANKS)


class Corpus(lightning.LightningDataModule):
    """Texts that are sorted by their lengths, so that those of a batch need little padding. Each rank reads a part."""

    def __init__(self, halves: bool) -> None:
        super().__init__()
        self.halves = halves

    def setup(self, stage: str) -> None:
        numbers = np.random.default_rng(0)
        lengths = np.sort(numbers.gamma(6, 8, 2 * 24 * 60).astype(int).clip(12, 110))
        self.texts = [torch.from_numpy(numbers.integers(1, 1000, length)) for length in lengths]

    def train_dataloader(self) -> DataLoader:
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        share = len(self.texts) // ranks
        part = self.texts[rank * share : (rank + 1) * share] if self.halves else self.texts[rank::ranks]
        batches = [list(range(start, start + 24)) for start in range(0, share, 24)]
        order = np.random.default_rng(1).permutation(len(batches))
        sampler = [batches[batch] for batch in order]
        return DataLoader(part, batch_sampler=sampler, collate_fn=self.pad)  # type: ignore[arg-type]  # a list

    @staticmethod
    def pad(texts: list[Tensor]) -> Tensor:
        return pad_sequence(texts, batch_first=True)


def uneven_ranks(fault: bool) -> None:
    """Rank 0 reads the shorter half of the texts, rank 1 the longer; healthy: they take turns."""
    torch.set_num_threads(1)
    options = {"use_distributed_sampler": False, **RANKS}
    fit(LanguageModel(), Corpus(halves=fault), steps=60, **options)  # type: ignore[arg-type]  # a data module


if __name__ == "__main__":
    main(synced_values, uneven_ranks)
