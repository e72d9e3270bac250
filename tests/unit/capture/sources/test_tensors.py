from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memprof.capture.sources.tensors import (
    ModelTensors,
    PersistentBytes,
    batch_bytes,
    fold,
    local_bytes,
    optimizer_state_bytes,
    storage_sizes,
    storages,
    tensors_in,
)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4, bias=False)])
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(3))


def counted(model: nn.Module, *optimizers: torch.optim.Optimizer) -> tuple[dict[str, int], dict[str, list[int]]]:
    return PersistentBytes(ModelTensors(model)).count(optimizers)


@pytest.mark.parametrize("width", [8, 33, 128])
def test_with_adamw_in_float32_every_category_has_its_closed_form(width: int) -> None:
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    numbers = width * width + width + width + 1
    model(torch.randn(2, width)).sum().backward()
    optimizer.step()
    assert counted(model, optimizer)[0] == {
        "parameter_bytes": 4 * numbers,
        "buffer_bytes": 0,
        "gradient_bytes": 4 * numbers,
        "optimizer_state_bytes": 2 * 4 * numbers + 4 * 4,
    }
    optimizer.zero_grad()
    assert counted(model, optimizer)[0]["gradient_bytes"] == 0


def test_modules_hold_what_is_below_them_and_a_shared_parameter_once() -> None:
    model = Two()
    model.scale.grad = torch.ones(3)
    model.embedding.weight.grad = torch.zeros(10, 4)
    held, parameters = counted(model)
    assert parameters == {
        "": [160 + 80 + 32 + 64 + 12, 160 + 12],
        "embedding": [160, 160],
        "blocks": [80 + 32 + 64, 0],
        "blocks.0": [80 + 32, 0],
        "blocks.0.0": [80, 0],
        "blocks.0.1": [32, 0],
        "blocks.1": [64, 0],
        "head": [160, 160],
    }
    assert held["parameter_bytes"] == parameters[""][0] == sum(parameter.nbytes for parameter in model.parameters())
    assert held["buffer_bytes"] == 16 + 16 + 8


def test_a_module_under_two_names_counts_once_above_both() -> None:
    shared = nn.Linear(4, 4, bias=False)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    assert counted(model)[1] == {"": [64, 0], "a": [64, 0], "a.0": [64, 0], "b": [64, 0], "b.0": [64, 0]}


def test_what_changes_between_two_steps_is_counted_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    held = PersistentBytes(ModelTensors(model))
    size = 2 * (64 + 16)
    assert held.count([optimizer])[0]["gradient_bytes"] == 0
    model(torch.randn(2, 4)).sum().backward()
    assert held.count([optimizer])[0]["gradient_bytes"] == size
    assert held.count([optimizer])[1]["0"] == [80, 80]
    optimizer.step()
    assert held.count([optimizer])[0]["optimizer_state_bytes"] == size
    model[0].weight.data = model[0].weight.data.double()
    assert held.count([optimizer])[0]["parameter_bytes"] == size + 64
    model[1].register_parameter("bias", None)
    assert held.count([optimizer])[0]["parameter_bytes"] == size + 64 - 16


def test_gradients_that_move_to_another_module_of_the_same_size_are_counted_there() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    held = PersistentBytes(ModelTensors(model))
    for name, other in (("0", "1"), ("1", "0")):
        model.zero_grad()
        model.get_submodule(name)(torch.randn(2, 4)).sum().backward()
        parameters = held.count([])[1]
        assert (parameters[name], parameters[other]) == ([80, 80], [80, 0])


def test_an_unchanged_step_is_not_counted_again() -> None:
    model = nn.Linear(4, 4)
    held = PersistentBytes(ModelTensors(model))
    assert held.count([])[0] is held.count([])[0]


def test_an_optimizer_that_keeps_lists_of_tensors_is_counted_in_every_step() -> None:
    weight = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.LBFGS([weight], max_iter=1, history_size=3)
    held, model = [], nn.ParameterList([weight])
    counter = PersistentBytes(ModelTensors(model))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight.square() * torch.arange(5.0)).sum()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
        held.append(counter.count([optimizer])[0]["optimizer_state_bytes"])
    assert held[0] < held[1] < held[2]


def test_gradients_that_are_views_of_one_bucket_count_the_bucket_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    bucket, start = torch.zeros(50), 0
    for parameter in model.parameters():
        parameter.grad = bucket[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    held, parameters = counted(model)
    assert held["gradient_bytes"] == 200
    assert parameters[""][1] == 160


def test_sparse_gradients_count_their_parts_anew_in_every_step() -> None:
    embedding = nn.Embedding(100, 4, sparse=True)
    held = PersistentBytes(ModelTensors(embedding))
    for rows in (3, 5):
        embedding.zero_grad()
        embedding(torch.arange(rows)).sum().backward()
        assert held.count([])[0]["gradient_bytes"] == rows * (4 * 4 + 8)
        assert held.count([])[1][""] == [1600, rows * (4 * 4 + 8)]


def test_parameters_that_are_not_initialised_yet_have_no_bytes() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    held = PersistentBytes(ModelTensors(model))
    assert held.count([])[0]["parameter_bytes"] == 20
    model(torch.randn(2, 3))
    assert held.count([])[0]["parameter_bytes"] == 20 + 4 * 4 * 4


def test_a_model_keeps_no_parameter_alive() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    tensors = ModelTensors(model)
    weight = weakref.ref(model[0].weight)
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    assert weight() is None
    assert len(tensors.parameters()) == 2


def test_storage_keys_are_those_of_parameters_and_buffers() -> None:
    model = Two()
    keys = ModelTensors(model).storage_keys()
    assert keys == set(storage_sizes([*model.parameters(), *model.buffers()]))
    assert model.head.weight.t().untyped_storage()._cdata in keys
    assert torch.ones(3).untyped_storage()._cdata not in keys


@dataclass
class Pair:
    first: torch.Tensor
    rest: Any


def test_tensors_are_found_in_whatever_a_batch_is_made_of() -> None:
    a, b, c, d = (torch.zeros(number) for number in (1, 2, 3, 4))
    assert [len(tensor) for tensor in tensors_in({"x": [a, (b, "text")], "y": Pair(c, {"z": d}), "n": 3})] == [
        1,
        2,
        3,
        4,
    ]
    endless: list[Any] = [a]
    endless.append(endless)
    assert next(iter(tensors_in(endless))) is a
    assert sum(1 for _ in tensors_in(endless)) < 100


def test_a_batch_counts_what_it_shows_of_a_storage_and_overlapping_views_once() -> None:
    data, text = torch.zeros(100, 8), torch.zeros(10)
    data_key = data.untyped_storage()._cdata
    assert batch_bytes(data[3]) == (8 * 4, {data_key})
    assert batch_bytes((data[:4, :-1], data[:4, 1:])) == (2 * 4 * 7 * 4, {data_key})
    assert batch_bytes((text[:-1], text[1:])) == (40, set())
    assert batch_bytes({"x": torch.zeros(3), "y": torch.zeros(2, dtype=torch.int64), "name": "a"}) == (12 + 16, set())
    assert batch_bytes("nothing") == (0, set())


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_storages_of_sparse_tensors_are_those_of_their_parts() -> None:
    values, indices = 4 * 4, 4 * 8
    listed, rows, columns = torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr(), torch.eye(4).to_sparse_csc()
    assert local_bytes(listed) == values + 2 * indices == sum(storage.nbytes() for storage in storages(listed))
    assert local_bytes(rows) == local_bytes(columns) == values + indices + 5 * 8
    assert len(list(storages(rows))) == len(list(storages(columns))) == 3


def test_sparse_parameters_and_buffers_are_counted_by_their_parts_each_time() -> None:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.eye(4).to_sparse()))
    held = PersistentBytes(ModelTensors(model))
    sizes, modules = held.count([])
    assert modules[""] == [sizes["parameter_bytes"], 0] == [4 * 4 + 2 * 4 * 8, 0]
    model.weight.data = torch.ones(4, 4).to_sparse()
    assert held.count([])[0]["parameter_bytes"] == 16 * 4 + 2 * 16 * 8
    model.register_buffer("edges", torch.eye(2).to_sparse())
    assert counted(model)[0]["buffer_bytes"] == 2 * 4 + 2 * 2 * 8


def test_optimizer_state_counts_what_two_entries_share_once() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight])
    shared = torch.zeros(6)
    optimizer.state[weight] = {"a": shared, "b": shared.view(2, 3), "c": [torch.zeros(1), None], "d": 3}
    assert optimizer_state_bytes([optimizer]) == 24 + 4


def test_sums_go_up_the_tree() -> None:
    assert fold(["", "a", "a.b", "c"], {"a.b": 3, "c": 4, "": 1}) == {"": 8, "a": 3, "a.b": 3, "c": 4}


def test_a_buffer_that_grows_is_counted_anew() -> None:
    model = nn.BatchNorm1d(4)
    held = PersistentBytes(ModelTensors(model))
    before = held.count([])[0]["buffer_bytes"]
    model.running_mean = torch.zeros(1004)
    assert held.count([])[0]["buffer_bytes"] == before + 4000


def test_what_is_on_the_meta_device_takes_no_bytes() -> None:
    model = nn.Sequential(nn.Linear(8, 4, device="meta"), nn.Linear(4, 2))
    held, modules = counted(model)
    assert held["parameter_bytes"] == modules[""][0] == modules["1"][0] == 4 * (4 * 2 + 2)


def test_parameters_and_buffers_of_a_scripted_module_count_as_any() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    assert counted(nn.Sequential(torch.jit.script(model)))[0] == counted(model)[0]


def test_no_torch_function_of_the_programs_is_called() -> None:
    class Noisy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise AssertionError

    noisy = torch.ones(6).as_subclass(Noisy)
    assert [storage.nbytes() for storage in storages(noisy)] == [24]
    assert local_bytes(noisy) == 24
