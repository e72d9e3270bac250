from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memprof.capture.sources.saved_graph import SavedGraph, SavedStorages
from lightning_memprof.capture.sources.tensors import ModelTensors


class Packed:
    """An independent count: what saved-tensor hooks are handed, each storage once, parameters and buffers left out."""

    def __init__(self, model: nn.Module) -> None:
        self.left_out = {
            parameter.untyped_storage().data_ptr() for parameter in (*model.parameters(), *model.buffers())
        }
        self.kept: dict[int, torch.UntypedStorage] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.left_out:
            self.kept[storage.data_ptr()] = storage
        return tensor.detach()

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.kept.values())


def by_hooks(model: nn.Module, loss: Callable[[], torch.Tensor]) -> int:
    packed = Packed(model)
    with torch.autograd.graph.saved_tensors_hooks(packed.pack, lambda tensor: tensor):
        kept = loss()
    assert kept.grad_fn is not None
    return packed.bytes


def by_graph(model: nn.Module, loss: torch.Tensor) -> SavedStorages:
    return SavedGraph().read(loss, ModelTensors(model).storage_keys())


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, dropout=0.1)
        self.head = nn.Linear(16, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(rows)[0])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(rows.abs().mul(10).long() % 32))).log_softmax(-1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 4))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)
    )


@pytest.mark.parametrize(
    ("make", "shape"),
    [(mlp, (6, 8)), (cnn, (2, 3, 8, 8)), (Tied, (2, 7)), (Lstm, (5, 2, 8))],
    ids=["mlp", "cnn", "transformer with shared embeddings", "lstm"],
)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16 autocast"])
def test_the_bytes_are_those_that_hooks_would_be_handed(
    make: Callable[[], nn.Module], shape: tuple[int, ...], autocast: bool
) -> None:
    torch.manual_seed(1)
    model, rows = make(), torch.randn(shape)

    def loss() -> torch.Tensor:
        # oneDNN has no bfloat16 LSTM on processors without AVX-512; torch's own kernels run everywhere.
        native = torch.backends.mkldnn.flags(enabled=not autocast)
        with native, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return (model(rows).float() * 2.5).square().mean() / 3

    expected = by_hooks(model, loss)
    assert expected > 0
    assert by_graph(model, loss()).bytes == expected


def test_one_tensor_that_is_saved_twice_and_by_views_counts_once_for_who_saved_it_first() -> None:
    value = torch.randn(10, 10, requires_grad=True) * 1.0
    first = value.square()
    first_number = torch._C._autograd._get_sequence_nr() - 1
    loss = (first + value.view(100).square().view(10, 10) + value.t() * value).sum()
    found = SavedGraph().read(loss)
    assert [(number, size) for number, size, _, _ in found.storages] == [(first_number, 400)]


def test_numbers_of_the_program_do_not_count_and_its_own_scalars_do() -> None:
    value = torch.randn(3, requires_grad=True)
    assert SavedGraph().read((value * 2.5).sum()).bytes == 0
    wide = torch.tensor(2.5, dtype=torch.float64)
    assert SavedGraph().read((value * wide).sum()).bytes == 8
    assert SavedGraph().read((value * torch.tensor(2.0)).sum()).bytes == 4


def test_double_backward_adds_what_the_first_backward_saved() -> None:
    model = mlp()
    rows = torch.randn(6, 8, requires_grad=True)

    def loss() -> torch.Tensor:
        out = model(rows).sum()
        (slope,) = torch.autograd.grad(out, rows, create_graph=True)
        return out + slope.square().sum()

    torch.manual_seed(1)
    expected = by_hooks(model, loss)
    torch.manual_seed(1)
    found = by_graph(model, loss())
    torch.manual_seed(1)
    assert found.bytes == expected > by_graph(model, model(rows).sum()).bytes


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        kept = value + 1
        ctx.save_for_backward(kept, None)
        ctx.hidden = value + 2
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        assert ctx.saved_tensors
        return gradients[0] * 2


def test_a_custom_function_counts_what_it_saved_for_backward_and_not_what_it_keeps_on_its_context() -> None:
    loss = Doubled.apply(torch.randn(25, requires_grad=True)).sum()
    assert SavedGraph().read(loss).bytes == 100


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_counts_its_inputs_and_is_not_recomputed(reentrant: bool) -> None:
    calls = 0

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return self.inner(rows)

    model, given = Counting(), torch.randn(6, 8, requires_grad=True)

    def loss() -> torch.Tensor:
        return checkpoint(model, given * 3.0, use_reentrant=reentrant).sum()

    expected = by_hooks(model, loss)
    calls = 0
    found = by_graph(model, made := loss())
    assert (found.bytes, calls, found.uncounted) == (expected, 1, 0)
    assert found.bytes == 6 * 8 * 4
    made.backward()
    assert calls == 2


def test_checkpoints_inside_checkpoints_count_the_outer_ones_inputs() -> None:
    inner, given = mlp(), torch.randn(6, 8, requires_grad=True)

    def outer(rows: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, rows * 2.0, use_reentrant=False) + rows.sum()

    found = by_graph(inner, checkpoint(outer, given * 1.0, use_reentrant=False).sum())
    assert found.bytes == 6 * 8 * 4


def test_what_the_programs_own_hooks_moved_away_is_counted_where_it_is() -> None:
    model, rows = nn.Linear(8, 4), torch.randn(6, 8)
    with torch.autograd.graph.save_on_cpu():
        loss = model(rows).square().sum()
    assert by_graph(model, loss).bytes >= 6 * 8 * 4 + 6 * 4 * 4
    with torch.autograd.graph.saved_tensors_hooks(lambda _: "gone", lambda _: rows):
        loss = rows.requires_grad_().square().sum()
    assert SavedGraph().read(loss) == SavedStorages([], 1)


def test_a_graph_that_was_released_keeps_nothing() -> None:
    value = torch.randn(4, requires_grad=True)
    loss = Doubled.apply(value.square()).sum()
    loss.backward()
    assert SavedGraph().read(loss).storages == []


def test_the_in_place_error_that_autograd_raises_is_raised_after_a_reading() -> None:
    value = torch.randn(4, requires_grad=True)
    middle = value * 1.0
    loss = middle.square().sum()
    assert SavedGraph().read(loss).bytes == 16
    middle.add_(1)
    assert SavedGraph().read(loss).bytes == 16
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_reading_moves_no_sequence_number_and_keeps_no_tensor() -> None:
    graph, model = SavedGraph(), mlp()
    hidden = model(torch.randn(6, 8))
    loss = hidden.sum()
    before = torch._C._autograd._get_sequence_nr()
    graph.read(loss)
    assert torch._C._autograd._get_sequence_nr() == before
    kept = weakref.ref(hidden)
    del hidden, loss
    gc.collect()
    assert kept() is None


def test_a_loss_without_a_graph_keeps_nothing() -> None:
    assert SavedGraph().read(torch.ones(3, requires_grad=True)).storages == []
    assert SavedGraph().read(torch.ones(3)).storages == []


def test_a_trained_parameter_outside_of_the_model_does_not_count_and_a_plain_tensor_does() -> None:
    trained, plain = nn.Parameter(torch.randn(4, 4)), torch.randn(4, 4)
    value = torch.randn(2, 4, requires_grad=True) * 1.0
    assert SavedGraph().read((value @ trained).sum()).bytes == 2 * 4 * 4
    assert SavedGraph().read((value @ plain).sum()).bytes == 4 * 4 * 4


def test_parameters_of_others_are_left_out_of_every_graph_and_the_models_own_need_no_second_look() -> None:
    model, others = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
    graph, keys = SavedGraph(), ModelTensors(model).storage_keys()
    rows = torch.randn(2, 4)
    for _ in range(2):
        assert graph.read((model(rows) @ others).sum(), keys).bytes == 2 * rows.nbytes
    for _ in range(3):
        assert graph.read(model(rows).square().sum(), keys).bytes == 2 * rows.nbytes


class Unchecked(torch.autograd.Function):
    """Keeps a tensor where a compiled function keeps those that need no version check."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        ctx._tensors_no_vc_check = [torch.zeros(10)]
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


def test_what_a_compiled_function_keeps_beside_its_saved_tensors_counts() -> None:
    value = torch.randn(25, requires_grad=True) * 1.0
    assert SavedGraph().read(Unchecked.apply(value).sum()).bytes == 100 + 40


def test_sparse_tensors_count_their_parts() -> None:
    weights = torch.eye(5).to_sparse()
    rows = torch.randn(5, 3, requires_grad=True)
    found = SavedGraph().read(torch.sparse.mm(weights, rows).sum())
    assert found.uncounted == 0
    assert found.bytes == 5 * 4 + 2 * 5 * 8


@pytest.mark.slow
def test_a_compiled_function_counts_what_its_backward_keeps() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    rows = torch.randn(6, 8)
    eager = by_graph(model, model(rows).sum()).bytes
    compiled = torch.compile(model, backend="aot_eager")
    found = by_graph(model, compiled(rows).sum()).bytes
    assert eager == found


def test_a_graph_of_twenty_thousand_nodes_is_read_without_recursion() -> None:
    value = torch.randn(3, requires_grad=True)
    for _ in range(20_000):
        value = value.sin()
    assert SavedGraph().read(value.sum()).bytes == 20_000 * 12


def test_what_a_scripted_module_keeps_is_not_shown_and_is_said_to_be_uncounted() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    value = torch.randn(4, 8)
    # The first calls are torch's to learn by.
    losses = [model(value).sum() for _ in range(3)]
    assert SavedGraph().read(losses[-1]).uncounted == 1
    assert SavedGraph().read(nn.Linear(8, 8)(value).sum()).uncounted == 0
