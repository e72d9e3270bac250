"""The process of one run of a trial: the user's program, whose first ``fit`` is changed, measured and ended.

``python -m lightning_memprof.trial.program SCRIPT ARGS...``, with the task in the environment.
"""

from __future__ import annotations

import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, NoReturn

import lightning.fabric.strategies.launchers.subprocess_script as fabric_launcher
import lightning.pytorch.strategies.launchers.subprocess_script as launcher
import msgspec
import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops import fit_loop
from lightning.pytorch.profilers import PassThroughProfiler
from torch.utils.data import DataLoader

from lightning_memprof.analysis.trial import Measured
from lightning_memprof.capture.observe import Link, wrapped
from lightning_memprof.estimation.program import run_program
from lightning_memprof.integration.callback import AttachedCallback, MemProfilerCallback
from lightning_memprof.trial.meter import Meter, end, lift_limits
from lightning_memprof.trial.remedies import RefusedError, parse_remedy
from lightning_memprof.trial.task import VARIABLE, Task

__all__ = ["main"]

_SEED: Final = 20_251
# Of a recorded run: its steps may take minutes each.
_MOST_RECORDED_S: Final = 60.0
_FEWEST_RECORDED: Final = 12


def main() -> None:
    """Run the program of the command line up to the end of the task."""
    task = msgspec.json.decode(os.environ[VARIABLE], type=Task)
    # `python -m` put the working directory there; the program gets what its own start would give it.
    del sys.path[0]
    _seed(_SEED)
    with _prepared(task):
        run_program(sys.argv[1:])
    end(task, Measured(problem="the program ended without Trainer.fit of lightning.pytorch"))


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 the generator that programs use
    torch.manual_seed(seed)


@contextmanager
def _prepared(task: Task) -> Iterator[None]:
    """Change the first ``fit`` of the program, and the processes that Lightning starts for other ranks."""
    remedies = [parse_remedy(name) for name in task.remedies]

    def fit(link: Link) -> Callable[..., NoReturn]:
        def reached(trainer: Trainer, model: LightningModule, *given: Any, **named: Any) -> NoReturn:
            _redirect(trainer, task.directory)
            if task.is_recorded:
                trainer.callbacks.append(_Stop(task.steps))  # type: ignore[attr-defined]  # set by a connector
                link.call(trainer, model, *given, **named)
                end(task, Measured(steps=task.steps))
            meter = Meter(task, remedies)
            trainer.callbacks.append(meter)  # type: ignore[attr-defined]  # as above
            try:
                for remedy in remedies:
                    if task.is_check:
                        remedy.make_comparable()
                    remedy.on_fit(trainer, model)
                with ExitStack() as changed:
                    changed.enter_context(
                        wrapped(fit_loop, "_process_dataloader", _changed(task, trainer, meter, changed))
                    )
                    link.call(trainer, model, *given, **named)
            except RefusedError as error:
                end(task, Measured(problem=str(error)))
            meter.ended()

        return reached

    with ExitStack() as undo:
        undo.enter_context(wrapped(Trainer, "fit", fit))
        for module in (launcher, fabric_launcher):
            undo.enter_context(wrapped(module, "_basic_subprocess_cmd", lambda _: _rank_command))
        yield


def _rank_command() -> Sequence[str]:
    """Return the command of another rank: this process's own."""
    return [sys.executable, "-m", "lightning_memprof.trial.program", *sys.argv]


def _changed(task: Task, trainer: Trainer, meter: Meter, undo: ExitStack) -> Callable[[Link], Callable[..., Any]]:
    """Return a wrapper of Lightning's function that prepares a training DataLoader."""

    def wrap(link: Link) -> Callable[..., Any]:
        def process(*given: Any, **named: Any) -> Any:
            loader = link.call(*given, **named)
            if not isinstance(loader, DataLoader):
                return loader
            if task.is_check:
                _make_repeatable(trainer, loader, undo)
            meter.loader(loader)
            return loader

        return process

    return wrap


def _make_repeatable(trainer: Trainer, loader: DataLoader[Any], undo: ExitStack) -> None:
    """Let the order of each epoch and each sample be the same, however many workers read them."""
    loader.generator = loader.generator or torch.Generator().manual_seed(_SEED)
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if getattr(sampler, "generator", loader) is None:
            vars(sampler)["generator"] = torch.Generator()
        if isinstance(getattr(sampler, "generator", None), torch.Generator):
            undo.enter_context(wrapped(type(sampler), "__iter__", partial(_ordered, trainer)))
    kind = type(loader.dataset)
    for name in ("__getitem__", "__getitems__"):
        if hasattr(kind, name):
            undo.enter_context(wrapped(kind, name, _seeded))


def _ordered(trainer: Trainer, link: Link) -> Callable[..., Any]:
    """Seed a sampler in each epoch: whether it is read to its end, and draws once more, depends on the workers."""

    def iterate(sampler: Any) -> Any:
        sampler.generator.manual_seed(_SEED + trainer.current_epoch)
        return link.call(sampler)

    return iterate


def _seeded(link: Link) -> Callable[..., Any]:
    def get(dataset: Any, key: Any) -> Any:
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 as in _seed
        seed = zlib.crc32(repr(key).encode())
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 as above
        # Of the CPU alone: workers have no device.
        torch.default_generator.manual_seed(seed)
        try:
            return link.call(dataset, key)
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002 as above
            torch.set_rng_state(before[2])

    return get


def _redirect(trainer: Trainer, directory: str) -> None:
    """Let the Trainer, its loggers and callbacks write into a directory, and nowhere else."""
    vars(trainer)["_default_root_dir"] = directory
    trainer.loggers = [_redirected(logger, directory) for logger in trainer.loggers]
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    own = (MemProfilerCallback,)
    callbacks[:] = [found for found in callbacks if not isinstance(found, own) or isinstance(found, AttachedCallback)]
    for callback in callbacks:
        if getattr(callback, "dirpath", None) is not None:
            callback.dirpath = directory
    if not os.environ.get("LIGHTNING_MEMPROF"):
        trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]  # set by a connector


def _redirected(logger: Any, directory: str) -> Any:
    """Return the logger writing into a directory; one that can write elsewhere is replaced by one that does not."""
    if not isinstance(logger, TensorBoardLogger | CSVLogger):
        return DummyLogger()
    vars(logger).update({"_root_dir": directory, "_save_dir": directory})
    return logger


class _Stop(Callback):
    """Ends a recorded fit after a number of steps, or a minute, without a last validation."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._seen = 0
        self._began = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 Lightning's
        lift_limits(trainer)
        trainer.fit_loop.min_epochs = None
        trainer.fit_loop.epoch_loop.min_steps = None
        self._began = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._seen += 1
        is_long = self._seen >= _FEWEST_RECORDED and time.monotonic() - self._began > _MOST_RECORDED_S
        if self._seen >= self._steps or is_long:
            trainer.should_stop = True
            trainer.limit_val_batches = 0


if __name__ == "__main__":
    main()
