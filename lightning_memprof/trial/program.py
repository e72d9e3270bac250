"""The process of one run of a trial: the user's program, whose first ``fit`` is changed, measured and ended.

``python -m lightning_memprof.trial.program SCRIPT ARGS...``, with the task in the environment.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
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
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from lightning_memprof.analysis.trial import Measured
from lightning_memprof.capture.loader_workers import worker_memory, worker_pids
from lightning_memprof.capture.observe import Link, wrapped
from lightning_memprof.capture.sources.memory import peak_rss_bytes
from lightning_memprof.estimation.program import run_program
from lightning_memprof.integration.callback import AttachedCallback, MemProfilerCallback
from lightning_memprof.trial.remedies import RefusedError, Remedy, batch_samples, parse_remedy, set_batch_samples
from lightning_memprof.trial.task import VARIABLE, Task, result_path

__all__ = ["main"]

_SEED: Final = 20_251
# Source: prctl(2).
_PR_SET_PDEATHSIG: Final = 1
# Of a recorded run: its steps may take minutes each.
_MOST_RECORDED_S: Final = 60.0
_FEWEST_RECORDED: Final = 12


def main() -> None:
    """Run the program of the command line up to the end of the task."""
    _end_with_parent()
    task = msgspec.json.decode(os.environ[VARIABLE], type=Task)
    # `python -m` puts the working directory there; the program gets what its own start would give it.
    if sys.path[0] in {"", os.getcwd()}:  # noqa: PTH109 as Python writes it
        del sys.path[0]
    _seed(_SEED)
    with _prepared(task):
        run_program(sys.argv[1:])
    _end(task, Measured(problem="the program ended without Trainer.fit of lightning.pytorch"))


def _end_with_parent() -> None:
    """Let Linux kill this process when its parent ends: a stopped one cannot notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
                _end(task, Measured(steps=task.steps))
            _limit(task.device_limit_bytes, trainer.strategy.root_device)
            meter = _Meter(task, remedies)
            trainer.callbacks.append(meter)  # type: ignore[attr-defined]  # as above
            try:
                for remedy in remedies:
                    if task.is_check:
                        remedy.make_comparable()
                    remedy.on_fit(trainer, model)
                with ExitStack() as changed:
                    # Lightning takes a module out of torch.compile's wrapper, too.
                    _change_model(getattr(model, "_orig_mod", model), remedies, changed)
                    changed.enter_context(
                        wrapped(fit_loop, "_process_dataloader", _changed(task, trainer, meter, changed))
                    )
                    link.call(trainer, model, *given, **named)
            except RefusedError as error:
                _end(task, Measured(problem=str(error)))
            meter.ended()

        return reached

    with ExitStack() as undo:
        undo.enter_context(wrapped(Trainer, "fit", fit))
        for module in (launcher, fabric_launcher):
            undo.enter_context(wrapped(module, "_basic_subprocess_cmd", lambda _: _rank_command))
        yield


def _limit(nbytes: int, device: torch.device) -> None:
    """Let the allocator of a CUDA device take so much at most; 0 does not limit it."""
    if nbytes and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(nbytes / total, 1.0), device)


def _change_model(model: LightningModule, remedies: Sequence[Remedy], undo: ExitStack) -> None:
    """Apply remedies to the model now, or after it has made its modules in ``configure_model``."""

    def change() -> None:
        for remedy in remedies:
            remedy.on_model(model)

    def configured(link: Link) -> Callable[..., None]:
        def configure(module: LightningModule) -> None:
            link.call(module)
            change()

        return configure

    if is_overridden("configure_model", model):
        undo.enter_context(wrapped(type(model), "configure_model", configured))
    else:
        change()


def _rank_command() -> Sequence[str]:
    """Return the command of another rank: this process's own."""
    return [sys.executable, "-m", "lightning_memprof.trial.program", *sys.argv]


def _changed(task: Task, trainer: Trainer, meter: _Meter, undo: ExitStack) -> Callable[[Link], Callable[..., Any]]:
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
        # Others of the class, such as one for validation, may have none.
        if isinstance(sampler.generator, torch.Generator):
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
    callbacks[:] = [
        callback
        for callback in callbacks
        if isinstance(callback, AttachedCallback) or not isinstance(callback, MemProfilerCallback)
    ]
    for callback in callbacks:
        if getattr(callback, "dirpath", None) is not None:
            callback.dirpath = directory
    if not os.environ.get("LIGHTNING_MEMPROF"):
        trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]  # set by a connector


def _redirected(logger: Any, directory: str) -> Any:
    """Return the logger writing into a directory; one that can write elsewhere is replaced by one that does not."""
    if not isinstance(logger, TensorBoardLogger | CSVLogger):
        return _SilentLogger(directory)
    vars(logger).update({"_root_dir": directory, "_save_dir": directory})
    return logger


class _SilentLogger(DummyLogger):
    """Writes nothing, and names a directory: LightningCLI saves its configuration there."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory

    @property
    def save_dir(self) -> str:
        return self._directory


class _Stop(Callback):
    """Ends a recorded fit after a number of steps, or a minute, without a last validation."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._seen = 0
        self._began = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 Lightning's
        _lift_limits(trainer)
        trainer.fit_loop.min_epochs = None
        trainer.fit_loop.epoch_loop.min_steps = None
        self._began = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._seen += 1
        is_long = self._seen >= _FEWEST_RECORDED and time.monotonic() - self._began > _MOST_RECORDED_S
        if self._seen >= self._steps or is_long:
            trainer.should_stop = True
            trainer.limit_val_batches = 0


class _Meter(Callback):
    """Measures the steps of a task, and ends the process; the program's code after ``fit`` never runs.

    Args:
        task: the steps.
        remedies: are applied when the fit starts.

    """

    def __init__(self, task: Task, remedies: Sequence[Remedy]) -> None:
        self._task = task
        self._remedies = remedies
        self._first = task.warmup
        self._batches = math.prod(remedy.batches for remedy in remedies)
        self._seen = 0
        self._has_loader = False
        self._samples: int | None = None
        self._losses: list[torch.Tensor] = []
        # Of the batches so far that together replace one.
        self._parts: list[torch.Tensor] = []
        self._in_turn = 0
        self._measured = 0
        self._spent_ns = 0
        self._began_ns = 0
        self._paused_ns = 0
        self._validation_ns = 0

    def loader(self, loader: DataLoader[Any]) -> None:
        """Apply the remedies to a training DataLoader, and begin to measure when its first stock of batches is used."""
        self._has_loader = True
        for remedy in self._remedies:
            remedy.on_loader(loader)
        if self._task.samples:
            set_batch_samples(loader, self._task.samples)
        self._samples = batch_samples(loader)
        # Compared runs have the same number of steps.
        stock = 0 if self._task.is_check else loader.num_workers * (loader.prefetch_factor or 0)
        self._first = max(self._first, self._task.warmup + stock)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the remedies of optimizers, and let the fit run until it is measured."""
        _lift_limits(trainer)
        try:
            for remedy in self._remedies:
                remedy.on_start(trainer, pl_module)
        except RefusedError as error:
            _end(self._task, Measured(problem=str(error)))
        needs_loader = any(type(remedy).on_loader is not Remedy.on_loader for remedy in self._remedies)
        if needs_loader and not self._has_loader:
            _end(self._task, Measured(problem="the training data do not come from a torch.utils.data.DataLoader"))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 Lightning's
        """Stop the clock."""
        self._validation_ns = time.perf_counter_ns()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 Lightning's
        """Start the clock again."""
        if self._began_ns:
            self._paused_ns += time.perf_counter_ns() - self._validation_ns

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,  # noqa: ARG002 Lightning's
        batch_idx: int,
    ) -> None:
        """Count a step; start the clock after the warm-up, and end after the last step."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._task.is_check and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._parts.append(loss.detach().clone())
        if (batch_idx + 1) % self._batches and not trainer.is_last_batch:
            return
        if self._parts:
            # Lightning divides each loss by their number.
            self._losses.append(torch.stack(self._parts).sum())
            self._parts.clear()
        self._seen += 1
        if self._seen < self._first:
            return
        device = trainer.strategy.root_device
        if self._seen == self._first:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            self._begin_turn(device)
            return
        self._in_turn += 1
        turn = self._task.turn
        if turn and self._in_turn == 1:
            # What another process left in the caches, or a worker finished meanwhile, is this step's.
            self._start_clock()
        elif self._in_turn == (turn + 1 if turn else self._task.steps):
            _synchronize(device)
            self._spent_ns += time.perf_counter_ns() - self._began_ns - self._paused_ns
            self._measured += turn or self._task.steps
            if self._measured >= self._task.steps:
                self._finish(trainer, pl_module)
            self._begin_turn(device)

    def _begin_turn(self, device: torch.device) -> None:
        _synchronize(device)
        self._in_turn = 0
        if self._task.turn and int(os.environ.get("LOCAL_RANK", "0")) == 0:
            os.killpg(os.getpgrp(), signal.SIGSTOP)
        self._start_clock()

    def _start_clock(self) -> None:
        self._began_ns, self._paused_ns = time.perf_counter_ns(), 0

    def ended(self) -> NoReturn:
        """End the process after a fit that ended before the last step."""
        wanted = self._first + self._task.steps
        problem = f"the fit ended after {self._seen} of {wanted} steps: use fewer --steps"
        _end(self._task, Measured(problem=problem))

    def _finish(self, trainer: Trainer, module: LightningModule) -> NoReturn:
        device = trainer.strategy.root_device
        memory = [worker_memory(pid) for pid in worker_pids()]
        measured = Measured(
            steps=self._measured,
            step_ns=self._spent_ns / self._measured,
            losses=[float(loss) for loss in self._losses],
            weights=_hash(module) if self._task.is_check else "",
            rss_bytes=peak_rss_bytes(0),
            worker_bytes=sum(worker.pss_bytes for worker in memory if worker is not None),
            device_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            samples=self._samples,
            ranks=max(trainer.num_devices, 1),
        )
        _end(self._task, measured)


def _end(task: Task, measured: Measured) -> NoReturn:
    """Write the result, and end the process without the program's own code or Python's cleanup."""
    path = result_path(task.directory)
    partial = Path(f"{path}.partial")
    partial.write_bytes(msgspec.json.encode(measured))
    partial.replace(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _lift_limits(trainer: Trainer) -> None:
    """Remove the limits of the fit: they are those of a whole training, which may be shorter than the measurement."""
    loop = trainer.fit_loop
    loop.max_epochs = -1
    loop.epoch_loop.max_steps = -1


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _hash(module: LightningModule) -> str:
    """Return a hash of the bits of all parameters, of this rank's part where they are sharded."""
    found = hashlib.sha256()
    for parameter in module.parameters():
        local: Any = parameter.detach()
        if hasattr(local, "to_local"):
            local = local.to_local()
        found.update(local.cpu().reshape(-1).contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


if __name__ == "__main__":
    main()
