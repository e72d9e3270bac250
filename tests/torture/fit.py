"""The training of a cell: a small fit with validation in which a fault can strike at every place."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import data
import fault
import lightning.pytorch as pl
import moments
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset

from lightning_memprof import Collector, ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import (
    AllocatorStats,
    FunctionMemory,
    GarbageCollection,
    HookTimings,
    HostMemory,
    ModuleMemory,
    OOMAutopsy,
    OperatorTrace,
    Pulse,
    SavedTensors,
    SystemStats,
    Throughput,
)
from training import Perceptron

if TYPE_CHECKING:
    from lightning_memprof import Mark, RunContext
    from lightning_memprof.collectors import Window


SLOW_SECONDS = 0.3


class Struck(Perceptron):
    """A small network; the cell's fault can strike in each of its steps."""

    def __init__(self, cell: fault.Cell | None) -> None:
        super().__init__()
        self.cell = cell
        self.step = -1

    def here(self, place: fault.Place) -> None:
        cell = self.cell
        if cell is not None and cell.fault.place == place and self.step == cell.moment.step:
            cell.strike()

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.step = batch_idx

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.here("training_step")
        return self.loss(batch)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)
        self.here("backward")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.here("optimizer")

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.loss(batch)
        self.here("validation")


class Striking(pl.Callback):
    """The user's callback, in front of ours: the fault strikes in its hooks; writes down what became of each step."""

    def __init__(self, cell: fault.Cell) -> None:
        self.cell = cell
        self._trail = os.open(
            cell.directory / f"trail.rank{cell.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        )

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        cell = self.cell
        # Of the bare twin whose batches a worker loads, which has no cell; else `Fetched` does it.
        in_saving = not cell.ours and cell.fault.place == fault.ANYWHERE and cell.moment.name == "save"
        if in_saving and cell.fault.workers is not None and batch_idx == cell.moment.step:
            cell.strike()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        cell = self.cell
        # One unbuffered write: it must be there when the next line of the program kills the process.
        os.write(self._trail, (json.dumps([batch_idx, digest(pl_module)]) + "\n").encode())
        between = cell.fault.place == fault.ANYWHERE and cell.moment.window is None
        if (cell.fault.place == "callback" or between) and batch_idx == cell.moment.step:
            cell.strike()

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        cell = self.cell
        late = cell.fault.place == "callback" or (cell.fault.place == fault.ANYWHERE and not cell.ours)
        if cell.moment.step is None and late:
            cell.strike()

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if self.cell.fault.place == "teardown":
            self.cell.strike()

    def close(self) -> None:
        os.close(self._trail)


class Fetched(data.Batches):
    """Lets the bare twin's fault strike where ours strikes in the saving of a window: as its next batch is fetched."""

    def __init__(self, cell: fault.Cell) -> None:
        super().__init__(moments.STEPS)
        self._cell = cell

    def __getitem__(self, index: int) -> torch.Tensor:
        cell = self._cell
        in_saving = index == cell.moment.step and cell.moment.name == "save"
        if in_saving and cell.fault.place == fault.ANYWHERE and not cell.ours:
            cell.strike()
        return super().__getitem__(index)


class Saving(Collector):
    """Is left first when a window closes: keeps the writer busy, and lets the fault strike in the saving itself."""

    name: ClassVar[str] = "saving"

    def __init__(self, cell: fault.Cell) -> None:
        self._cell = cell

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[Any]:
        with run.sink.series(window, self.name) as write:

            def on_mark(mark: Mark) -> None:
                write(mark, window=window.index)

            try:
                yield on_mark
            finally:
                if window.index == self._cell.moment.window:
                    run.sink.in_background(partial(time.sleep, SLOW_SECONDS))
                    if self._cell.fault.place == fault.ANYWHERE:
                        self._cell.strike()


def digest(model: torch.nn.Module) -> str:
    """Give one text for the weights and the state of the random generator."""
    made = hashlib.sha256()
    for value in model.state_dict().values():
        made.update(value.numpy().tobytes())
    made.update(torch.get_rng_state().numpy().tobytes())
    return made.hexdigest()[:16]


def fit(cell: fault.Cell) -> pl.LightningModule:
    """Run the cell's fit; what it raises is the cell's outcome."""
    model = Struck(cell)
    striking = Striking(cell)
    cell.notes["model"] = model
    try:
        trainer = pl.Trainer(**_options(cell, cell.log_dir), callbacks=[striking, *_ours(cell)])
        trainer.fit(model, _loader(cell), DataLoader(data.Batches(1), batch_size=None))
    finally:
        striking.close()
    return model


def next_fit(cell: fault.Cell) -> str:
    """Train again in this process, alone; give what became of the weights."""
    directory = cell.directory / f"next.rank{cell.rank}"
    torch.manual_seed(5)
    model = Struck(None)
    callbacks: list[pl.Callback] = []
    profiler = None
    if cell.ours:
        schedule = Schedule(wait=1, warmup=1, active=1, repeat=1)
        callbacks.append(MemProfilerCallback(schedule, output=OutputOptions(summary=False, report=False)))
        profiler = ExtendedPyTorchProfiler()
    options = _quiet() | {"devices": 1, "logger": CSVLogger(directory, name="", version="log"), "profiler": profiler}
    pl.Trainer(**options, callbacks=callbacks).fit(model, DataLoader(data.Batches(5), batch_size=None))
    return digest(model)


def _options(cell: fault.Cell, log_dir: Any) -> dict[str, Any]:
    options = _quiet() | {
        "devices": cell.world,
        "logger": CSVLogger(log_dir.parent, name="", version=log_dir.name),
        "val_check_interval": 1,
        "limit_val_batches": 1,
        "profiler": ExtendedPyTorchProfiler() if cell.ours else None,
    }
    return options | ({"strategy": DDPStrategy(process_group_backend="gloo")} if cell.world > 1 else {})


def _quiet() -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "log_every_n_steps": 1,
    }


def _ours(cell: fault.Cell) -> list[pl.Callback]:
    if not cell.ours:
        return []
    # The last one named is left first.
    collectors = [
        Pulse(), HostMemory(), AllocatorStats(), HookTimings(), FunctionMemory(), SavedTensors(), OOMAutopsy(),
        SystemStats(), GarbageCollection(), Throughput(), ModuleMemory(),
        OperatorTrace(profile_memory=True),
        *cell.fault.collectors(cell), Saving(cell),
    ]  # fmt: skip
    available = [
        collector for collector in collectors if collector.name != AllocatorStats.name or torch.cuda.is_available()
    ]
    schedule = Schedule(wait=moments.WAIT, warmup=moments.WARMUP, active=moments.ACTIVE, repeat=0)
    arguments = {"output": OutputOptions(summary=False, report=False)} | dict(cell.fault.arguments(cell))
    return [MemProfilerCallback(schedule, available, **arguments)]


def _loader(cell: fault.Cell) -> DataLoader[torch.Tensor]:
    if cell.fault.workers is None:
        return DataLoader(Fetched(cell), batch_size=None)
    # A worker process has no cell: which batch it cannot load is told beforehand.
    fails = cell.moment.step if cell.fault.place == "loader" and cell.is_victim else None
    batches: Dataset[torch.Tensor] = data.Batches(moments.STEPS, fails)
    return DataLoader(batches, batch_size=None, num_workers=1, multiprocessing_context=cell.fault.workers)
