"""Memory of one rank of several: closed forms of DDP and FSDP2."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprof import estimate
from lightning_memprof.errors import ConfigError
from lightning_memprof.estimation.ranks import ranks_of
from lightning_memprof.estimation.wanted import Wanted

pytestmark = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="estimates need a platform that can fork"
)
WIDTH = 512
WHOLE = 2 * (WIDTH * WIDTH + WIDTH) * 4


class Net(LightningModule):
    """Two blocks of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)))

    def training_step(self, batch: Any) -> Any:
        return self.blocks(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Sharded(Net):
    """Shards itself."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.blocks, mesh=self.device_mesh["data_parallel"])


class Tensors(Net):
    """Splits the first block's features, and the second block's inputs, among the ranks."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        plan: Any = {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()}
        first: Any = self.blocks[0]
        first.pop(1)
        parallelize_module(self.blocks, self.device_mesh["tensor_parallel"], plan)


class Redundant(Net):
    """Has the optimizer's state of a part of the parameters."""

    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.Adam)


def categories(devices: int, strategy: Any = None, net: type[Net] = Net) -> dict[str, int]:
    loader = DataLoader(TensorDataset(torch.zeros(8, WIDTH)), batch_size=8)
    found = estimate(net(), loader, device="H100 80GB", devices=devices, strategy=strategy, what_if=("none",))
    assert found.ranks == devices
    assert sum(found.categories.values()) == found.allocated_bytes
    return dict(found.categories)


def test_a_rank_of_ddp_has_everything_and_buckets_as_large_as_the_gradients() -> None:
    alone, rank = categories(1), categories(4, "ddp")
    assert rank.pop("communication") == alone["gradient"] == WHOLE
    assert rank == alone


@pytest.mark.parametrize(("strategy", "net"), [("fsdp", Net), ("fsdp2", Net), ("fsdp2", Sharded)])
def test_a_rank_of_fsdp_has_its_part_of_parameters_gradients_and_state(strategy: str, net: type[Net]) -> None:
    rank = categories(4, strategy, net)
    assert (rank["parameter"], rank["gradient"]) == (WHOLE // 4, WHOLE // 4)
    assert rank["optimizer_state"] == WHOLE // 2


def test_a_rank_of_tensor_parallel_has_its_part_of_weights_and_whole_biases_of_split_inputs() -> None:
    rank = categories(4, ModelParallelStrategy(1, 4), Tensors)
    whole = WIDTH * 4
    assert rank["parameter"] == rank["gradient"] == (WHOLE - whole) // 4 + whole
    assert rank["optimizer_state"] == 2 * rank["parameter"]


def test_a_rank_of_zero_has_the_state_of_its_parameters() -> None:
    rank = categories(2, "ddp", Redundant)
    assert (rank["parameter"], rank["gradient"], rank["optimizer_state"]) == (WHOLE, WHOLE, WHOLE)


def test_the_strategy_of_several_devices_is_ddp_where_none_is_named() -> None:
    assert ranks_of({"devices": 2}).kind == "ddp"
    assert ranks_of({"devices": [0, 1], "num_nodes": 2}).count == 4
    assert ranks_of({"devices": 1}).kind == ""


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"devices": 0}, "must be a number of at least 1"),
        ({"strategy": "zero9"}, "unknown strategy"),
        (
            {"strategy": "deepspeed_stage_2"},
            "is not simulated; ddp, fsdp and fsdp2 are; ZeRO stage 3 shards like fsdp2",
        ),
        ({"strategy": "fsdp_cpu_offload"}, "keeps parameters in host memory, which is not simulated"),
    ],
)
def test_wrong_ranks_are_refused_before_the_program_runs(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Wanted(**wanted)
