"""One rank of a fit under a strategy, on gloo: ``python strategy_ranks.py DIRECTORY STRATEGY [RECORDER]``.

Writes ``rank{R}.json``: a digest of this rank's losses and weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from recorders import RECORDERS
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from training import Noise, trainer


class Blocks(pl.LightningModule):
    """Two blocks and a head; the losses are kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.second = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 1)
        self.losses: list[float] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(batch)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-2, momentum=0.9)


class CheckpointedBlocks(Blocks):
    """The first block is computed again in backward."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(checkpoint(self.first, batch, use_reentrant=False)))


class ShardedBlocks(Blocks):
    """FSDP2: each block is sharded, and the rest."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for part in (self.first, self.second, self):
            fully_shard(part, mesh=mesh)


class FSDPOnCpu(FSDPStrategy):
    """FSDP1 on a CPU: Lightning refuses its own class there, and torch wants to be told the device."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


Made = tuple[Callable[[], Blocks], Callable[[int], Any]]

STRATEGIES: Final[Mapping[str, Made]] = MappingProxyType(
    {
        "ddp": (Blocks, lambda _: DDPStrategy()),
        "ddp_static_graph": (CheckpointedBlocks, lambda _: DDPStrategy(static_graph=True)),
        "ddp_find_unused": (Blocks, lambda _: DDPStrategy(find_unused_parameters=True)),
        "fsdp1": (Blocks, lambda _: FSDPOnCpu(auto_wrap_policy={nn.Sequential}, use_orig_params=True)),
        "fsdp2": (
            ShardedBlocks,
            lambda world: ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
        ),
    }
)


def weights(model: nn.Module) -> list[torch.Tensor]:
    """Give this rank's part of the weights."""
    values: list[Any] = [parameter.detach() for parameter in model.parameters()]
    return [value.to_local() if hasattr(value, "to_local") else value for value in values]


def main(directory: Path, strategy: str, recorder: str) -> None:
    """Train for eight steps."""
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    kind, make = STRATEGIES[strategy]
    model = kind()
    ours = RECORDERS[recorder]() if recorder != "bare" else {}
    training = trainer(directory, *ours.pop("callbacks", []), devices=world, strategy=make(world), **ours)
    kept: list[str] = []

    def keep(*_: Any) -> None:
        digest = hashlib.sha256(json.dumps(model.losses).encode())
        for value in weights(model):
            digest.update(value.contiguous().numpy().tobytes())
        kept.append(digest.hexdigest())

    # FSDP1 gives its shards back when the fit has ended.
    training.callbacks.append(pl.callbacks.LambdaCallback(on_train_end=keep))
    training.fit(model, DataLoader(Noise(8 * world), batch_size=None))
    (directory / f"rank{rank}.json").write_text(json.dumps({"digest": kept[0], "steps": len(model.losses)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
