"""Two processes train together: molecules, logs, routes and faces."""

from __future__ import annotations

import bz2
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main, trainer


def fit(module: lightning.LightningModule, data: Any, steps: int, **options: Any) -> None:
    ranks = trainer(steps, devices=2, strategy="ddp", **options)
    if isinstance(data, lightning.LightningDataModule):
        ranks.fit(module, datamodule=data)
    else:
        ranks.fit(module, data)


class Perceptron(lightning.LightningModule):
    def __init__(self, inputs: int, width: int = 640, outputs: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(inputs, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, outputs),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


# --- molecules: each process reads its own archive ---


class Archive(Dataset):
    """Fingerprints of molecules, packed or plain."""

    def __init__(self, molecules: int, packed: bool) -> None:
        rng = np.random.default_rng(1)
        rows = rng.integers(0, 2, (200, 8000), dtype=np.uint8)
        self.rows = [bz2.compress(row.tobytes()) if packed else row.tobytes() for row in rows]
        self.packed = packed
        self.molecules = molecules

    def __len__(self) -> int:
        return self.molecules

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        record = self.rows[index % len(self.rows)]
        if self.packed:
            record = bz2.decompress(record)
        return torch.from_numpy(np.frombuffer(record, dtype=np.uint8)[:1024].astype(np.float32)), index % 16


class Molecules(lightning.LightningDataModule):
    def __init__(self, packed_archives: tuple[int, ...]) -> None:
        super().__init__()
        self.packed_archives = packed_archives

    def train_dataloader(self) -> DataLoader:
        archive = Archive(60 * 192, packed=self.trainer.global_rank in self.packed_archives)
        return DataLoader(archive, batch_size=192, shuffle=True)


def reactions(fault: bool) -> None:
    fit(Perceptron(1024, 896), Molecules((1,) if fault else ()), 55, use_distributed_sampler=False)


# --- logs of servers, of different lengths ---


class Logs(Dataset):
    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(16, 161, (samples,), generator=generator).sort().values
        self.lines = [torch.randint(1, 500, (int(length),), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Tensor:
        return self.lines[index]


class Buckets(Sampler[list[int]]):
    """Batches of neighbours, for one of ``world`` processes."""

    def __init__(self, size: int, batch: int, rank: int, world: int, blocks: bool) -> None:
        batches = [list(range(start, start + batch)) for start in range(0, size - batch + 1, batch)]
        share = math.floor(len(batches) / world)
        self.batches = batches[rank * share : (rank + 1) * share] if blocks else batches[rank::world][:share]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for index in torch.randperm(len(self.batches), generator=torch.Generator().manual_seed(5)).tolist():
            yield self.batches[index]


class ServerLogs(lightning.LightningDataModule):
    def __init__(self, blocks: bool) -> None:
        super().__init__()
        self.blocks = blocks

    def train_dataloader(self) -> DataLoader:
        logs = Logs(16 * 116)
        buckets = Buckets(len(logs), 16, self.trainer.global_rank, self.trainer.world_size, self.blocks)
        return DataLoader(logs, batch_sampler=buckets, collate_fn=self.collate)

    @staticmethod
    def collate(lines: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(lines, batch_first=True)


class LogReader(lightning.LightningModule):
    def __init__(self, width: int = 160) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, width, padding_idx=0)
        self.mix = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(3)
        )
        self.head = nn.Linear(width, 500)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.embedding(batch[:, :-1])
        for layer in self.mix:
            hidden = hidden + layer(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def server_logs(fault: bool) -> None:
    fit(LogReader(), ServerLogs(blocks=fault), 55, use_distributed_sampler=False)


# --- routes, drawn on the way ---


class RouteMaps(lightning.Callback):
    """Draws predicted routes on a map."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.canvas = np.zeros((256, 256), dtype=np.float32)

    def draw(self, points: np.ndarray) -> None:
        grid = np.stack(np.meshgrid(np.arange(256), np.arange(256)), axis=-1).astype(np.float32)
        for point in points:
            self.canvas += np.exp(-((grid - point) ** 2).sum(axis=-1) / 20)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and batch_idx % self.every == 0:
            self.draw(batch[0][:24, :2].numpy() * 40 + 128)


def routes(fault: bool) -> None:
    data = TensorDataset(torch.randn(256 * 130, 256), torch.randint(16, (256 * 130,)))
    loader = DataLoader(data, batch_size=256, shuffle=True)
    fit(Perceptron(256, 896), loader, 55, callbacks=[RouteMaps(every=1 if fault else 50)])


# --- faces, compared with a gallery at the end ---


class Faces(Perceptron):
    def __init__(self, everywhere: bool) -> None:
        super().__init__(512, outputs=64)
        self.everywhere = everywhere
        self.gallery = torch.empty(0, 512)

    def on_fit_start(self) -> None:
        people = 160_000
        if self.everywhere:
            self.gallery = torch.rand(people // self.trainer.world_size, 512)
        elif self.trainer.is_global_zero:
            self.gallery = torch.rand(people, 512)

    def on_train_end(self) -> None:
        if len(self.gallery):
            with torch.no_grad():
                self.print("mean of the gallery", float(self.net(self.gallery[:512]).mean()))


def identities(fault: bool) -> None:
    data = TensorDataset(torch.randn(192 * 130, 512), torch.randint(64, (192 * 130,)))
    fit(Faces(everywhere=not fault), DataLoader(data, batch_size=192, shuffle=True), 55)


if __name__ == "__main__":
    main(reactions, server_logs, routes, identities)
