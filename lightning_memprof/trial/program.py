"""The process of one run of a trial: the user's program, whose first ``fit`` is changed, measured and ended."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.fabric.strategies.launchers.subprocess_script as fabric_launcher
import lightning.pytorch.loggers as lightning_loggers
import lightning.pytorch.strategies.launchers.subprocess_script as launcher
import msgspec
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import setup

from lightning_memprof.artifacts.own_program import end_with_parent
from lightning_memprof.capture.observe import Link, original_of, replaced
from lightning_memprof.compare.trial import Measured
from lightning_memprof.errors import MemprofError
from lightning_memprof.estimation.program import run_program
from lightning_memprof.integration.callback import AttachedCallback, MemProfilerCallback
from lightning_memprof.integration.place import is_tuner
from lightning_memprof.integration.registration import requested
from lightning_memprof.trial.attach import VARIABLE
from lightning_memprof.trial.meter import Meter, Stop, redirect_callbacks
from lightning_memprof.trial.seeds import seed
from lightning_memprof.trial.task import SEED, Task, end, problem_of


def main() -> None:
    """Run the program of the command line up to the end of the task."""
    program = sys.argv[1:]
    # `python -m` puts the working directory there; the program gets what its own start would give it.
    if sys.path[0] in {"", os.getcwd()}:  # noqa: PTH109 as Python writes it
        del sys.path[0]
    task = prepare()
    # Other ranks are such processes, too.
    command = [sys.executable, "-m", "lightning_memprof.trial", *program]
    for module in (launcher, fabric_launcher):
        replaced(module, "_basic_subprocess_cmd", lambda _: lambda: command)
    with _ending(task):
        run_program(program)
    end(task, Measured(problem="the program ended without Trainer.fit (fast_dev_run does not count)"))


def prepare() -> Task:
    """Change the first ``fit`` of this process, and what it writes, until it ends; return its task."""
    task = msgspec.json.decode(os.environ[VARIABLE], type=Task)
    if original_of(Trainer.fit) is Trainer.fit:
        end_with_parent()
        torch.manual_seed(SEED)
        seed()
        for name in lightning_loggers.__all__:
            kind = getattr(lightning_loggers, name)
            if kind not in {Logger, CSVLogger, TensorBoardLogger}:
                replaced(kind, "__init__", partial(_silenced, task.directory))
        replaced(setup, "_init_debugging_flags", partial(_built, task))
        replaced(Trainer, "fit", partial(_fit, task))
    return task


@contextmanager
def _ending(task: Task) -> Iterator[None]:
    """End the process at an exception, with its reason."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 the program's
        traceback.print_exc()
        end(task, Measured(problem=str(error) if isinstance(error, MemprofError) else problem_of(error)))


def _built(task: Task, link: Link) -> Callable[..., None]:
    """Redirect a Trainer at the end of its construction: the program may write to its folder before ``fit``."""

    def build(trainer: Trainer, *given: Any, **named: Any) -> None:
        link.call(trainer, *given, **named)
        _redirect(trainer, task.directory)

    return build


def _fit(task: Task, link: Link) -> Callable[..., None]:
    def fit(trainer: Trainer, model: LightningModule, *given: Any, **named: Any) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if is_tuner(trainer) or vars(trainer)["fast_dev_run"]:
            # The training comes later.
            link.call(trainer, model, *given, **named)
            return
        with _ending(task):
            _redirect(trainer, task.directory)
            if task.is_recorded:
                callbacks.append(Stop(task))
                link.call(trainer, model, *given, **named)
                end(task, Measured(steps=task.steps))
            _limit(task.device_limit_bytes, trainer.strategy.root_device)
            meter = Meter(task)
            callbacks.append(meter)
            # Lightning takes a module out of torch.compile's wrapper, too.
            meter.apply("on_fit", trainer, getattr(model, "_orig_mod", model))
            link.call(trainer, model, *given, **named)
            meter.ended()

    return fit


def _limit(nbytes: int, device: torch.device) -> None:
    """Let the allocator of a CUDA device take so much at most; 0 does not limit it."""
    if nbytes and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(nbytes / total, 1.0), device)


def _redirect(trainer: Trainer, directory: str) -> None:
    """Let the Trainer, its loggers and callbacks write into a directory, and nowhere else."""
    vars(trainer)["_default_root_dir"] = directory
    trainer.loggers = [_redirected(logger, directory) for logger in trainer.loggers]
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    is_recorded = requested() is not None
    kept = AttachedCallback if is_recorded else ()
    callbacks[:] = [
        callback
        for callback in callbacks
        if isinstance(callback, kept) or not isinstance(callback, MemProfilerCallback)
    ]
    redirect_callbacks(trainer, directory)
    if not is_recorded:
        trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]  # set by a connector


def _redirected(logger: Any, directory: str) -> Any:
    """Return the logger writing into a directory; one that can write elsewhere is replaced by one that does not."""
    if not isinstance(logger, TensorBoardLogger | CSVLogger):
        return _SilentLogger(directory)
    vars(logger).update({"_root_dir": directory, "_save_dir": directory})
    return logger


def _silenced(directory: str, link: Link) -> Callable[..., None]:
    """Replace the construction of a logger, which may already write, or connect to a server."""

    @functools.wraps(link.call)
    def init(logger: Any, *_: Any, **__: Any) -> None:
        logger.__class__ = _SilentLogger
        _SilentLogger.__init__(logger, directory)

    return init


class _SilentLogger(DummyLogger):
    """Writes nothing, and names a directory: LightningCLI saves its configuration there."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory

    @property
    def save_dir(self) -> str:
        return self._directory
