"""Memory of one rank of several: closed forms of DDP and FSDP2."""

from __future__ import annotations

import multiprocessing
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprof import estimate
from lightning_memprof.errors import ConfigError
from lightning_memprof.estimation.ranks import DDPBuckets, ranks_of
from lightning_memprof.estimation.wanted import Wanted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="estimates need a platform that can fork"
    ),
]
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


def hashed_elsewhere(value: object) -> int:
    caller = str(sys._getframe(1).f_globals["__name__"])
    assert not caller.startswith("lightning_memprof"), caller
    return id(value)


class Compared(nn.Sequential):
    """Is compared with nothing, and hashed by torch alone; torch's own FSDP2 compares modules."""

    def __eq__(self, _: object) -> bool:
        raise TypeError

    __hash__ = hashed_elsewhere


class Weight(nn.Parameter):
    __hash__ = hashed_elsewhere


class Hostile(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = Compared(*(Compared(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)))


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


class OwnUnits(Net):
    """Shards its blocks itself."""

    policy = OffloadPolicy()

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        for part in (*self.blocks, self):
            fully_shard(part, mesh=self.device_mesh["data_parallel"], offload_policy=self.policy)

    def forward(self, values: Any) -> Any:
        return self.blocks(values)

    def training_step(self, batch: Any) -> Any:
        return self(batch[0]).sum()


class Offloaded(OwnUnits):
    """Keeps the shards in host memory."""

    policy = CPUOffloadPolicy()


def of_batch(samples: int, net: type[Net] = Net, **wanted: Any) -> Any:
    loader = DataLoader(TensorDataset(torch.zeros(samples, WIDTH)), batch_size=samples)
    return estimate(net(), loader, device="H100 80GB", **{"what_if": ("none",), **wanted})


@pytest.mark.parametrize(("strategy", "net"), [("fsdp_cpu_offload", Net), ("fsdp2", Offloaded)])
def test_an_offloaded_rank_has_its_part_of_parameters_gradients_and_state_in_host_memory(
    strategy: str, net: type[Net]
) -> None:
    found = of_batch(8, net, devices=4, strategy=strategy)
    state = {"parameter", "gradient", "optimizer_state"}
    assert not state & set(found.categories)
    assert not state & set(found.live)
    # Adam counts the steps of each of the four parameters.
    expected = {"parameter": WHOLE // 4, "gradient": WHOLE // 4, "optimizer_state": WHOLE // 2 + 4 * 4}
    assert {name: found.host.categories[name] for name in state} == expected
    # FSDP1 keeps the parameters of the root, here all, after forward; those of units are gathered again for backward.
    times = 1 if strategy == "fsdp_cpu_offload" else 2
    assert found.host.to_device_bytes == times * WHOLE // 4 + 8 * WIDTH * 4
    assert found.host.to_host_bytes == WHOLE // 4
    assert any("override its model_to_device" in words for words in found.assumptions) == (strategy == "fsdp2")


def test_pinned_shards_take_powers_of_two_of_host_memory() -> None:
    found = of_batch(8, Offloaded, devices=3, strategy="fsdp2")
    rows = -(-WIDTH // 3)
    assert rows * WIDTH * 4 <= 2**19 < 2 * rows * WIDTH * 4
    assert found.host.categories["parameter"] == found.host.categories["gradient"] == 2 * (2**19 + 2**10)
    assert found.host.categories["optimizer_state"] == 2 * 2 * rows * (WIDTH + 1) * 4 + 4 * 4


def test_offloading_is_an_alternative_of_fsdp_and_equals_a_program_that_offloads() -> None:
    own = of_batch(8, Offloaded, devices=4, strategy="fsdp2")
    (changed,) = of_batch(8, OwnUnits, devices=4, strategy="fsdp2", what_if="offload").alternatives
    assert (changed.allocated_bytes, changed.reserved) == (own.allocated_bytes, own.reserved)
    assert changed.costs == f"the CPU runs the optimizer, {own.host.words()}"
    (alone,) = of_batch(8, what_if="offload").alternatives
    assert "offload needs FSDP" in alone.problem


def test_offloaded_activations_are_in_host_memory_between_forward_and_backward() -> None:
    kept = of_batch(4096, what_if="offload=activations")
    (changed,) = kept.alternatives
    assert kept.host.total_bytes < 2**10
    assert kept.allocated_bytes - changed.allocated_bytes >= 4096 * WIDTH * 4
    assert "of host memory, " in changed.costs


@pytest.mark.parametrize(
    ("strategy", "is_one"),
    [
        (FSDPStrategy(), True),
        (FSDPStrategy(auto_wrap_policy={nn.Sequential}), False),
        (FSDPStrategy(sharding_strategy="NO_SHARD"), False),
        ("fsdp2", False),
        ("ddp", False),
    ],
)
def test_a_model_that_fsdp_gathers_all_at_once_is_named(strategy: Any, is_one: bool) -> None:
    found = of_batch(8, devices=4, strategy=strategy)
    assert any("the whole model is gathered at once" in words for words in found.assumptions) == is_one


class Stage(Net):
    """Has no blocks on the first of two ranks."""

    def configure_model(self) -> None:
        self.blocks = self.blocks if self.global_rank else nn.Sequential(nn.Linear(WIDTH, 1))


def test_ranks_with_models_of_their_own_are_estimated_and_the_largest_is_the_result() -> None:
    strategy = ModelParallelStrategy(1, 2)
    found = of_batch(8, Stage, devices=2, strategy=strategy, rank="all")
    assert found.assumptions[0] == "rank 1 of 2 needs most, and its figures are shown"
    assert found.assumptions[1].startswith("rank 1 is simulated;")
    assert found.categories["parameter"] == WHOLE
    other, own = found.alternatives
    small = of_batch(8, Stage, devices=2, strategy=strategy, rank=0)
    assert (other.change, other.allocated_bytes) == ("rank=0", small.allocated_bytes)
    assert (own.change, own.allocated_bytes) == ("rank=1", found.allocated_bytes)
    assert "model parallel on 2 devices" in " ".join(str(found).split())
    assert small.categories["parameter"] == WIDTH * 4 + 512
    with pytest.raises(ConfigError, match="--rank 2: the training has 2 ranks"):
        of_batch(8, Stage, devices=2, strategy=strategy, rank=2)


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
    ],
)
def test_wrong_ranks_are_refused_before_the_program_runs(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Wanted(**wanted)


def test_modules_are_told_apart_by_identity() -> None:
    assert categories(2, "ddp", Hostile) == categories(2, "ddp")


def test_parameters_of_buckets_are_told_apart_by_identity() -> None:
    weights = [Weight(torch.ones(4)), Weight(torch.ones(2))]
    tracer: Any = SimpleNamespace(making=lambda _: nullcontext())
    buckets = DDPBuckets(weights, {"gradient_as_bucket_view": True}, tracer, lambda: True)
    for weight in weights:
        weight.sum().backward()
    buckets.begin_step(1)
    assert [weight.grad is not None and weight.grad.shape for weight in weights] == [(4,), (2,)]
