"""Faults of the input pipeline."""

from __future__ import annotations

import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

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
    torch.set_num_threads(1)  # the other core reads
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


if __name__ == "__main__":
    main(
        {
            "slow_decode": slow_decode,
            "no_workers": no_workers,
            "restarted_workers": restarted_workers,
            "padding": padding,
        }
    )
