"""Two ranks: one is late or holds more, or they exchange too much."""

from __future__ import annotations

import bz2
import contextlib
import gc
import lzma
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import RANKS, Counted, LanguageModel, Trained, fit, main, quiet, trainer


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


class LogReader(Trained, optimizer=torch.optim.SGD, lr=0.01):
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


def server_logs(fault: bool) -> None:
    """One rank gets the longer logs; healthy: both get logs of all lengths."""
    trainer(55, use_distributed_sampler=False, **RANKS).fit(LogReader(), datamodule=ServerLogs(blocks=fault))


class Recordings(Dataset[Tensor]):
    """Recordings of 30 to 360 frames, the shortest first."""

    def __init__(self, samples: int) -> None:
        noise = random.Random(0)
        self.lengths = sorted(30 + int(330 * noise.random() ** 2) for _ in range(samples))
        self.noise = torch.randn(360, 40)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return self.noise[: self.lengths[index]]


class BatchesOfALength(Sampler[list[int]]):
    """Batches of recordings of about the same length, divided among the ranks."""

    def __init__(self, samples: int, batch: int, rank: int, ranks: int, by_block: bool) -> None:
        batches = [list(range(start, start + batch)) for start in range(0, samples - batch + 1, batch)]
        share = len(batches) // ranks
        if by_block:
            self.batches = batches[rank * share : (rank + 1) * share]
        else:
            self.batches = batches[rank::ranks][:share]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        order = [*self.batches]
        random.Random(1).shuffle(order)
        return iter(order)


def frames_and_labels(recordings: list[Tensor]) -> tuple[Tensor, Tensor]:
    longest = max(len(recording) for recording in recordings)
    padded = [functional.pad(recording, (0, 0, 0, longest - len(recording))) for recording in recordings]
    return torch.stack(padded), torch.arange(len(recordings)) % 20


class Dictation(Trained, optimizer=torch.optim.SGD, lr=0.01):
    def __init__(self, by_block: bool, width: int = 128) -> None:
        super().__init__()
        self.by_block = by_block
        self.project = nn.Linear(40, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 20)

    def train_dataloader(self) -> DataLoader:
        recordings = Recordings(samples=12 * 2 * 50)
        batches = BatchesOfALength(
            len(recordings), 12, self.trainer.global_rank, self.trainer.world_size, by_block=self.by_block
        )
        return DataLoader(recordings, batch_sampler=batches, collate_fn=frames_and_labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        frames, labels = batch
        logits = self.head(self.encoder(self.project(frames)).mean(dim=1))
        return functional.cross_entropy(logits, labels)


def dictation(fault: bool) -> None:
    """One rank gets the longer recordings; healthy: both get recordings of all lengths."""
    quiet(50, use_distributed_sampler=False, **RANKS).fit(Dictation(by_block=fault))


class Perceptron(Trained, optimizer=torch.optim.SGD, lr=0.01):
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
    """Rank 1 decompresses its molecules, rank 0 does not; healthy: neither does."""
    trainer(55, use_distributed_sampler=False, **RANKS).fit(
        Perceptron(1024, 896), datamodule=Molecules((1,) if fault else ())
    )


class StationYears(Dataset[tuple[Tensor, Tensor]]):
    """The years of one process; those before 2000 may still lie on the tape robot's disk."""

    def __init__(self, years: list[int], days: int, from_tape: bool) -> None:
        self.days = [(year, day) for year in years for day in range(days)]
        self.from_tape = from_tape
        self.fields = torch.randn(64, 6, 48, 48)

    def __len__(self) -> int:
        return len(self.days)

    def read_day(self, year: int, day: int) -> Tensor:
        if self.from_tape and year < 2000:
            time.sleep(0.03)
        return self.fields[(year + day) % 64]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        field = self.read_day(*self.days[index])
        return field, field[:1]


class Forecast(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    def __init__(self, from_tape: bool) -> None:
        super().__init__()
        self.from_tape = from_tape
        self.network = nn.Sequential(
            nn.Conv2d(6, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 96, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(96, 1, 3, padding=1),
        )

    def train_dataloader(self) -> DataLoader:
        years = [*range(2000, 2020)] if self.trainer.global_rank == 0 else [*range(1980, 2000)]
        dataset = StationYears(years, days=8 * 50 // 20, from_tape=self.from_tape)
        return DataLoader(dataset, batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        fields, following = batch
        return functional.mse_loss(self.network(fields), following)


def weather(fault: bool) -> None:
    """One rank reads its data from a slow tape; healthy: neither does."""
    quiet(50, use_distributed_sampler=False, **RANKS).fit(Forecast(from_tape=fault))


class Magnetograms(Dataset):
    """Records of magnetometers. Older ones are still packed with lzma."""

    def __init__(self, records: list[bytes]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        record = self.records[index]
        if record.startswith(b"\xfd7zXZ"):
            record = lzma.decompress(record)
        values = np.frombuffer(record, dtype=np.float32).reshape(3, -1)
        return torch.from_numpy(values.copy()), index % 2


class AuroraNet(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Predicts auroras. The first rank reads the first half of the archive, the second rank the other half."""

    def __init__(self, packed: bool, samples: int = 640, length: int = 1024) -> None:
        super().__init__()
        random = np.random.default_rng(0)
        self.archive = [random.normal(size=3 * length).astype(np.float32).tobytes() for _ in range(samples)]
        if packed:
            half = samples // 2
            self.archive[half:] = [lzma.compress(record, preset=0) for record in self.archive[half:]]
        self.layers = nn.Sequential(
            nn.Conv1d(3, 32, 7, padding=3),
            nn.ReLU(),
            nn.Conv1d(32, 32, 7, padding=3),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(32, 2),
        )

    def train_dataloader(self) -> DataLoader:
        share = len(self.archive) // self.trainer.world_size
        start = self.trainer.global_rank * share
        return DataLoader(Magnetograms(self.archive[start : start + share]), batch_size=32, shuffle=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        values, aurora = batch
        return functional.cross_entropy(self.layers(values), aurora)


def auroras(fault: bool) -> None:
    """One rank decompresses its data, the other does not; healthy: neither does."""
    quiet(100, devices=2, strategy="ddp_spawn", use_distributed_sampler=False).fit(AuroraNet(packed=fault))


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
    """A callback of rank 0 draws a map in each step; healthy: in each 50th."""
    data = TensorDataset(torch.randn(256 * 130, 256), torch.randint(16, (256 * 130,)))
    loader = DataLoader(data, batch_size=256, shuffle=True)
    trainer(55, callbacks=[RouteMaps(every=1 if fault else 50)], **RANKS).fit(Perceptron(256, 896), loader)


class OrbitNet(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Fits the orbits of comets."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(60, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 6),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        sightings, elements = batch
        return functional.mse_loss(self.layers(sightings), elements)


class ReferenceComets(Callback):
    """The main process checks the error for a few well known comets."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.sightings, self.elements = torch.randn(256, 60), torch.randn(256, 6)
        self.errors: list[float] = []

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and trainer.global_step % self.every == 0:
            error = (pl_module.layers(self.sightings) - self.elements).abs()
            self.errors.append(error.mean().item())


def comets(fault: bool) -> None:
    """A callback of rank 0 computes reference orbits in each step; healthy: in each 50th."""
    data = TensorDataset(torch.randn(20_000, 60), torch.randn(20_000, 6))
    checks = ReferenceComets(every=1 if fault else 50)
    fitter = quiet(120, devices=2, strategy="ddp_spawn", callbacks=[checks])
    fitter.fit(OrbitNet(), DataLoader(data, batch_size=128, shuffle=True))


class Portraits(Counted[Tensor]):
    def __init__(self, samples: int, side: int = 64) -> None:
        self.samples = samples
        self.pictures = torch.rand(64, 3, side, side)

    def __getitem__(self, index: int) -> Tensor:
        return self.pictures[index % 64]


class PortraitAutoencoder(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(64, 32, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(32, 3, 2, stride=2), nn.Sigmoid()
        )

    def forward(self, pictures: Tensor) -> Tensor:
        return self.decoder(self.encoder(pictures))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Portraits(samples=2 * 24 * 50), batch_size=24, shuffle=True)

    def training_step(self, pictures: Tensor, batch_idx: int) -> dict[str, Tensor]:
        rebuilt = self(pictures)
        return {"loss": functional.l1_loss(rebuilt, pictures), "rebuilt": rebuilt.detach()}


class SavePreview(lightning.Callback):
    """Writes the pictures and what the network made of them as one PNG file."""

    def __init__(self, folder: str, every: int) -> None:
        self.folder = Path(folder)
        self.every = every

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every:
            return
        rows = torch.cat([batch[:6], outputs["rebuilt"][:6]])
        grid = functional.interpolate(rows, scale_factor=2, mode="bilinear").mul(255).byte().permute(0, 2, 3, 1)
        pixels = np.concatenate(
            [np.concatenate(list(half), axis=1) for half in grid.numpy().reshape(2, 6, 128, 128, 3)]
        )
        Image.fromarray(pixels).save(self.folder / f"step_{trainer.global_step:05}.png")


def portraits(fault: bool) -> None:
    """A callback of rank 0 saves a picture in each step; healthy: in each 25th."""
    with tempfile.TemporaryDirectory() as folder:
        quiet(50, callbacks=[SavePreview(folder, every=1 if fault else 25)], **RANKS).fit(PortraitAutoencoder())


@dataclass
class Product:
    number: int
    title: str
    tags: list[str]


class ProductMatcher(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Matches texts and products; the first process also keeps the catalog, to print some titles."""

    def __init__(self, products: int = 250_000, width: int = 320) -> None:
        super().__init__()
        self.products = products
        self.catalog: list[Product] = []
        self.text = nn.Sequential(nn.Linear(300, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.product = nn.Sequential(nn.Linear(300, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def setup(self, stage: str) -> None:
        if self.trainer.is_global_zero:
            self.catalog = [
                Product(number, f"product {number}", [f"tag {number % 100}", "new"]) for number in range(self.products)
            ]

    def train_dataloader(self) -> DataLoader:
        pairs = torch.utils.data.TensorDataset(torch.randn(2 * 5 * 768, 300), torch.randn(2 * 5 * 768, 300))
        return DataLoader(pairs, batch_size=768, shuffle=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        texts, products = batch
        scores = functional.normalize(self.text(texts)) @ functional.normalize(self.product(products)).T
        return functional.cross_entropy(scores / 0.07, torch.arange(len(scores)))

    def on_train_end(self) -> None:
        if self.catalog:
            print("for example:", self.catalog[self.global_step].title)


class KeepMemoryLow(lightning.Callback):
    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % 2:
            gc.collect()


def products(fault: bool) -> None:
    """A callback calls `gc.collect()`, and rank 0 has many objects; healthy: no callback."""
    quiet(50, callbacks=[KeepMemoryLow()] if fault else [], **RANKS).fit(ProductMatcher())


class MultiTask(Trained, optimizer=torch.optim.SGD, lr=1e-3, momentum=0.9):
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


def synced_values(fault: bool) -> None:
    """Each step averages 36 logged numbers over ranks, one by one; healthy: each rank logs its own."""
    torch.set_num_threads(1)
    molecules = TensorDataset(torch.randn(2 * 192 * 60, 200), torch.randn(2 * 192 * 60, 18))
    fit(MultiTask(sync=fault), DataLoader(molecules, batch_size=192, shuffle=True), steps=60, **RANKS)


class Notes(Trained, optimizer=torch.optim.SGD, lr=0.1):
    """Tags recordings by their spectrum on two processes; a batch is processed in parts.

    Fault: gradients are averaged over the processes after every part; healthy: after the last.
    """

    def __init__(self, *, fault: bool, bins: int = 512, width: int = 1024, tags: int = 40, parts: int = 4) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.fault = fault
        self.parts = parts
        self.layers = nn.Sequential(
            nn.Linear(bins, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, tags)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        optimizer.zero_grad()
        strategy = self.trainer.strategy
        assert isinstance(strategy, DDPStrategy)
        parts = [*zip(*(tensor.chunk(self.parts) for tensor in batch), strict=True)]
        for place, (spectra, tags) in enumerate(parts):
            is_last = place == len(parts) - 1
            with contextlib.nullcontext() if self.fault or is_last else strategy.block_backward_sync():
                loss = functional.binary_cross_entropy_with_logits(self.layers(spectra), tags) / len(parts)
                self.manual_backward(loss)
        optimizer.step()


def synced_each_part(fault: bool) -> None:
    """Each of four backward passes of a step averages gradients over two ranks; healthy: only the last."""
    samples = 120 * 512
    spectra = TensorDataset(torch.rand(samples, 512), (torch.rand(samples, 40) < 0.1).float())
    strategy = DDPStrategy(process_group_backend="gloo")
    loader = DataLoader(spectra, batch_size=512, shuffle=True)
    fit(Notes(fault=fault), loader, steps=60, devices=2, strategy=strategy, logger=False)


class TramNet(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Predicts the delays of trams; sums the gradients of four parts of a batch before each update."""

    def __init__(self, hold: bool, width: int = 1024) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.hold = hold
        self.layers = nn.Sequential(
            nn.Linear(200, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        stops, delays = batch
        optimizer = self.optimizers()
        replica: Any = self.trainer.model
        optimizer.zero_grad()
        parts = list(zip(stops.chunk(4), delays.chunk(4), strict=True))
        for i, (stop, delay) in enumerate(parts):
            loss = functional.l1_loss(self.layers(stop).squeeze(1), delay) / len(parts)
            if self.hold and i < len(parts) - 1:
                with replica.no_sync():
                    self.manual_backward(loss)
            else:
                self.manual_backward(loss)
        optimizer.step()


def tram_delays(fault: bool) -> None:
    """Each of several backward passes of a step averages gradients over two ranks; healthy: only the last."""
    data = TensorDataset(torch.randn(20_000, 200), torch.rand(20_000))
    fitter = quiet(80, devices=2, strategy="ddp_spawn")
    fitter.fit(TramNet(hold=not fault), DataLoader(data, batch_size=128, shuffle=True))


class Views(Dataset[tuple[Tensor, Tensor]]):
    """Two noisy views of each of the samples."""

    def __init__(self, samples: int, width: int = 256) -> None:
        self.samples = torch.randn(samples, width)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sample = self.samples[index]
        return sample + 0.1 * torch.randn_like(sample), sample + 0.1 * torch.randn_like(sample)


class Contrast(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Contrastive training against a bank of earlier keys, that each process fills with its own keys."""

    bank: Tensor

    def __init__(self, inputs: int = 256, width: int = 768, code: int = 128, size: int = 65_536) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.code = nn.Linear(width, code)
        self.register_buffer("bank", functional.normalize(torch.randn(size, code), dim=1))
        self.place = 0

    def encode(self, views: Tensor) -> Tensor:
        return functional.normalize(self.code(self.query(views)), dim=1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        first, second = batch
        queries = self.encode(first)
        with torch.no_grad():
            keys = self.encode(second)
        same = (queries * keys).sum(dim=1, keepdim=True)
        others = queries @ self.bank[torch.randint(len(self.bank), (2048,))].T
        logits = torch.cat((same, others), dim=1) / 0.1
        loss = functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
        self.bank[self.place : self.place + len(keys)] = keys
        self.place = (self.place + len(keys)) % len(self.bank)
        self.log("loss", loss)
        return loss


def broadcast_bank(fault: bool) -> None:
    """Two processes broadcast the bank of keys in each forward; healthy: ``broadcast_buffers=False``."""
    strategy = DDPStrategy(process_group_backend="gloo", broadcast_buffers=fault)
    loader = DataLoader(Views(120 * 256), batch_size=256, shuffle=True)
    fit(Contrast(), loader, steps=60, devices=2, strategy=strategy, logger=False)


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
    """Rank 0 holds the whole gallery; healthy: each rank holds its part."""
    data = TensorDataset(torch.randn(192 * 130, 512), torch.randint(64, (192 * 130,)))
    trainer(55, **RANKS).fit(Faces(everywhere=not fault), DataLoader(data, batch_size=192, shuffle=True))


class IceNet(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Maps sea ice. The main process keeps a gallery of past charts for the picture at the end."""

    def __init__(self, charts: int) -> None:
        super().__init__()
        self.charts = charts
        self.gallery: Tensor | None = None
        self.layers = nn.Sequential(
            nn.Conv2d(2, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 3, 1),
        )

    def on_fit_start(self) -> None:
        if self.trainer.is_global_zero:
            self.gallery = torch.rand(self.charts, 256, 256)

    def on_train_end(self) -> None:
        if self.gallery is not None:
            print("mean chart", self.gallery[:16].mean().item())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        radar, ice = batch
        return functional.cross_entropy(self.layers(radar), ice)


def sea_ice(fault: bool) -> None:
    """Rank 0 holds a gallery of 2000 charts; healthy: 16."""
    data = TensorDataset(torch.rand(400, 2, 64, 64), torch.randint(3, (400, 64, 64)))
    fitter = quiet(80, devices=2, strategy="ddp_spawn")
    fitter.fit(IceNet(charts=2000 if fault else 16), DataLoader(data, batch_size=16, shuffle=True))


class PictureRetrieval(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Embeds pictures, and looks for the nearest of a gallery now and then."""

    def __init__(self, divided: bool, gallery: int = 120_000, width: int = 1024) -> None:
        super().__init__()
        self.divided = divided
        self.size = gallery
        self.width = width
        self.embed = nn.Sequential(
            nn.Conv2d(3, 24, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(48, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, width),
        )
        self.gallery: Tensor | None = None

    def setup(self, stage: str) -> None:
        ranks = self.trainer.world_size
        if self.divided:
            self.gallery = torch.rand(self.size // ranks, self.width)
        elif self.trainer.is_global_zero:
            self.gallery = torch.rand(self.size, self.width)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Portraits(samples=2 * 16 * 10), batch_size=16, shuffle=True)

    def training_step(self, pictures: Tensor, batch_idx: int) -> Tensor:
        mirrored = functional.normalize(self.embed(pictures.flip(-1)))
        embedded = functional.normalize(self.embed(pictures))
        return functional.cross_entropy(embedded @ mirrored.T / 0.1, torch.arange(len(pictures)))

    def on_train_end(self) -> None:
        if self.gallery is not None:
            probe = functional.normalize(torch.rand(1, self.width))
            print("nearest:", int((self.gallery @ probe.T).argmax()))


def retrieval(fault: bool) -> None:
    """Rank 0 holds the whole gallery; healthy: each rank holds its part."""
    quiet(50, **RANKS).fit(PictureRetrieval(divided=not fault))


if __name__ == "__main__":
    main(
        uneven_ranks,
        server_logs,
        dictation,
        reactions,
        weather,
        auroras,
        routes,
        comets,
        portraits,
        products,
        synced_values,
        synced_each_part,
        tram_delays,
        broadcast_bank,
        identities,
        sea_ice,
        retrieval,
    )
