"""One rank of a fit on gloo with SavedTensors: ``python saved_ranks.py DIRECTORY ddp|fsdp``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.capture.collectors.saved_tensors import SavedTensors
from training import Perceptron, loader, trainer


class Blocks(Perceptron):
    """Three blocks of eight by eight; the batch is cloned, so that its storage is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(batch.clone())
        return out.square().mean()


class ShardedBlocks(Blocks):
    """Each block is a group of its own; the last parameters to be gathered stay gathered until the backward."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for block in self.net:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def main(directory: Path, kind: str) -> None:
    world = int(os.environ["WORLD_SIZE"])
    callback = MemProfilerCallback(
        Schedule(wait=0, warmup=1, active=2), [SavedTensors()], output=OutputOptions(summary=False, on_error="raise")
    )
    if kind == "ddp":
        strategy = DDPStrategy(process_group_backend="gloo")
        trainer(directory, callback, devices=world, strategy=strategy).fit(Blocks(), loader(8))
    else:
        sharded = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
        trainer(directory, callback, devices=world, strategy=sharded).fit(ShardedBlocks(), loader(8))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
