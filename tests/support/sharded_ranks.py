"""One rank of a fit under ModelParallelStrategy (FSDP2) on gloo: ``python sharded_ranks.py DIRECTORY [OPTION...]``.

Options: ``bare`` without us, ``root=PATH`` another root module, ``group`` shards two modules as one group,
``checkpoint`` computes the model again in the backward.
Writes ``rank{R}.json``: the losses, a digest of this rank's weights, the bytes of the model's parameters.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from training import loader, trainer


class Sharded(pl.LightningModule):
    """Blocks of eight by eight, and a last layer that two ranks cannot halve."""

    def __init__(self, *, group: bool, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 5))
        self.group, self.checkpointed = group, checkpointed
        self.losses: list[float] = []

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        fully_shard([self.model[0], self.model[2]] if self.group else self.model[0], mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        out = checkpoint(self.model, batch, use_reentrant=False) if self.checkpointed else self.model(batch)
        loss: torch.Tensor = out.square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def hooks_of(model: nn.Module) -> list[Any]:
    """What FSDP hangs onto the modules, in its order."""
    return [
        (list(module._forward_pre_hooks.items()), list(module._forward_hooks.items())) for module in model.modules()
    ]


def main(directory: Path, options: dict[str, str]) -> None:
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    model = Sharded(group="group" in options, checkpointed="checkpoint" in options)
    callbacks: list[pl.Callback] = []
    if "bare" not in options:
        from lightning_memprof import Collector, MemProfilerCallback, OutputOptions, Schedule
        from lightning_memprof.capture.tracker.collectors import FSDPMemory, ModuleMemory

        collector = FSDPMemory(
            depth=3, tabulate="tabulate" in options, units="B", root_module=options.get("root", "model")
        )
        collectors: list[Collector] = [ModuleMemory() if "modules" in options else collector]
        schedule = Schedule(wait=1, warmup=1, active=2)
        output = OutputOptions(on_error="raise", summary=False)
        callbacks.append(MemProfilerCallback(schedule=schedule, collectors=collectors, output=output))
    hooks: list[Any] = []
    callbacks.append(pl.callbacks.LambdaCallback(on_train_start=lambda *_: hooks.append(hooks_of(model))))
    training = trainer(
        directory,
        *callbacks,
        devices=world,
        strategy=ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
    )
    training.fit(model, loader(12))
    digest = hashlib.sha256()
    weights: list[Any] = list(model.parameters())
    for parameter in weights:
        digest.update(parameter.to_local().detach().numpy().tobytes())
    facts = {
        "losses": model.losses,
        "weights": digest.hexdigest(),
        "parameter_bytes": sum(4 * parameter.numel() for parameter in model.parameters()),
        "parameters": len(list(model.parameters())),
        "hooks_are_back": hooks_of(model) == hooks[0],
    }
    (directory / f"rank{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), dict((argument + "=").split("=")[:2] for argument in sys.argv[2:]))
