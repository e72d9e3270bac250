"""``record``: the recording of a training loop that the program runs itself, without a Trainer."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch
from torch import nn

from lightning_memprof.artifacts.sink import RunPlace
from lightning_memprof.capture.faults import describe
from lightning_memprof.capture.observe import deferred
from lightning_memprof.errors import ConfigError, MemprofError
from lightning_memprof.integration.background import print_page, start_report
from lightning_memprof.integration.live_run import LIVE, LiveRun
from lightning_memprof.integration.loop_run import LoopRun, ranks_of_process
from lightning_memprof.integration.place import agreed_place
from lightning_memprof.integration.program_calls import ProgramCalls
from lightning_memprof.integration.settings import RunOptions, for_this_rank
from lightning_memprof.logs import logger_of

log = logger_of(__name__)
_T = TypeVar("_T")

_DIRECTORY: Final = "memprof"


class record(ProgramCalls):  # noqa: N801 used as a function: `with record(model) as recording`
    """Record a training loop of your own: ``with record(model, optimizer) as recording``.

    At the end the page is printed. A step begins with the fetch of its batch in ``recording.steps(loader)``; a loop
    without a loader calls ``recording.step()`` at the end of each iteration, and its first iteration is not recorded.
    Calls of the model in eval mode and without gradients are a validation, part of the step around them. Losses,
    gradients, weights and random state are those of the loop alone.

    Args:
        model: the model, also wrapped in DistributedDataParallel or compiled; several in a ``torch.nn.ModuleDict``.
        optimizers: those of the loop; others are found when they step.
        dirpath: parent of the run directory, also a URL; None is ``output.dirpath``, else ``memprof`` in the working
            directory.
        options: ``schedule``, ``collectors``, ``ranks``, ``triggers``, ``budget`` and ``output`` of
            :class:`MemProfilerCallback`.

    Raises:
        ConfigError: a value is invalid, another run is being recorded, or a required collector is not available.
    """

    def __init__(
        self,
        model: nn.Module,
        *optimizers: torch.optim.Optimizer,
        dirpath: str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"record({model!r}): must be a torch.nn.Module; several go into a torch.nn.ModuleDict")
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ConfigError(f"record(..., {optimizer!r}): must be a torch.optim.Optimizer")
        names = [each.name for each in fields(RunOptions)]
        if unknown := set(options).difference(names):
            raise ConfigError(f"record({', '.join(sorted(unknown))}=...): its options are {', '.join(names)}")
        self._model = model
        self._optimizers = optimizers
        self._options = RunOptions(**options)
        self._dirpath = os.fspath(dirpath or self._options.output.dirpath or _DIRECTORY)
        self._place: RunPlace | None = None
        self._run: LoopRun | None = None

    @property
    def run_directory(self) -> Path | None:
        """The run directory, the same on all ranks; None before the loop, and where nothing is recorded."""
        return None if self._place is None else self._place.directory

    @property
    def _live(self) -> LiveRun | None:
        return self._run

    def __enter__(self) -> record:  # noqa: PYI034 typing has Self from Python 3.11 on
        if any(run.is_here and not run.is_over() for run in LIVE):
            raise ConfigError("record: another run is being recorded in this process; end it first")
        rank, world_size, local_rank = ranks_of_process()
        settings = for_this_rank(self._options.settings("fit"), rank=rank, world_size=world_size, local_rank=local_rank)
        self._place = agreed_place(self._dirpath, rank, os.fspath(Path.cwd()))
        if self._place is not None:
            try:
                self._run = LoopRun(self._model, self._optimizers, settings, self._place)
                LIVE.add(self._run)
                self._named.place(self._place.directory, rank)
                self._run.start()
            except Exception as error:
                if self._run is not None:
                    LIVE.discard(self._run)
                    self._run.end(error)
                    self._run.release()
                    self._run = None
                if isinstance(error, MemprofError) or settings.output.on_error == "raise":
                    raise
                log.warning("this rank is not recorded (%s); the loop continues", describe(error), exc_info=True)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        run, self._run = self._run, None
        if run is None or not run.is_here:
            return
        LIVE.discard(run)
        output = run.settings.output
        with deferred(signal.SIGCHLD) as arrived:
            try:
                reason = run.end(error)
                if run.run.rank == 0:
                    summary = True if output.summary is None else output.summary
                    print_page(run.place, summary, None if reason is None else sys.stderr)
                    if output.report:
                        start_report(run.place)
            except Exception as failure:
                if output.on_error == "raise":
                    raise
                log.warning("the last files of the run cannot be written (%s)", describe(failure), exc_info=True)
            finally:
                run.release()
            if error is not None:
                arrived.clear()

    def steps(self, loader: Iterable[_T]) -> Steps[_T]:
        """Return the batches of an epoch, for the ``for`` statement: each begins a step."""
        return Steps(loader, self._run)

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Count the body as validation, with the fetches of its loader."""
        run = self._run
        if run is not None:
            run.guarded(run.enter_validation)
        try:
            yield
        finally:
            if run is not None:
                run.guarded(run.leave_validation)

    def step(self) -> None:
        """End the iteration of a loop without a loader."""
        if self._run is not None:
            self._run.guarded(self._run.next_step)


class Steps(Generic[_T]):
    """The batches of a loader, recorded; as long as the loader."""

    def __init__(self, loader: Iterable[_T], run: LoopRun | None) -> None:
        self._loader = loader
        self._run = run

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a loader without a length has none here

    def __iter__(self) -> Iterator[_T]:
        run = self._run
        if run is None or not run.is_here:
            yield from self._loader
            return
        run.guarded(run.epoch, self._loader)
        run.guarded(run.fetch)
        iterator = iter(self._loader)
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                run.guarded(run.exhausted)
                return
            run.guarded(run.batch_start, batch)
            is_whole = False
            try:
                yield batch
                is_whole = True
            finally:
                run.guarded(run.batch_end, is_whole)
            run.guarded(run.fetch)
