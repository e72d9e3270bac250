"""One rank of a fit with tensor parallelism on gloo: ``python parallel_ranks.py DIRECTORY [bare] [sharded]``.

Two ranks share each layer of the network; with ``sharded`` ``fully_shard`` splits the shares among two pairs of ranks.
Writes ``rank{R}.json``: the losses, a digest of this rank's weights, and the bytes of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from training import loader, trainer


class Shared(pl.LightningModule):
    """A layer divided by columns, one divided by rows, and a head that every rank has."""

    def __init__(self, *, sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 1)
        self.sharded = sharded
        self.losses: list[float] = []

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        if self.sharded:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.net(batch)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-2, momentum=0.9)


def main(directory: Path, options: set[str]) -> None:
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    model = Shared(sharded="sharded" in options)
    callbacks: list[pl.Callback] = []
    if "bare" not in options:
        from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
        from lightning_memprof.collectors import FSDPMemory, ModuleMemory, SavedTensors

        tracker = FSDPMemory(root_module="net") if model.sharded else ModuleMemory()
        output = OutputOptions(on_error="raise", summary=False)
        schedule = Schedule(wait=1, warmup=1, active=2)
        callbacks.append(MemProfilerCallback(schedule, [SavedTensors(), tracker], output=output))
    strategy = ModelParallelStrategy(data_parallel_size=world // 2, tensor_parallel_size=2)
    trainer(directory, *callbacks, devices=world, strategy=strategy).fit(model, loader(4 * world))
    digest, size = hashlib.sha256(), 0
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        digest.update(local.detach().contiguous().numpy().tobytes())
        size += 4 * local.numel()
    facts = {"losses": model.losses, "weights": digest.hexdigest(), "parameter_bytes": size}
    (directory / f"rank{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), set(sys.argv[2:]))
