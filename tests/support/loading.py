"""Data sets whose fetches have a closed form, in a module that the workers of every start method can import."""

from __future__ import annotations

import faulthandler
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

MS = 1_000_000
# Milliseconds per sample; `batched` takes 6 per batch.
DECODE, FLIP, SCALE, READ, OWN = 8, 2, 3, 2, 1


class Decode:
    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        time.sleep(DECODE / 1000)
        return sample


class Flip(torch.nn.Module):
    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        time.sleep(FLIP / 1000)
        return sample


def scaled(sample: torch.Tensor, by: float) -> torch.Tensor:
    time.sleep(SCALE / 1000)
    return sample * by


class Chain:
    def __init__(self, *transforms: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.transforms = list(transforms)

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


def read(index: int) -> torch.Tensor:
    time.sleep(READ / 1000)
    return torch.tensor([float(index), 0.0])


class Images(Dataset[torch.Tensor]):
    def __init__(self, length: int = 1000) -> None:
        self.samples = list(range(length))
        self.transform = Chain(Decode(), Flip(), partial(scaled, by=1.0))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(OWN / 1000)
        return self.transform(read(index))


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.options = {"transform": Decode()}

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.length):
            yield self.options["transform"](read(index))


def batched(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    time.sleep(6 / 1000)
    return torch.stack(list(samples))


class Waiting(Dataset[torch.Tensor]):
    """Each sample waits for an event; ``is_deaf`` removes the handlers of real-time signals."""

    def __init__(self, event: Any, *, is_deaf: bool = False) -> None:
        self.event = event
        self.is_deaf = is_deaf

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if self.is_deaf else ():
            faulthandler.unregister(number)
        self.event.wait(60)  # waits
        return torch.tensor(float(index))
