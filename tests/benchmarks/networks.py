"""What is trained: small models, and data that costs nothing to fetch but where fetching it is the point."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


WIDTH = 64
# 75 blocks of four modules, their container and the network itself: 302 modules, a step of about 18 ms on one core.
BLOCKS = 75
ROWS = 128
WORDS = 512
LENGTH = 64
HEADS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.normalize = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.bend = nn.GELU()

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.bend(self.mix(self.normalize(rows)))


class Network(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))

    def forward(self, rows: Tensor) -> Tensor:
        return self.blocks(rows)


class Trained(LightningModule):
    """What all have: an optimizer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Regression(Trained):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.network = Network(blocks)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.network(batch), batch.flip(0))


class Attention(nn.Module):
    """A block of a GPT: attention to what came before, and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.bend = nn.GELU()
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, rows: Tensor) -> Tensor:
        count, length, width = rows.shape
        split = self.attend(self.before(rows)).view(count, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        rows = rows + self.join(seen.transpose(1, 2).reshape(count, length, width))
        return rows + self.narrow(self.bend(self.widen(self.between(rows))))


class Language(Trained):
    """A GPT of four blocks: 34 modules."""

    def __init__(self, width: int = 128, blocks: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Attention(width) for _ in range(blocks)))
        self.after = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rows = self.words(batch[:, :-1]) + self.places.weight
        found = self.head(self.after(self.blocks(rows)))
        return nn.functional.cross_entropy(found.flatten(0, 1), batch[:, 1:].flatten())


class Pictures(Trained):
    """A convolutional network of eight layers on pictures that worker processes prepare."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = [3, width, width, 2 * width, 2 * width]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(before, after, 3, 1 + number % 2, 1), nn.BatchNorm2d(after), nn.ReLU())
                for number, (before, after) in enumerate(itertools.pairwise(sizes))
            )
        )
        self.head = nn.Linear(2 * width, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pictures, kinds = batch
        return nn.functional.cross_entropy(self.head(self.layers(pictures).mean((2, 3))), kinds)


class Batches(Dataset[Tensor]):
    """A few ready batches over and over: fetching one costs nothing."""

    def __init__(self, count: int, rows: int) -> None:
        self._count = count
        generator = torch.Generator().manual_seed(0)
        self._ready = [torch.randn(rows, WIDTH, generator=generator) for _ in range(4)]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        return self._ready[index % len(self._ready)]


class Sentences(Batches):
    """Ready batches of words."""

    def __init__(self, count: int, rows: int) -> None:
        super().__init__(count, rows)
        generator = torch.Generator().manual_seed(0)
        self._ready = [torch.randint(WORDS, (rows, LENGTH + 1), generator=generator) for _ in range(4)]


class Album(Dataset[tuple[Tensor, int]]):
    """Pictures, each with noise that is drawn when it is fetched."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pictures = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._pictures[index % 16] + 0.1 * torch.randn(3, 32, 32), index % 10


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        says: what it is, in a few words.
        model: the module's class.
        arguments: of the model.
        loader: given how many batches, gives their loader.
        ranks: processes that train together.
        rounds: how often each configuration is fitted; 1 with ``--quick``.

    """

    says: str
    model: type[LightningModule]
    arguments: tuple[Any, ...]
    loader: Callable[[int], DataLoader[Any]]
    ranks: int = 1
    rounds: int = 2


def workloads() -> Mapping[str, Workload]:
    """Give all by name."""
    return {
        "network": Workload("302 small modules", Regression, (BLOCKS,), _batches(ROWS), rounds=4),
        "small": Workload("one block on one row", Regression, (1,), _batches(1)),
        "gpt": Workload(
            "a small GPT", Language, (), lambda count: DataLoader(Sentences(count, 4), batch_size=None)
        ),
        "cnn": Workload("a convolutional network, two DataLoader workers", Pictures, (), _album),
        "ddp": Workload("302 small modules, DDP on two ranks (gloo)", Regression, (BLOCKS,), _batches(ROWS), ranks=2),
    }  # fmt: skip


def _batches(rows: int) -> Callable[[int], DataLoader[Any]]:
    return lambda count: DataLoader(Batches(count, rows), batch_size=None)


def _album(count: int) -> DataLoader[Any]:
    size = 16
    # What trains was spawned, and would spawn its workers, which import torch for seconds.
    return DataLoader(
        Album(count * size), size, num_workers=2, multiprocessing_context="fork", worker_init_fn=_on_any_core
    )


def _on_any_core(_worker: int) -> None:
    # What trains keeps to one core; its workers would take the time that is measured.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
