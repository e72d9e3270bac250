"""One rank of a training of two whose second rank has a fault in step 3: ``faulty_ranks.py DIRECTORY FAULT STRATEGY``.

The lines with a mark are those that the page must name.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_memprof import MemProfilerCallback
from lightning_memprof.collectors import Hangs, Pulse
from training import Noise, Perceptron, trainer

FAULT, STRATEGY = sys.argv[2:4]
RANK: Final = int(os.environ["LOCAL_RANK"])
STEP: Final = 3
LIMIT: Final = 3.0


def has(fault: str, step: int) -> bool:
    return RANK == 1 and fault == FAULT and step == STEP


class Samples(Noise):
    """A data set that may block."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if has("loader", index):
            time.sleep(3600)  # line: loader
        return super().__getitem__(index)


class Faulty(Perceptron):
    """Calls two collectives in each step; a healthy one has steps of three times the median."""

    def configure_model(self) -> None:
        if STRATEGY == "fsdp2":
            fully_shard(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if FAULT == "healthy":
            time.sleep(LIMIT / 2 if batch_idx % 5 == STEP else LIMIT / 6)
        if has("sleep", batch_idx):
            time.sleep(3600)  # line: sleep
        if has("exception", batch_idx):
            raise ValueError("the batch is empty")  # line: raise
        if has("stopped", batch_idx):
            os.kill(os.getpid(), signal.SIGSTOP)
        loss = self.loss(batch)
        self.collectives(batch_idx)
        return loss

    def collectives(self, step: int) -> None:
        if has("reordered", step):
            dist.broadcast(torch.ones(2), 0)  # line: early
        if not has("missed", step):
            dist.all_reduce(torch.ones(5000 if has("shaped", step) else 3))  # line: reduce
        if not has("reordered", step):
            dist.broadcast(torch.ones(2), 0)  # line: late


def strategy() -> DDPStrategy | ModelParallelStrategy:
    if STRATEGY == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return DDPStrategy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    loader = DataLoader(Samples(STEP if FAULT == "uneven" and RANK == 1 else 12), batch_size=None)
    validated = {"val_check_interval": 4, "enable_checkpointing": True} if FAULT == "healthy" else {}
    callback = MemProfilerCallback(collectors=[Pulse(), Hangs(max_step_seconds=LIMIT)])
    options: dict[str, Any] = {"devices": 2, "strategy": strategy(), "use_distributed_sampler": False, **validated}
    trainer(Path(sys.argv[1]), callback, **options).fit(Faulty(), loader, loader if validated else None)
