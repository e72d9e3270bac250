"""What the GPU scripts share: sizes per machine, batches that are ready in pinned memory, and the Trainer's options."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

GPU: Final = torch.cuda.is_available()
OPTIONS: Final[dict[str, Any]] = {"accelerator": "auto", "devices": 1, "precision": "bf16-mixed"}
T = TypeVar("T")


def sized(gpu: T, cpu: T) -> T:
    """Give a size for the GPU, or a tiny one where a training is only tried on the CPU."""
    return gpu if GPU else cpu


def pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if GPU else tensor


class Ready(Dataset[Any]):
    """Batches in pinned memory, repeated until ``length``: each tensor has the shape batches x batch x ..."""

    def __init__(self, length: int, *tensors: Tensor) -> None:
        self.length = length
        self.tensors = tuple(pinned(tensor) for tensor in tensors)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index >= self.length:
            raise IndexError(index)
        parts = tuple(tensor[index % len(tensor)] for tensor in self.tensors)
        return parts if len(parts) > 1 else parts[0]


def ready_loader(length: int, *tensors: Tensor) -> DataLoader[Any]:
    """Load batches that are ready: no collating, no copying, and so no workers."""
    return DataLoader(Ready(length, *tensors), batch_size=None, shuffle=False)
