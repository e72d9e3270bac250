"""Batches that fail where they are told to; a spawned worker loads this module, so it loads torch alone."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset, get_worker_info


class StrikeError(RuntimeError):
    """The program's own exception."""


class Batches(Dataset[torch.Tensor]):
    """Reproducible batches of 4 rows of 8 numbers; ``fails`` is the one that cannot be loaded."""

    def __init__(self, count: int, fails: int | None = None) -> None:
        self._batches = torch.randn(count, 4, 8, generator=torch.Generator().manual_seed(7))
        self._fails = fails

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self._fails and get_worker_info() is not None:
            raise StrikeError(f"batch {index} cannot be loaded")
        return self._batches[index]
