"""Bytes that autograd saves, against closed forms; and what the hooks leave as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lightning_memprof.capture.sources.saved_hooks import SavedBytes, checked_unpack
from stack import at_the_limit

Functions = tuple[Callable[..., Any], Callable[..., Any]]
FLOAT = 4


@contextmanager
def counted(
    model: nn.Module, functions: Functions | None = None, faults: list[Exception] | None = None
) -> Iterator[SavedBytes]:
    saved = SavedBytes(model, functions, (faults if faults is not None else []).append)
    saved.start()
    try:
        yield saved
    finally:
        saved.stop()


def test_the_transposed_weight_is_a_parameter_also_of_a_model_that_is_not_ours() -> None:
    other = nn.Linear(8, 8, bias=False)
    value = torch.randn(2, 8, requires_grad=True)
    with counted(nn.Identity()) as saved:
        value @ other.weight.t()
    assert saved.total == 2 * 8 * FLOAT


def test_buffers_do_not_count_and_views_and_repeats_count_once_and_whole() -> None:
    model = nn.Module()
    model.register_buffer("scale", torch.randn(64))
    value = torch.randn(64, requires_grad=True)
    base = torch.randn(640)
    with counted(model) as saved:
        value * model.scale  # type: ignore[operator]
        assert saved.total == 0
        value * base[:64]
        assert saved.total == 640 * FLOAT
        value * base[64:128]
        value * base[:64]
        assert saved.total == 640 * FLOAT
        value.exp()
    assert saved.total == (640 + 64) * FLOAT


def test_a_perceptron_saves_the_closed_form() -> None:
    batch, width, hidden = 16, 32, 48
    model = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 4), nn.Sigmoid())
    with counted(model) as saved:
        model(torch.randn(batch, width))
    assert saved.total == batch * (width + hidden + 4) * FLOAT


def test_storage_whose_address_is_used_again_counts_again() -> None:
    value = torch.randn(1 << 16, requires_grad=True)
    addresses = set()
    with counted(nn.Identity()) as saved:
        for _ in range(4):
            result = value.exp()
            addresses.add(result.untyped_storage().data_ptr())
            del result
    assert saved.total == 4 * (1 << 16) * FLOAT


def test_each_start_counts_from_nothing() -> None:
    model = nn.Linear(8, 8)
    saved = SavedBytes(model, None, lambda _: None)
    value = torch.randn(2, 8)
    for _ in range(2):
        saved.start()
        model(value)
        saved.stop()
        assert saved.total == 2 * 8 * FLOAT
    model(value)
    assert saved.total == 2 * 8 * FLOAT


def test_what_is_saved_while_backward_recomputes_does_not_count() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    value = torch.randn(2, 8, requires_grad=True)
    with counted(model) as saved:
        loss = checkpoint(model, value, use_reentrant=True).sum()
        before = saved.total
        loss.backward()
    assert saved.total == before


def test_a_sparse_tensor_counts_its_own_size() -> None:
    sparse = torch.eye(4).to_sparse()
    weight = torch.randn(4, 4, requires_grad=True)
    with counted(nn.Identity()) as saved:
        torch.sparse.mm(sparse, weight)
    assert saved.total > 0


@pytest.mark.parametrize("functions", [None, (lambda tensor: tensor, checked_unpack)])
def test_an_in_place_error_is_still_raised(functions: Functions | None) -> None:
    def backward() -> None:
        value = torch.full((3,), 2.0, requires_grad=True)
        result = value.exp()
        result.add_(1)
        result.sum().backward()

    with pytest.raises(RuntimeError) as without:
        backward()
    with pytest.raises(RuntimeError) as with_hooks, counted(nn.Identity(), functions):
        backward()
    words = "one of the variables needed for gradient computation has been modified by an inplace operation"
    assert words in str(without.value)
    assert words in str(with_hooks.value)


def test_gradients_of_gradients_are_the_same_bit_for_bit() -> None:
    def gradients() -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        value = torch.randn(5, 4, requires_grad=True)
        (first,) = torch.autograd.grad(model(value).sum(), value, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), value, create_graph=True)
        second.square().sum().backward()
        return [value.grad, *(parameter.grad for parameter in model.parameters())]

    bare = gradients()
    with counted(nn.Identity()):
        ours = gradients()
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(bare, ours, strict=True))  # type: ignore[arg-type]


def test_the_graph_outlives_the_hooks() -> None:
    value = torch.ones(3, requires_grad=True)
    with counted(nn.Identity()):
        result = value.exp()
    result.sum().backward()
    assert value.grad is not None
    assert torch.equal(value.grad, result)


def test_the_graph_is_freed_with_its_last_reference() -> None:
    value = torch.ones(3, requires_grad=True)
    with counted(nn.Identity()):
        result = value.exp()
        storage = StorageWeakRef(result.untyped_storage())
        del result
        assert storage.expired()


def test_functions_of_the_users_decide_what_is_kept() -> None:
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> Any:
        seen.append(tensor.numel())
        return ("mine", tensor.detach().clone())

    value = torch.full((3,), 2.0, requires_grad=True)
    with counted(nn.Identity(), (pack, lambda packed: packed[1] * 10)) as saved:
        value.square().sum().backward()
    assert seen == [3]
    assert saved.total == 3 * FLOAT
    assert value.grad is not None
    assert torch.equal(value.grad, torch.full((3,), 40.0))


def test_a_pack_of_the_users_that_fails_is_said_and_the_tensor_is_kept() -> None:
    faults: list[Exception] = []

    def pack(tensor: torch.Tensor) -> Any:
        raise ArithmeticError

    value = torch.full((3,), 2.0, requires_grad=True)
    with counted(nn.Identity(), (pack, lambda packed: None), faults):
        value.square().sum().backward()
    assert value.grad is not None
    assert torch.equal(value.grad, torch.full((3,), 4.0))
    assert [type(fault) for fault in faults] == [ArithmeticError]


def test_where_the_program_forbids_hooks_starting_raises_and_stopping_is_harmless() -> None:
    saved = SavedBytes(nn.Identity(), None, lambda _: None)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        saved.start()
    saved.stop()


def programs_own_hooks() -> tuple[list[torch.Tensor], Any]:
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.clone())
        return packed[-1]

    return packed, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def test_hooks_of_the_programs_that_begin_inside_and_end_outside_stay_its_own() -> None:
    packed, theirs = programs_own_hooks()
    value = torch.ones(3, requires_grad=True)
    with counted(nn.Identity()):
        theirs.__enter__()
        value.exp()
    value.exp()
    assert len(packed) == 2
    theirs.__exit__()
    value.exp()
    assert len(packed) == 2
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_hooks_of_the_programs_that_begin_outside_and_end_inside_are_gone_with_ours() -> None:
    packed, theirs = programs_own_hooks()
    theirs.__enter__()
    with counted(nn.Identity()):
        theirs.__exit__()
    torch.ones(3, requires_grad=True).exp()
    assert packed == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_what_is_on_the_meta_device_takes_no_bytes() -> None:
    value = torch.ones(1000, device="meta", requires_grad=True)
    with counted(nn.Identity()) as saved:
        value.exp()
    assert saved.total == 0


def test_a_model_that_is_not_initialised_yet_is_counted() -> None:
    value = torch.ones(8, requires_grad=True)
    with counted(nn.LazyLinear(4)) as saved:
        value.exp()
    assert saved.total == 8 * FLOAT


def test_a_tensor_that_is_saved_where_no_frame_is_left_is_packed_as_any_and_not_counted() -> None:
    value = torch.ones(2, 2, requires_grad=True)
    results: list[torch.Tensor] = []
    with counted(nn.Identity()) as saved:
        # C functions on the stack below take more than a frame of Python before 3.12.
        for spare in range(30):
            with suppress(RecursionError):
                results.append(at_the_limit(value.exp, spare))
    assert 0 < saved.total < len(results) * 4 * FLOAT
    assert all(type(result.grad_fn._saved_result) is torch.Tensor for result in results)
    sum(results).sum().backward()
    assert torch.allclose(value.grad, len(results) * value.detach().exp())  # type: ignore[arg-type]
