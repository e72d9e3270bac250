"""Looks for the largest batch that fits, by runs of the program that end at a limit of memory."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import psutil

from lightning_memprof.capture.sources.memory import cgroup_memory
from lightning_memprof.compare.batches import Batches, TriedBatch, largest_fitting
from lightning_memprof.compare.trial import Measured
from lightning_memprof.errors import ConfigError, MemprofError
from lightning_memprof.trial.changes import parse_change
from lightning_memprof.trial.process import run_task
from lightning_memprof.trial.runner import TrialOptions
from lightning_memprof.trial.task import Task

_STEPS: Final = 5
_MOST_SAMPLES: Final = 1 << 20
# A run takes some ten seconds; each further half of the interval is another one.
_TOLERANCE: Final = 1 / 16
# Of the host's free memory: the rest is for what grows later.
_USABLE: Final = 0.9


def find_largest(program: Sequence[str], options: TrialOptions, limit_bytes: int | None = None) -> Batches:
    """Run a program with other batch sizes; return which of them fit.

    Args:
        program: its command line.
        options: steps, time limit, progress; its remedies are applied to all runs.
        limit_bytes: memory that a run may use, of the device or, on a CPU, of the host; None takes all of the device,
            or most of the host's free memory.

    Raises:
        ConfigError: a remedy changes the batch size, too.
        MemprofError: the program fails with its own batch size, or that is not known.
    """
    steps = options.steps or _STEPS
    for name in options.remedies:
        if parse_change(name).batches > 1:
            raise ConfigError(f"--batch-size max: chooses the batch size, as --remedy {name} does: leave one out")
    with TemporaryDirectory(prefix="lightning-memprof-try-", ignore_cleanup_errors=True) as directory:

        def run(samples: int | None, host_bytes: int = 0, device_bytes: int = 0) -> Measured:
            options.progress("the program's own batch" if samples is None else f"batches of {samples}", 0, 0)
            with TemporaryDirectory(dir=Path(directory), ignore_cleanup_errors=True) as place:
                names = tuple(options.remedies)
                task = Task(
                    directory=place,
                    steps=steps,
                    remedies=names,
                    samples=samples or 0,
                    host_limit_bytes=host_bytes,
                    device_limit_bytes=device_bytes,
                )
                return run_task(program, task, options.time_limit_s)

        own = run(None)
        if own.problem or own.samples is None:
            reason = own.problem or "the batch size is not that of a torch.utils.data.BatchSampler"
            raise MemprofError(f"try: {' '.join(program)}: {reason}")
        is_device = own.device_bytes is not None
        if limit_bytes is None and not is_device:
            limit_bytes = _free_bytes()
        limits = (0, limit_bytes or 0) if is_device else (limit_bytes or 0, 0)
        tried: dict[int, TriedBatch] = {}
        is_stopped = False
        try:
            _search(own, limit_bytes, lambda samples: run(samples, *limits), tried)
        except KeyboardInterrupt:
            is_stopped = True
    return Batches(
        program=shlex.join(program),
        remedies=tuple(options.remedies),
        samples=own.samples,
        limit_bytes=limit_bytes,
        is_device=is_device,
        tried=tuple(tried[samples] for samples in sorted(tried)),
        is_stopped=is_stopped,
    )


def _search(
    own: Measured, limit_bytes: int | None, run: Callable[[int], Measured], tried: dict[int, TriedBatch]
) -> None:
    """Look for the largest batch that fits; adds each batch that ran to ``tried``."""

    def fits(samples: int) -> bool:
        # The program's own batch has run.
        found = own if samples == own.samples else run(samples)
        if found.problem:
            tried[samples] = TriedBatch(samples=samples, fits=False, problem=found.problem)
            return False
        # A device has one rank.
        peak = found.peak_bytes * (found.ranks if found.device_bytes is None else 1)
        is_within = limit_bytes is None or peak <= limit_bytes
        tried[samples] = TriedBatch(samples=samples, fits=is_within, peak_bytes=peak, step_ns=found.step_ns)
        return is_within

    largest_fitting(fits, own.samples or 1, _MOST_SAMPLES, _TOLERANCE)


def _free_bytes() -> int:
    limit, used = cgroup_memory()
    free = psutil.virtual_memory().available
    return round(_USABLE * (free if limit is None else min(free, limit - (used or 0))))
