"""Small real trainings, healthy or with one fault, and what the rules say of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from msgspec.structs import replace
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.account.ledger.run import run_ledger
from lightning_memprof.account.memory.allocations import run_allocations
from lightning_memprof.account.parts import Part
from lightning_memprof.collectors import GarbageCollection, HookTimings, Pulse
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.view import run_view
from training import only_run, trainer

if TYPE_CHECKING:
    from pathlib import Path

    from lightning_memprof.account.ledger.model import TimeLedger, TimeLine
    from lightning_memprof.capture.base import Collector
    from lightning_memprof.judge import Finding


STEP_SECONDS = 0.015
# Whose sleep stands for the work of a step: that it waits is true, and no fault of the training that a test is about.
WORK = "Steady.training_step"


class Samples(Dataset[torch.Tensor]):
    """Batches of noise; each takes ``seconds`` to load."""

    def __init__(self, count: int, *, width: int = 8, seconds: float = 0.0) -> None:
        self._batches = torch.ones(4, width)
        self._count = count
        self._seconds = seconds

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self._count:
            raise IndexError(index)
        if self._seconds:
            time.sleep(self._seconds)
        return self._batches


class Steady(pl.LightningModule):
    """A step of 15 ms, however busy the machine is: most of its forward is a sleep."""

    seconds = STEP_SECONDS

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(self.seconds)
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        time.sleep(self.seconds)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


@dataclass
class Training:
    """One training: what is not said is healthy. ``collectors`` are the cheap ones; None is the default set."""

    model: pl.LightningModule = field(default_factory=Steady)
    steps: int = 24
    data: Dataset[torch.Tensor] | None = None
    validation: Dataset[torch.Tensor] | None = None
    callbacks: tuple[pl.Callback, ...] = ()
    schedule: Schedule = field(default_factory=lambda: Schedule(wait=7, warmup=1, active=2))
    options: dict[str, Any] = field(default_factory=dict)
    collectors: list[Collector] | None = field(default_factory=lambda: [Pulse(), HookTimings(), GarbageCollection()])


def with_free_cores(*run: Any) -> TimeLedger | None:
    """Return the ledger of a run without its waits for a core: what other processes take is not the training's.

    For ``monkeypatch.setattr(facts, "run_ledger", with_free_cores)``.
    """
    ledger = run_ledger(*run)
    if ledger is None:
        return None
    of_training = 1 - ledger.share(Part.CORE_WAIT)

    def running(line: TimeLine) -> TimeLine:
        # With cores, calls of what only computes are alike.
        computes = line.part in {Part.COMPILE, Part.GC_PAUSES} and line.count
        return replace(line, longest_ns=round(line.ns / line.count)) if computes else line

    return replace(
        ledger,
        step_ns=ledger.step_ns * of_training,
        median_ns=ledger.median_ns * of_training,
        lines=tuple(running(line) for line in ledger.lines if line.part != Part.CORE_WAIT),
    )


def findings_of(directory: Path, training: Training | None = None, stage: str = "fit") -> dict[str, Finding]:
    """Run a training and return what its run directory shows, by rule, the verdict's first."""
    training = training or Training()
    ours = MemProfilerCallback(
        schedule=training.schedule, collectors=training.collectors, output=OutputOptions(summary=False)
    )
    made = trainer(directory, ours, *training.callbacks, **training.options)
    loaders = [DataLoader(training.data or Samples(training.steps), batch_size=None)]
    if training.validation is not None:
        loaders.append(DataLoader(training.validation, batch_size=None))
    getattr(made, stage)(training.model, *loaders)
    return findings_of_run(only_run(directory))


def findings_of_run(directory: Path) -> dict[str, Finding]:
    """Return what a run directory shows, by rule, the verdict's first."""
    run = load_run(directory)
    view = run_view(run, run_allocations(run))
    assert not view.run.errors
    return {finding.rule: finding for finding in view.findings}
