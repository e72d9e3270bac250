"""One fit, and the clock that every fit is measured with."""

from __future__ import annotations

import gc
import itertools
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from networks import workloads


class Clock:
    """Reads the clocks at the start of each batch.

    From one reading to the next lies one whole turn of the loop, with all that callbacks and profilers do in it. What
    happens between two readings of one batch is left out.

    Args:
        pause: called between the two readings.
        every: batches from one pause to the next.

    """

    def __init__(self, pause: Callable[[], None], every: int = 1) -> None:
        self._pause = pause
        self._every = every
        self._batches = 0
        # Pairs: the end of one turn and, after the pause, the start of the next.
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def read(self) -> None:
        self.cpu.append(time.process_time())
        self.wall.append(time.perf_counter())

    def batch(self) -> None:
        """Say that a batch starts."""
        self.read()
        if self._batches % self._every == 0:
            self._pause()
        self._batches += 1
        self.read()


class FirstOfAll(Callback):
    """Tells the clock of each batch, ahead of every other callback."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_batch_start(self, *args: Any) -> None:
        self._clock.batch()


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
        stop: seconds of wall time in ``stop_trace`` of torch's profiler.
        size_bytes: what it left on disk.
        faults: what the manifest says of collectors that failed or were not available.

    """

    name: str
    cpu: Times
    wall: Times
    children: float = 0.0
    stop: float = 0.0
    size_bytes: int = 0
    faults: tuple[str, ...] = ()

    @property
    def all_cpu(self) -> float:
        """CPU time of the whole fit, every thread and process of it."""
        return self.cpu.fit + self.cpu.paused + self.children


@dataclass(frozen=True)
class Job:
    """What to fit.

    Attributes:
        name: of the configuration.
        workload: what is trained.
        steps: optimizer steps.
        turn: steps from one pause to the next.

    """

    name: str
    workload: str
    steps: int
    turn: int = 1


class StopWatch:
    """Adds up the time in torch's ``stop_trace``, which is torch's own and the same for whoever calls it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        profiler: Any = torch.profiler.profiler._KinetoProfile
        stop = profiler.stop_trace

        def stop_trace(this: Any) -> None:
            began = time.perf_counter()
            try:
                stop(this)
            finally:
                self.seconds += time.perf_counter() - began

        profiler.stop_trace = stop_trace


def fit(
    job: Job,
    configure: Callable[[Path], dict[str, Any]],
    pause: Callable[[], None],
    directory: Path,
    watch: StopWatch | None = None,
) -> Fit:
    """Train once under a configuration, and measure.

    Args:
        job: what to fit.
        configure: given a directory to write to, returns arguments of the Trainer; ``build`` among them makes the
            model from its class and its arguments.
        pause: called between steps; its time does not count.
        directory: what the fit writes to.
        watch: of this process.

    """
    torch.manual_seed(0)
    workload = workloads()[job.workload]
    clock = Clock(pause, job.turn)
    arguments = configure(directory)
    build = arguments.pop("build", lambda model, *values: model(*values))
    model = build(workload.model, *workload.arguments)
    callbacks = [FirstOfAll(clock), *arguments.pop("callbacks", [])]
    if workload.ranks > 1:
        arguments |= {"strategy": "ddp", "use_distributed_sampler": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=workload.ranks,
        max_steps=job.steps,
        # DeviceStatsMonitor refuses to go without one.
        logger=arguments.pop("logger", False),
        default_root_dir=directory,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **arguments,
    )
    loader = workload.loader(job.steps + 2)
    gc.collect()
    children = _children()
    stopped = 0.0 if watch is None else watch.seconds
    clock.read()
    trainer.fit(model, loader)
    clock.read()
    return Fit(
        job.name,
        Times.of(clock.cpu),
        Times.of(clock.wall),
        _children() - children,
        0.0 if watch is None else watch.seconds - stopped,
    )


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
