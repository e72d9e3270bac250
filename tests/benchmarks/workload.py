"""What is trained, and the clock that every fit is measured with."""

from __future__ import annotations

import gc
import itertools
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_memprof.artifacts.manifest import read_manifest

WIDTH = 64
# 75 blocks of four modules, their container and the network itself: 302 modules, a step of about 18 ms on one core.
BLOCKS = 75
ROWS = 128


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


class Regression(LightningModule):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.network = Network(blocks)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.network(batch), batch.flip(0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


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


class Clock(Callback):
    """Reads the clocks at the start of each batch, ahead of every other callback.

    From one reading to the next lies one whole turn of the loop, with all that callbacks and profilers do in it. What
    happens between two readings of one batch is left out.

    Args:
        pause: called between the two readings.
        every: batches from one pause to the next.

    """

    def __init__(self, pause: Callable[[], None], every: int) -> None:
        self._pause = pause
        self._every = every
        self._batches = 0
        # Pairs: the end of one turn and, after the pause, the start of the next.
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def read(self) -> None:
        self.cpu.append(time.process_time())
        self.wall.append(time.perf_counter())

    def on_train_batch_start(self, *args: Any) -> None:
        self.read()
        if self._batches % self._every == 0:
            self._pause()
        self._batches += 1
        self.read()


@dataclass(frozen=True)
class Times:
    """Seconds of one fit on one clock.

    Attributes:
        start: from the call of ``fit`` to the first batch.
        steps: from the start of each batch to the start of the next.
        end: from the start of the last batch to the return of ``fit``.
        paused: in pauses; on the clock of the CPU that is the work of other threads.

    """

    start: float
    steps: list[float]
    end: float
    paused: float

    @classmethod
    def of(cls, readings: list[float]) -> Times:
        spans = [after - before for before, after in itertools.pairwise(readings)]
        first, *steps, last = spans[::2]
        return cls(first, steps, last, sum(spans[1::2]))

    @property
    def fit(self) -> float:
        return self.start + sum(self.steps) + self.end


@dataclass(frozen=True)
class Fit:
    """One fit.

    Attributes:
        name: its configuration.
        cpu: CPU time of this process, all threads.
        wall: wall time.
        children: seconds of CPU time of processes that the fit started and waited for.
        size_bytes: what it left on disk.
        pulse_us: microseconds a step that the manifest says the pulse took; None without a manifest.

    """

    name: str
    cpu: Times
    wall: Times
    children: float
    size_bytes: int
    pulse_us: float | None

    @property
    def all_cpu(self) -> float:
        """CPU time of the whole fit, every thread and process of it."""
        return self.cpu.fit + self.cpu.paused + self.children


@dataclass(frozen=True)
class Job:
    """What to fit.

    Attributes:
        name: of the configuration.
        steps: optimizer steps.
        turn: steps from one pause to the next.
        small: train one block on one row, where Lightning's own loop is nearly all that a step costs.

    """

    name: str
    steps: int
    turn: int = 1
    small: bool = False


def fit(job: Job, configure: Callable[[Path], dict[str, Any]], pause: Callable[[], None]) -> Fit:
    """Train once under a configuration, measure, and delete what the fit wrote.

    Args:
        job: what to fit.
        configure: given a directory to write to, returns arguments of the Trainer.
        pause: called between steps; its time does not count.

    """
    torch.manual_seed(0)
    model = Regression(1 if job.small else BLOCKS)
    loader = DataLoader(Batches(job.steps + 2, 1 if job.small else ROWS), batch_size=None)
    with tempfile.TemporaryDirectory(prefix="memprof-bench-") as created:
        directory = Path(created)
        clock = Clock(pause, job.turn)
        arguments = configure(directory)
        callbacks = [clock, *arguments.pop("callbacks", [])]
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=job.steps,
            logger=False,
            default_root_dir=directory,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
            **arguments,
        )
        gc.collect()
        children = _children()
        clock.read()
        trainer.fit(model, loader)
        clock.read()
        return Fit(
            job.name,
            Times.of(clock.cpu),
            Times.of(clock.wall),
            _children() - children,
            sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
            _pulse_us(directory),
        )


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _pulse_us(directory: Path) -> float | None:
    for path in directory.glob("memprofiler/manifest.*.jsonl"):
        for row in read_manifest(path).rows:
            if row["kind"] == "end" and row["steps"]:
                return row["overhead"]["pulse_ns"] / row["steps"] / 1000
    return None
