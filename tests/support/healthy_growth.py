"""Twenty healthy trainings whose memory grows for a while: warm-up, caches that fill up, bounded buffers, averages."""

from __future__ import annotations

import copy
import functools
import heapq
import queue
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import CatMetric


class Samples(Dataset[torch.Tensor]):
    """Noise of one shape."""

    def __init__(self, *shape: int, samples: int) -> None:
        self.shape, self.samples = shape, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(self.shape)


class Trained(pl.LightningModule):
    """A model with its optimizer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Network(Trained):
    """A perceptron of about 1 MiB, over vectors of 256."""

    def __init__(self, hidden: int = 512) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, hidden), nn.ReLU(), nn.Linear(hidden, 256))

    def output(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(batch)
        return found

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        output = self.output(batch)
        self.keep(batch, output.detach(), batch_idx)
        return nn.functional.mse_loss(output, batch)

    def keep(self, batch: torch.Tensor, output: torch.Tensor, step: int) -> None:
        """Keep something of a step for a while."""


class Replay(Network):
    """A replay memory that is full after two thirds of the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=120)

    def keep(self, batch: torch.Tensor, output: torch.Tensor, step: int) -> None:
        self.memory.append((batch, output))


class FixedReplay(Network):
    """A replay memory in one array, allocated at once and filled bit by bit."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = np.empty((60_000, 256), np.float32)
        self.at = 0

    def keep(self, batch: torch.Tensor, output: torch.Tensor, step: int) -> None:
        rows = np.arange(self.at, self.at + len(output)) % len(self.memory)
        self.memory[rows] = output.numpy()
        self.at += len(output)


class Cached(Samples):
    """Decodes each sample once."""

    def __init__(self, *shape: int, samples: int) -> None:
        super().__init__(*shape, samples=samples)
        self.decoded: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.decoded:
            self.decoded[index] = super().__getitem__(index)
        return self.decoded[index]


class Masked(Network):
    """A mask for each length in a bounded cache."""

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def mask(length: int) -> torch.Tensor:
        return torch.ones(1024, 512).tril(length)

    def keep(self, batch: torch.Tensor, output: torch.Tensor, step: int) -> None:
        self.mask(step % 96)


class Lengths(Network):
    """A table for each length, of which there are 48."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, torch.Tensor] = {}
        self.random = random.Random(3)

    def keep(self, batch: torch.Tensor, output: torch.Tensor, step: int) -> None:
        length = self.random.randrange(48)
        if length not in self.tables:
            self.tables[length] = torch.randn(512, 512 + length)


class EvictingCache(Network):
    """An ordered dictionary that drops its oldest entries."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: OrderedDict[int, torch.Tensor] = OrderedDict()

    def keep(self, batch: torch.Tensor, output: torch.Tensor, step: int) -> None:
        self.recent[step] = output.clone()
        while len(self.recent) > 50:
            self.recent.popitem(last=False)


class Average(pl.Callback):
    """An exponential moving average of the weights."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.weights = {name: value.clone() for name, value in module.state_dict().items()}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *rest: Any) -> None:
        for name, value in module.state_dict().items():
            self.weights[name].lerp_(value, 0.01)


class Ensemble(pl.Callback):
    """The weights of the last three epochs."""

    def __init__(self) -> None:
        self.members: deque[dict[str, Any]] = deque(maxlen=3)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.members.append(copy.deepcopy(module.state_dict()))


class Outputs(Network):
    """Collects the outputs of an epoch, as Lightning 2 documents it."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []

    def keep(self, batch: torch.Tensor, output: torch.Tensor, step: int) -> None:
        self.outputs.append(output)

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.cat(self.outputs).mean())
        self.outputs.clear()


class Measured(Network):
    """A metric that Lightning resets at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.values = CatMetric()

    def keep(self, batch: torch.Tensor, output: torch.Tensor, step: int) -> None:
        self.values.update(output)

    def on_train_epoch_end(self) -> None:
        self.log("largest", self.values.compute().max())
        self.values.reset()


class Recurrent(Trained):
    """Truncated backpropagation through time: the state is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, 32)
        self.state: Any = None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        states, state = self.lstm(batch[:, :-1], self.state)
        self.state = tuple(part.detach() for part in state)
        return nn.functional.mse_loss(self.head(states), batch[:, 1:])


class Ragged(IterableDataset[torch.Tensor]):
    """Batches of random lengths, or of lengths that rise to a limit as in a curriculum."""

    def __init__(self, *, rises: bool, batches: int = 200) -> None:
        self.rises, self.batches = rises, batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        lengths = random.Random(5)
        for step in range(self.batches):
            length = min(16 + step, 128) if self.rises else lengths.randrange(16, 256)
            yield torch.rand(16, length, 32)


class Mapped(Dataset[torch.Tensor]):
    """Rows of a mapped file."""

    def __init__(self, path: Path, samples: int) -> None:
        np.lib.format.open_memmap(path, "w+", np.float32, (samples, 4096)).flush()
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.rows[index, :256] + self.rows[index, -256:])


class Unfrozen(Network):
    """A layer more is trained every 20 steps: gradients and states of the optimizer come one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))
        self.ends = nn.ModuleList([nn.Linear(256, 1024), nn.Linear(1024, 256)])
        self.layers.requires_grad_(False)

    def output(self, batch: torch.Tensor) -> torch.Tensor:
        if self.global_step % 20 == 10 and self.global_step < 120:
            self.layers[-1 - self.global_step // 20].requires_grad_(True)
        hidden = self.ends[0](batch)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        found: torch.Tensor = self.ends[1](hidden)
        return found


class Hardest(Network):
    """The 60 batches with the largest loss."""

    def __init__(self) -> None:
        super().__init__()
        self.heap: list[tuple[float, int, torch.Tensor]] = []

    def keep(self, batch: torch.Tensor, output: torch.Tensor, step: int) -> None:
        entry = float((output - batch).square().mean()), self.global_step, batch
        if len(self.heap) < 60:
            heapq.heappush(self.heap, entry)
        else:
            heapq.heappushpop(self.heap, entry)


class Vocabulary(Network):
    """Words get a number when they are first seen; nearly all are known after the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, int] = {}
        self.random = random.Random(9)

    def keep(self, batch: torch.Tensor, output: torch.Tensor, step: int) -> None:
        for _ in range(20_000):
            self.numbers.setdefault(f"word {self.random.randrange(400_000)}", len(self.numbers))


class Adversarial(Trained):
    """A GAN with a pool of 50 earlier images for its discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        self.discriminator = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
        self.pool: list[torch.Tensor] = []

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 1e-4) for part in (self.generator, self.discriminator)]

    def pooled(self, images: torch.Tensor) -> torch.Tensor:
        if len(self.pool) < 50:
            self.pool.append(images)
            return images
        number = random.randrange(50)
        earlier, self.pool[number] = self.pool[number], images
        return earlier

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        made = self.generator(batch)
        losses = (
            -self.discriminator(made).mean(),
            self.discriminator(self.pooled(made.detach())).mean() - self.discriminator(batch).mean(),
        )
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss, inputs=optimizer.param_groups[0]["params"])
            optimizer.step()


class Prefetched(IterableDataset[torch.Tensor]):
    """A thread that reads ahead by up to 64 batches."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        ahead: queue.Queue[torch.Tensor] = queue.Queue(64)

        def read() -> None:
            for _ in range(220):
                ahead.put(torch.rand(512, 256))

        threading.Thread(target=read, daemon=True).start()
        for _ in range(200):
            yield ahead.get()


class Validated(Network):
    """Validates, logs numbers and keeps them, and has checkpoints of its best three epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def keep(self, batch: torch.Tensor, output: torch.Tensor, step: int) -> None:
        self.losses.append(float(output.mean()))
        self.log_dict({f"mean of {number}": output[number].mean() for number in range(10)})

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", nn.functional.mse_loss(self.output(batch), batch))

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Samples(256, samples=4096), 512)


class Positions(Recurrent):
    """A table of positions that is made anew when a longer batch comes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(0, 32)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch.shape[1] > len(self.table):
            self.table = torch.randn(2 * batch.shape[1], 32)
        self.state = None
        return super().training_step(batch + self.table[: batch.shape[1]], batch_idx)


@dataclass(frozen=True)
class Healthy:
    """A model, its data, and options of the Trainer; ``data`` and ``options`` get an empty directory."""

    model: Callable[[], Trained]
    data: Callable[[Path], DataLoader[torch.Tensor]] = field(
        default=lambda directory: DataLoader(Samples(256, samples=200 * 512), 512)
    )
    options: Callable[[Path], dict[str, Any]] = field(default=lambda directory: {})


def ragged(*, rises: bool) -> Callable[[Path], DataLoader[torch.Tensor]]:
    """Return a loader of batches of different lengths."""
    return lambda directory: DataLoader(Ragged(rises=rises), batch_size=None)


def cached(directory: Path) -> DataLoader[torch.Tensor]:
    """Return a loader whose data set keeps 100 MiB after its first epoch."""
    return DataLoader(Cached(256, samples=100 * 1024), 1024, shuffle=True)


def epochs(number: int, *callbacks: pl.Callback, **options: Any) -> Callable[[Path], dict[str, Any]]:
    """Return options for short epochs."""
    limits = {"max_epochs": number, "limit_train_batches": 240 // number}
    return lambda directory: limits | {"callbacks": list(callbacks)} | options


HEALTHY: Final = {
    "bounded deque": Healthy(Replay),
    "preallocated buffer": Healthy(FixedReplay),
    "cache of the data set": Healthy(Network, cached, epochs(3, limit_train_batches=100)),
    "lru_cache with maxsize": Healthy(Masked),
    "cache by length": Healthy(Lengths),
    "cache that evicts": Healthy(EvictingCache),
    "EMA of the weights": Healthy(lambda: Network(4096), options=epochs(1, Average())),
    "ensemble of three epochs": Healthy(lambda: Network(4096), options=epochs(6, Ensemble())),
    "outputs of an epoch": Healthy(Outputs, options=epochs(4)),
    "metric reset by epoch": Healthy(Measured, options=epochs(4)),
    "truncated BPTT": Healthy(Recurrent, lambda directory: DataLoader(Samples(64, 32, samples=3200), 16)),
    "batches of random lengths": Healthy(Positions, ragged(rises=False)),
    "curriculum of lengths": Healthy(Positions, ragged(rises=True)),
    "mapped file": Healthy(Network, lambda directory: DataLoader(Mapped(directory / "rows.npy", 12_800), 64)),
    "unfreezing layers": Healthy(Unfrozen),
    "heap of the hardest": Healthy(Hardest),
    "vocabulary": Healthy(Vocabulary, options=epochs(3)),
    "image pool of a GAN": Healthy(Adversarial),
    "queue that reads ahead": Healthy(Network, lambda directory: DataLoader(Prefetched(), batch_size=None)),
    "validation and checkpoints": Healthy(
        Validated, options=epochs(4, ModelCheckpoint(monitor="loss", save_top_k=3), accumulate_grad_batches=2)
    ),
}
