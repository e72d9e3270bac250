"""One rank of a fit on gloo: ``python fitted_ranks.py DIRECTORY KIND RECORDING [OPTION=VALUE ...]``.

KIND is a model with its strategy, of ``KINDS``. RECORDING is ``bare``, a name in ``recorders.RECORDERS``, or arguments
of a MemProfilerCallback as Python code. With ``profiler=yes`` the profiler records too, with ``gpu=yes`` the ranks have
a GPU each, ``die=STEP`` kills rank 1, and with ``lone=RANK`` one rank alone records.
Writes ``rank{R}.json``: the losses, a digest of this rank's weights and their bytes, the bytes and the number of the
model's parameters, the graphs that were compiled, whether FSDP's hooks are as before, and with ``count=yes`` the
collectives that were called before the first batch and after it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import lightning_memprof
from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, collectors
from lightning_memprof.integration import place
from recorders import RECORDERS
from training import Perceptron, loader, trainer

RANK: Final = int(os.environ.get("LOCAL_RANK", "0"))
WORLD: Final = int(os.environ.get("WORLD_SIZE", "1"))
COLLECTIVES: Final = (
    "broadcast", "broadcast_object_list", "all_reduce", "all_gather", "all_gather_object", "barrier", "gather",
    "gather_object", "scatter", "reduce", "monitored_barrier",
)  # fmt: skip


class CallsItself(Perceptron):
    """Is compiled, and calls itself in its step, as models do that have a ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="aot_eager")

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(batch)
        return out

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self(batch).square().mean()
        return loss


class Checkpointed(Perceptron):
    """Computes its network again in the backward."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = checkpoint(self.net, batch, use_reentrant=False).square().mean()
        return loss


class Blocks(Perceptron):
    """Three blocks of eight by eight; the batch is cloned, so that its storage is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(batch.clone())


class ShardedBlocks(Blocks):
    """Each block is a group of its own; the last parameters to be gathered stay gathered until the backward."""

    def configure_model(self) -> None:
        shard(self, *self.net, self.net)


class Sharded(Perceptron):
    """A last layer that two ranks cannot halve."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 5))

    def configure_model(self) -> None:
        shard(self, self.net[0], self.net)


class ShardedTogether(Sharded):
    """Two modules are one group."""

    def configure_model(self) -> None:
        shard(self, [self.net[0], self.net[2]], self.net)


class ShardedCheckpointed(Sharded, Checkpointed):
    """Gathers its parameters again in the backward, to compute its network."""


class Divided(Perceptron):
    """A layer divided by columns, one divided by rows, and a head that every rank has; shared by pairs of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 1)

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        if WORLD > 2:
            shard(self, self.net)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.net(batch)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-2, momentum=0.9)


class FSDPOnCpu(FSDPStrategy):
    """FSDP1 on a CPU: Lightning refuses its own class there, and torch needs the device."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def shard(model: pl.LightningModule, *parts: Any) -> None:
    assert model.device_mesh is not None
    for part in parts:
        fully_shard(part, mesh=model.device_mesh["data_parallel"])


def replicated(**options: Any) -> Callable[[], Strategy]:
    return lambda: DDPStrategy(process_group_backend="gloo", **options)


def sharded() -> Strategy:
    return ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1)


KINDS: Final[Mapping[str, tuple[type[Perceptron], Callable[[], Strategy]]]] = MappingProxyType(
    {
        "ddp": (Perceptron, replicated()),
        "ddp-static": (Perceptron, replicated(static_graph=True)),
        "ddp-static-checkpointed": (Checkpointed, replicated(static_graph=True)),
        "ddp-unused": (Perceptron, replicated(find_unused_parameters=True)),
        "ddp-compiled": (CallsItself, replicated()),
        "ddp-blocks": (Blocks, replicated()),
        "fsdp1": (Perceptron, lambda: FSDPOnCpu(auto_wrap_policy={nn.Sequential}, use_orig_params=True)),
        "fsdp2": (Sharded, sharded),
        "fsdp2-group": (ShardedTogether, sharded),
        "fsdp2-checkpointed": (ShardedCheckpointed, sharded),
        "fsdp2-blocks": (ShardedBlocks, sharded),
        "tensor": (Divided, lambda: ModelParallelStrategy(data_parallel_size=WORLD // 2, tensor_parallel_size=2)),
    }
)


class Noted(pl.Callback):
    """Notes the facts of a fit."""

    def __init__(self, model: nn.Module, die: int) -> None:
        self.die = die
        self.phase = "setup"
        self.calls: Counter[str] = Counter()
        self.losses: list[float] = []
        self.hooks: list[Any] = []
        whole = list(model.parameters())
        self.facts: dict[str, Any] = {
            "parameters": len(whole), "parameter_bytes": sum(4 * parameter.numel() for parameter in whole),
        }  # fmt: skip

    def count_collectives(self) -> None:
        for name in COLLECTIVES:
            setattr(dist, name, self.counted(name, getattr(dist, name)))

    def counted(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[f"{self.phase}.{name}"] += 1
            return original(*args, **kwargs)

        return call

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.phase = "training"
        self.hooks = hooks_of(module)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if RANK == 1 and trainer.global_step == self.die:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # FSDP1 returns its shards when the fit has ended.
        digest, size = hashlib.sha256(), 0
        for parameter in module.parameters():
            local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            digest.update(local.detach().cpu().contiguous().numpy().tobytes())
            size += 4 * local.numel()
        self.facts |= {"weights": digest.hexdigest(), "local_bytes": size}


def hooks_of(model: nn.Module) -> list[Any]:
    """Return what FSDP adds to the modules, in its order."""
    return [
        (list(module._forward_pre_hooks.items()), list(module._forward_hooks.items())) for module in model.modules()
    ]


def recording(text: str) -> dict[str, Any]:
    """Return arguments of a Trainer."""
    if text == "bare":
        return {}
    if text in RECORDERS:
        return RECORDERS[text]()
    names = vars(collectors) | {name: getattr(lightning_memprof, name) for name in lightning_memprof.__all__}
    arguments = eval(f"dict({text})", names)  # noqa: S307 a test's own
    arguments.setdefault("output", OutputOptions(on_error="raise", summary=False))
    return {"callbacks": [MemProfilerCallback(**arguments)]}


def main(directory: Path, kind: str, text: str, options: dict[str, str]) -> None:
    torch.manual_seed(3)
    make, strategy = KINDS[kind]
    if "lone" in options:
        # It waits for the directory of a rank that claims none.
        place._PATIENCE = timedelta(seconds=2)  # type: ignore[misc]
        text = text if options["lone"] == str(RANK) else "bare"
    model, ours = make(), recording(text)
    if "profiler" in options:
        ours["profiler"] = ExtendedPyTorchProfiler()
    noted = Noted(model, int(options.get("die", "-1")))
    training = trainer(
        directory, *ours.pop("callbacks", []), noted, accelerator="gpu" if "gpu" in options else "cpu", devices=WORLD,
        strategy=strategy(), **ours,
    )  # fmt: skip
    if "count" in options:
        noted.count_collectives()
    training.fit(model, loader(16))
    noted.facts |= {
        "losses": noted.losses, "graphs": counters["stats"]["unique_graphs"], "calls": noted.calls,
        "hooks_are_back": hooks_of(model) == noted.hooks,
    }  # fmt: skip
    (directory / f"rank{RANK}.json").write_text(json.dumps(noted.facts))


if __name__ == "__main__":
    words = dict((argument + "=").split("=")[:2] for argument in sys.argv[4:])
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], words)
