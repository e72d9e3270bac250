"""One rank of a two-rank DDP fit that is long enough to be asked for a window: ``python trigger_ranks.py DIRECTORY``.

Rank 0 writes ``going`` when its training is under way, and waits for the request. Late in it both
ranks ask for a window themselves.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy

from lightning_memprof import MemProfilerCallback, OutputOptions, StageSchedules
from lightning_memprof.artifacts.trigger import read_plan, read_request
from lightning_memprof.collectors import HostMemory, Pulse
from training import Perceptron, loader, trainer
from waiting import wait_until

STEPS = 160
CALL = 100


class Slow(pl.Callback):
    """Takes its time in every step, and says when the training is under way."""

    def __init__(self, directory: Path, memprof: MemProfilerCallback) -> None:
        self.directory = directory
        self.memprof = memprof

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.01)
        if batch_idx == 5 and trainer.is_global_zero:
            (self.directory / "going").touch()
            self.wait_for_a_request()
        if batch_idx == CALL:
            self.memprof.trigger(active=4)

    def wait_for_a_request(self) -> None:
        """Whoever asks may take long on a busy machine."""
        run = self.memprof.run_directory
        assert run is not None
        wait_until(lambda: read_request(run) is not None or read_plan(run) is not None)


def main(directory: Path) -> None:
    memprof = MemProfilerCallback(
        StageSchedules(fit=None),
        collectors=[Pulse(), HostMemory()],
        output=OutputOptions(summary=False, on_error="raise"),
    )
    trainer(
        directory, memprof, Slow(directory, memprof), devices=2, strategy=DDPStrategy(process_group_backend="gloo")
    ).fit(Perceptron(), loader(2 * STEPS))


if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", "0")
    main(Path(sys.argv[1]))
