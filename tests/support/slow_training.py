"""A training that goes on until it is told to stop: ``python slow_training.py DIRECTORY``.

It records a window at its beginning, writes ``going``, records a second one once ``more`` is there, and ends once
``stop`` is there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_memprof import MemProfilerCallback, OutputOptions, StageSchedules
from lightning_memprof.collectors import HostMemory, Pulse
from lightning_memprof.schedule import Schedule
from training import Perceptron, loader, trainer

STEPS = 20_000


class Steered(pl.Callback):
    """Takes its time in every step, and does what files say."""

    def __init__(self, directory: Path, memprof: MemProfilerCallback) -> None:
        self.directory = directory
        self.memprof = memprof
        self.has_asked = False

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.02)
        if batch_idx == 10:
            (self.directory / "going").touch()
        if not self.has_asked and (self.directory / "more").exists():
            self.has_asked = True
            self.memprof.trigger(active=2)
        trainer.should_stop = (self.directory / "stop").exists()


def main(directory: Path) -> None:
    memprof = MemProfilerCallback(
        StageSchedules(fit=Schedule(wait=1, warmup=1, active=2, repeat=1)),
        collectors=[Pulse(), HostMemory()],
        output=OutputOptions(summary=False, report=False),
    )
    trainer(directory, memprof, Steered(directory, memprof)).fit(Perceptron(), loader(STEPS))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
