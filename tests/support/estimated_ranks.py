"""One rank of fits under FSDP2, DDP and FSDP1 on gloo: ``python estimated_ranks.py DIRECTORY CASE...``.

Writes ``rank{R}.json``: for each case the peak of the third step by category, in bytes, as ModuleMemory tracked it.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from fitted_ranks import FSDPOnCpu
from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule, estimate
from lightning_memprof.collectors import ModuleMemory
from lightning_memprof.demo.train import Block, GPTConfig
from recorded_rows import read_series
from training import trainer

WORLD: Final = 2
_HALF: Final = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Net(pl.LightningModule):
    """Blocks, of which each is a unit of FSDP2 as well as the whole."""

    is_checkpointed = False
    # Activations are most of the peak: a thread of gloo may free the buffers of a unit a little later.
    samples = 512

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.build()

    def build(self) -> None:
        """Widths that two ranks cannot halve."""
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(17, 33), nn.GELU(), nn.Linear(33, 17)) for _ in range(3))

    def sample(self) -> Tensor:
        return torch.randn(17)

    def configure_model(self) -> None:
        if self.device_mesh is None or hasattr(self, "is_sharded"):
            return
        self.is_sharded = True
        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"], **self.options)
        fully_shard(self, mesh=self.device_mesh["data_parallel"], **self.options)

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = checkpoint(block, values, use_reentrant=False) if self.is_checkpointed else block(values)
        return values

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found: Tensor = self(batch).float().square().mean()
        return found

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Direct(Net):
    """Calls its blocks without ``forward``, so that each of them is a root of FSDP2 and stays gathered."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()


class Gpt(Net):
    samples = 32

    def build(self) -> None:
        config = GPTConfig(vocabulary=67, context=16, width=32, heads=2, layers=3)
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = nn.Linear(config.width, config.vocabulary)

    def sample(self) -> Tensor:
        return torch.randint(0, 67, (16,))

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.head(super().forward(self.tokens(values)))
        return found

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch).flatten(0, 1).float(), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _Checkpointed(Gpt):
    is_checkpointed = True
    # It saves fewer activations for each sample.
    samples = 64


class Pipeline(pl.LightningModule):
    """A stage of a pipeline, which the module makes by its rank: the first one is wider."""

    samples = 512
    widths = (64, 96, 16)

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.schedule: ScheduleGPipe | None = None

    def sample(self) -> Tensor:
        return torch.randn(self.widths[0])

    def configure_model(self) -> None:
        if self.device_mesh is not None and not hasattr(self, "net"):
            rank = self.device_mesh["tensor_parallel"].get_local_rank()
            self.net = nn.Sequential(nn.Linear(self.widths[rank], self.widths[rank + 1]), nn.GELU())

    def _schedule(self, batch: Tensor) -> ScheduleGPipe:
        assert self.device_mesh is not None
        rank, chunk = self.device_mesh["tensor_parallel"].get_local_rank(), len(batch) // 2
        shapes = [torch.empty(chunk, width, device=self.device) for width in self.widths[rank : rank + 2]]
        shapes[0].requires_grad_(rank > 0)
        shapes[1].requires_grad_()
        group = self.device_mesh["tensor_parallel"].get_group()
        stage = PipelineStage(self.net, rank, WORLD, self.device, shapes[0], shapes[1], group=group)
        return ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.schedule = self.schedule or self._schedule(batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if self.global_rank == 0:
            self.schedule.step(batch)
        else:
            self.schedule.step(target=batch[:, : self.widths[-1]])
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _sharded() -> Strategy:
    return ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1)


def _replicated(**options: Any) -> Callable[[], Strategy]:
    return lambda: DDPStrategy(process_group_backend="gloo", **options)


def _flat(**options: Any) -> Callable[[], Strategy]:
    return lambda: FSDPOnCpu(auto_wrap_policy={Block}, use_orig_params=True, **options)


def _staged() -> Strategy:
    return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=WORLD)


Case = tuple[Callable[[], Net | Pipeline], Callable[[], Strategy], dict[str, Any]]
CASES: Final[MappingProxyType[str, Case]] = MappingProxyType(
    {
        "gpt": (Gpt, _sharded, {}),
        "gpt-checkpointed": (_Checkpointed, _sharded, {}),
        "gpt-no-reshard": (lambda: Gpt(reshard_after_forward=False), _sharded, {}),
        "gpt-bf16-policy": (lambda: Gpt(mp_policy=_HALF), _sharded, {}),
        "gpt-accumulated": (Gpt, _sharded, {"accumulate_grad_batches": 2}),
        "mlp-sgd": (Net, _sharded, {}),
        "mlp-direct": (Direct, _sharded, {}),
        "ddp-buckets": (Gpt, _replicated(bucket_cap_mb=0.01), {}),
        "ddp-static": (Gpt, _replicated(static_graph=True), {}),
        "ddp-unused": (Gpt, _replicated(find_unused_parameters=True), {}),
        "ddp-views-accumulated": (Gpt, _replicated(gradient_as_bucket_view=True), {"accumulate_grad_batches": 2}),
        "ddp-bf16-mixed": (Gpt, _replicated(), {"precision": "bf16-mixed"}),
        "pipeline": (Pipeline, _staged, {}),
        "fsdp1": (Gpt, _flat(), {}),
        "fsdp1-grad-op": (Gpt, _flat(sharding_strategy="SHARD_GRAD_OP"), {}),
    }
)


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of all storages that operators make and that live.

    Attributes:
        peak: most of them since ``begin``.

    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def begin(self) -> None:
        # A thread of gloo may free a tensor at any moment: one operation copies the values.
        self.peak = sum(list(self._sizes.values()))

    def __enter__(self) -> _Live:  # noqa: PYI034 Python 3.10 has no Self
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._sizes[storage._cdata] = size
            return result

        # No dispatch mode sees a storage change its size, as FSDP1's gathered parameters do.
        self._watch = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        self._watch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        self._watch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._sizes:
                    weakref.finalize(storage, self._sizes.pop, storage._cdata)
                self._sizes[storage._cdata] = storage.nbytes()
        self.peak = max(self.peak, sum(list(self._sizes.values())))
        return result


def _data(model: Net | Pipeline, batches: int) -> Any:
    torch.manual_seed(1)
    samples: Any = [model.sample() for _ in range(model.samples * WORLD * batches)]
    return DataLoader(samples, batch_size=model.samples)


def estimated(name: str, directory: Path, rank: int = 0) -> dict[str, int]:
    """Return the estimated peak of a rank's third step by category, in bytes."""
    make, strategy, options = CASES[name]
    model = make()
    planned = trainer(directory, strategy=strategy(), devices=WORLD, **options)
    found = estimate(model, _data(model, 3), trainer=planned, device="cpu", what_if=("none",), rank=rank)
    moments = [dict(zip(found.live, values, strict=True)) for values in zip(*found.live.values(), strict=True)]
    return {kind: count for kind, count in max(moments, key=lambda moment: sum(moment.values())).items() if count}


def _live(name: str, directory: Path) -> dict[str, int]:
    make, strategy, options = CASES[name]
    accumulated = options.get("accumulate_grad_batches", 1)
    data = _data(make(), 3 * accumulated)
    with _Live() as live:
        model = make()

        def begin(_: object, __: object, ___: object, index: int) -> None:
            if index == 2 * accumulated:
                live.begin()

        begins = pl.callbacks.LambdaCallback(on_train_batch_start=begin)
        batches = 3 * accumulated
        real = trainer(directory, begins, strategy=strategy(), devices=WORLD, limit_train_batches=batches, **options)
        real.fit(model, data)
        return {"total": live.peak}


def _tracked(name: str, directory: Path, rank: int) -> dict[str, int]:
    make, strategy, options = CASES[name]
    if not name.startswith(("gpt", "mlp")):
        return _live(name, directory)
    torch.manual_seed(0)
    model = make()
    batches = 3 * options.get("accumulate_grad_batches", 1)
    ours = MemProfilerCallback(
        schedule=Schedule(wait=batches - 2, warmup=1, active=1),
        collectors=[ModuleMemory()],
        output=OutputOptions(on_error="raise", summary=False),
    )
    real = trainer(directory, ours, strategy=strategy(), devices=WORLD, limit_train_batches=batches, **options)
    real.fit(model, _data(model, batches))
    (series,) = directory.glob(f"**/window000/rank{rank:05d}.module_memory.jsonl")
    (peak,) = [row for row in read_series(series) if row["kind"] == "peak"]
    return {kind: count for kind, count in peak["categories"].items() if count}


def _main(directory: Path, names: list[str]) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    peaks = {name: _tracked(name, directory / name, rank) for name in names}
    (directory / f"rank{rank}.json").write_text(json.dumps(peaks))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2:])
