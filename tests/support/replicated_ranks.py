"""One rank of a fit under DDP or FSDP1 on gloo: ``python replicated_ranks.py DIRECTORY [OPTION...]``.

Options: ``bare`` without a recording, ``static``, ``unused``, ``fsdp1`` the strategy, ``compile`` the model. It calls
itself in its step then, as models do that have a ``forward``.
With ``gpu`` the ranks have a GPU each, and the recording has the default collectors too.
Writes ``rank{R}.json``: the losses, a digest of the weights, the bytes of the model's parameters.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FullyShardedDataParallel

from training import Perceptron, loader, trainer


class CallsItself(Perceptron):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(batch)
        return out

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self(batch).square().mean()
        return loss


class FSDPOnCpu(FSDPStrategy):
    """FSDP1 on a CPU: Lightning refuses its own class there, and torch needs the device."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def main(directory: Path, options: set[str]) -> None:
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(3)
    model, losses = Perceptron(), list[float]()
    callbacks: list[pl.Callback] = []
    if "bare" not in options:
        from lightning_memprof import Collector, MemProfilerCallback, OutputOptions, Schedule
        from lightning_memprof.collectors import ModuleMemory

        schedule = Schedule(wait=1, warmup=1, active=2)
        output = OutputOptions(on_error="raise", summary=False)
        collectors: list[Collector | Literal["default"]] = [ModuleMemory()]
        if options & {"gpu", "compile"}:
            collectors.append("default")
        callbacks.append(MemProfilerCallback(schedule=schedule, collectors=collectors, output=output))
    if "compile" in options:
        model = CallsItself()
        model.compile(backend="aot_eager")
    note = pl.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, __, outputs, *___: losses.append(float(outputs["loss"]))
    )
    strategy: Strategy = DDPStrategy(
        process_group_backend="gloo", static_graph="static" in options, find_unused_parameters="unused" in options
    )
    if "fsdp1" in options:
        strategy = FSDPOnCpu(auto_wrap_policy={nn.Sequential}, use_orig_params=True)
    whole = sum(4 * parameter.numel() for parameter in model.parameters())
    kept: list[str] = []

    def keep(*_: object) -> None:
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().cpu().numpy().tobytes())
        kept.append(digest.hexdigest())

    # FSDP1 returns its shards when the fit has ended.
    end = pl.callbacks.LambdaCallback(on_train_end=keep)
    accelerator = "gpu" if "gpu" in options else "cpu"
    training = trainer(directory, note, end, *callbacks, accelerator=accelerator, devices=world, strategy=strategy)
    training.fit(model, loader(12))
    graphs = counters["stats"]["unique_graphs"]
    facts = {"losses": losses, "weights": kept[0], "parameter_bytes": whole, "graphs": graphs}
    (directory / f"rank{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), set(sys.argv[2:]))
