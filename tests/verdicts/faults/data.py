"""Faults of the input pipeline."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import BATCH, CLASSES, STEPS, WIDTH, Classifier, LanguageModel, Vectors, fit, main


class CompressedVectors(Dataset[tuple[Tensor, int]]):
    """Vectors that are decompressed and standardized whenever they are read."""

    def __init__(self, samples: int) -> None:
        numbers = np.random.default_rng(0)
        raw = numbers.integers(0, 8, (256, WIDTH * 320), dtype=np.uint8)
        self.blobs = [zlib.compress(row.tobytes()) for row in raw]
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = np.frombuffer(zlib.decompress(self.blobs[index % 256]), dtype=np.uint8)
        scaled = pixels.reshape(WIDTH, 320).astype(np.float32).mean(axis=1)
        standardized = (scaled - scaled.mean()) / (scaled.std() + 1e-6)
        return torch.from_numpy(standardized), index % CLASSES


def slow_decode(fault: bool) -> None:
    """Each sample is decompressed in each epoch; healthy: once, before the training."""
    dataset: Dataset = CompressedVectors(STEPS * BATCH)
    torch.set_num_threads(1)  # the other core decodes
    if not fault:
        samples = [dataset[index] for index in range(256)]
        dataset = torch.utils.data.ConcatDataset([samples] * STEPS)  # type: ignore[list-item]  # a list is a dataset
    fit(Classifier(), DataLoader(dataset, batch_size=BATCH, num_workers=1, persistent_workers=True))


class StoredVectors(Vectors):
    """Vectors on a network disk: a read waits and takes hardly any CPU."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.0001)
        return super().__getitem__(index)


def no_workers(fault: bool) -> None:
    """Reads happen between steps; healthy: in workers, during steps."""
    workers: dict[str, Any] = {} if fault else {"num_workers": 1, "persistent_workers": True}
    fit(Classifier(), DataLoader(StoredVectors(), batch_size=BATCH, **workers))


def restarted_workers(fault: bool) -> None:
    """Epochs of 5 batches, each with new worker processes; healthy: the workers persist."""
    torch.set_num_threads(1)
    loader = DataLoader(Vectors(5), batch_size=BATCH, num_workers=2, persistent_workers=not fault)
    fit(Classifier(depth=2), loader, steps=80)


def padding(fault: bool) -> None:
    """Each sequence is padded to 96 tokens, most have less than 50; healthy: padded to the longest of its batch."""
    numbers = np.random.default_rng(0)
    lengths = np.sort(np.clip(numbers.exponential(40, STEPS * 32), 8, 96).astype(int))
    batches = numbers.permutation(STEPS)
    texts = [torch.randint(1, 1000, (int(length),)) for length in lengths]

    def pad(samples: list[Tensor]) -> Tensor:
        longest = 96 if fault else max(map(len, samples))
        return torch.stack([torch.nn.functional.pad(text, (0, longest - len(text))) for text in samples])

    sampler = [list(range(32 * int(batch), 32 * int(batch) + 32)) for batch in batches]
    fit(LanguageModel(), DataLoader(texts, batch_sampler=sampler, collate_fn=pad))  # type: ignore[arg-type]  # a list


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
    """16 workers read the whole epoch ahead and take the CPU from the training; healthy: 1 worker."""
    torch.set_num_threads(1)
    workers = 16 if fault else 1
    loader = DataLoader(Compressed(500 * BATCH), batch_size=BATCH, num_workers=workers, prefetch_factor=32)
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
    main(slow_decode, no_workers, restarted_workers, padding, slow_collate, many_workers, slow_shard)
