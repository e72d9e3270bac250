"""A training that is told secrets by every way that a program is told them: ``private_fit.py DIRECTORY [--token=...]``.

It ends by an exception whose words have one of them, as those of an HTTP client do, where FAIL says so.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.profiler import ProfilerAction

from every_collector import every_collector
from lightning_memprof import Budget, ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions
from training import Perceptron, loader, trainer


def schedule(step: int, token: str) -> ProfilerAction:
    """A schedule whose arguments are nobody's business."""
    return (ProfilerAction.NONE, ProfilerAction.WARMUP, ProfilerAction.RECORD_AND_SAVE)[step % 3]


class Failing(Perceptron):
    """Says in an exception what it was told."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 7:
            token = os.environ["MY_SERVICE_TOKEN"]
            raise ConnectionError(f"401 for https://me:{token}@example.org/?token={token}")
        return super().training_step(batch, batch_idx)


def main(directory: Path) -> None:
    """Train."""
    callback = MemProfilerCallback(
        schedule=functools.partial(schedule, token=os.environ["MY_SERVICE_TOKEN"]),
        collectors=every_collector(),
        budget=Budget(keep_windows=2),
        output=OutputOptions(loggers=True, curves=True, report="FAIL" not in os.environ),
    )
    model = Failing() if os.environ.get("FAIL") else Perceptron()
    logger = TensorBoardLogger(directory, name=None, version="version_0")
    training = trainer(directory, callback, profiler=ExtendedPyTorchProfiler(), logger=logger)
    callback.snapshot("before")
    training.fit(model, loader(9))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
