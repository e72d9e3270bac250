"""One rank of a two-rank DDP fit on gloo: ``python two_ranks.py DIRECTORY [die=STEP] [curves]``.

Writes ``rank{R}.json`` with the collectives that were called per phase of the run, with us or without.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from training import Perceptron, loader, trainer

COLLECTIVES = ("broadcast", "broadcast_object_list", "all_reduce", "all_gather", "all_gather_object", "barrier",
               "gather", "gather_object", "scatter", "reduce", "monitored_barrier")  # fmt: skip


class Counting(pl.Callback):
    """Counts collectives by phase: everything up to the first batch, and everything after."""

    def __init__(self) -> None:
        self.phase = "setup"
        self.calls: Counter[str] = Counter()

    def patch(self) -> None:
        for name in COLLECTIVES:
            setattr(dist, name, self.counted(name, getattr(dist, name)))

    def counted(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[f"{self.phase}.{name}"] += 1
            return original(*args, **kwargs)

        return call

    def on_train_start(self, *_: Any) -> None:
        self.phase = "training"


class Mortal(Perceptron):
    """Dies without a word at a given step."""

    def __init__(self, die: int | None) -> None:
        super().__init__()
        self.die = die

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.die:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.loss(batch)


def main(directory: Path, options: dict[str, str]) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    counting = Counting()
    callbacks: list[pl.Callback] = [counting]
    profiler = None
    if "bare" not in options:
        from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions

        callbacks.append(MemProfilerCallback(output=OutputOptions(on_error="raise", curves="curves" in options)))
        profiler = ExtendedPyTorchProfiler()
    die = int(options["die"]) if "die" in options and rank == 1 else None
    training = trainer(
        directory, *callbacks, devices=2, strategy=DDPStrategy(process_group_backend="gloo"), profiler=profiler
    )
    counting.patch()
    training.fit(Mortal(die), loader(16))
    (directory / f"rank{rank}.json").write_text(json.dumps(counting.calls))


if __name__ == "__main__":
    main(Path(sys.argv[1]), dict((argument + "=").split("=")[:2] for argument in sys.argv[2:]))
