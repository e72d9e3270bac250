"""Faults of the input pipeline."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import BATCH, CLASSES, WIDTH, Classifier, Vectors, fit, main


def assemble(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Make a batch number by number."""
    rows = [[min(max(value, -3.0), 3.0) for value in features.tolist()] for features, _ in samples]
    return torch.tensor(rows), torch.tensor([label for _, label in samples])


def stack(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Make a batch with one operation per tensor."""
    features = torch.stack([features for features, _ in samples]).clamp_(-3.0, 3.0)
    return features, torch.tensor([label for _, label in samples])


def slow_collate(fault: bool) -> None:
    """The collate function visits each number in Python; healthy: it stacks tensors."""
    fit(Classifier(), DataLoader(Vectors(), batch_size=BATCH, collate_fn=assemble if fault else stack))


class Compressed(Dataset[tuple[Tensor, int]]):
    """Vectors that are decompressed when they are read: moderate work."""

    def __init__(self, samples: int) -> None:
        raw = np.random.default_rng(0).integers(0, 8, (256, WIDTH * 64), dtype=np.uint8)
        self.blobs = [zlib.compress(row.tobytes()) for row in raw]
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = np.frombuffer(zlib.decompress(self.blobs[index % 256]), dtype=np.uint8)
        return torch.from_numpy(pixels.reshape(WIDTH, 64).astype(np.float32).mean(axis=1)), index % CLASSES


def many_workers(fault: bool) -> None:
    """16 workers read ahead and take the CPU from the training; healthy: 1 worker."""
    torch.set_num_threads(1)
    workers = 16 if fault else 1
    loader = DataLoader(Compressed(500 * BATCH), batch_size=BATCH, num_workers=workers, prefetch_factor=8)
    fit(Classifier(), loader, steps=45)


class Shards(IterableDataset[tuple[Tensor, int]]):
    """Vectors in shards of 8 batches; a remote shard takes a while to open."""

    def __init__(self, remote: bool) -> None:
        self.remote = remote
        self.samples = Vectors(8)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        while True:
            self.open_shard()
            for index in range(len(self.samples)):
                yield self.samples[index]

    def open_shard(self) -> None:
        if self.remote:
            time.sleep(0.4)


def slow_shard(fault: bool) -> None:
    """Each 8th batch waits for its shard; healthy: shards are in memory."""
    fit(Classifier(), DataLoader(Shards(remote=fault), batch_size=BATCH))


if __name__ == "__main__":
    main({"slow_collate": slow_collate, "many_workers": many_workers, "slow_shard": slow_shard})
