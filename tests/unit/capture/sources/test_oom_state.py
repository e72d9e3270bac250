from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memprof.capture.sources.holders import HolderSearch
from lightning_memprof.capture.sources.oom_state import live_tensors, referenced, tracked_tensors

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("thawed")]
CACHE: dict[str, Any] = {}


def holder_name(tensor: torch.Tensor, tracked: list[torch.Tensor]) -> str | None:
    search = HolderSearch(None, 60)
    search.ignore(tracked)
    holder = search.find(tensor)
    return None if holder is None else holder.chain


class Model:
    """Keeps tensors in attributes."""

    kept: list[Any] = []  # noqa: RUF012 the fault that is looked for

    def __init__(self) -> None:
        self.last: Any = None
        self.history: list[Any] = []


@functools.lru_cache
def cached(size: int) -> torch.Tensor:
    return torch.ones(size)


def held_by(put: Callable[[torch.Tensor], object]) -> tuple[bool, str | None]:
    put(torch.ones(77))
    tracked = tracked_tensors()
    (mine,) = (place for place, tensor in enumerate(tracked) if tensor.shape == (77,))
    return id(tracked[mine]) in referenced(tracked), holder_name(tracked[mine], tracked)


@pytest.mark.parametrize(
    ("put", "name"),
    [
        (lambda model: model.history.append, "Model.history[0]"),
        (lambda model: lambda tensor: model.history.append({"loss": tensor}), "Model.history[0]['loss']"),
        (lambda model: lambda tensor: setattr(model, "last", tensor), "Model.last"),
        (lambda _model: Model.kept.append, "Model.kept[0]"),
        (lambda _model: lambda tensor: CACHE.update(one=tensor), f"{__name__}.CACHE['one']"),
    ],
)
def test_a_holder_is_named_by_its_place(put: Any, name: str) -> None:
    model = Model()
    try:
        assert held_by(put(model)) == (True, name)
    finally:
        Model.kept.clear()
        CACHE.clear()


def test_a_cache_of_a_function_is_a_holder() -> None:
    try:
        cached(78)
        tracked = tracked_tensors()
        (found,) = (holder_name(tensor, tracked) for tensor in tracked if tensor.shape == (78,))
        assert found == f"lru_cache of {__name__}.cached"
    finally:
        cached.cache_clear()


def test_a_local_variable_is_no_holder() -> None:
    local = torch.ones(79)
    tracked = tracked_tensors()
    assert id(local) not in referenced(tracked)
    assert holder_name(local, tracked) is None


def of_call(*arguments: torch.Tensor) -> tuple[bool, bool]:
    kept = (torch.ones(82),)
    model = Model()
    model.last = kept
    referred = referenced(tracked_tensors())
    return id(arguments[0]) in referred, id(kept[0]) in referred


def of_closure(*arguments: torch.Tensor, is_kept: bool) -> bool:
    model = Model()
    if is_kept:
        model.last = lambda: arguments
    found = id(arguments[0]) in referenced(tracked_tensors())
    return found and bool(arguments)


def test_the_arguments_of_a_call_are_no_holder_but_a_tuple_in_an_attribute_is() -> None:
    assert of_call(torch.ones(81)) == (False, True)


def test_a_function_that_an_attribute_keeps_is_a_holder_of_its_closure() -> None:
    assert of_closure(torch.ones(83), is_kept=True)
    assert not of_closure(torch.ones(84), is_kept=False)


def test_an_object_without_attributes_of_its_own_is_named_by_its_type() -> None:
    nested = [(SimpleNamespace(value=torch.ones(80)),)]
    tracked = tracked_tensors()
    assert holder_name(nested[0][0].value, tracked) == "SimpleNamespace.value"


class Asked(nn.Parameter):
    asked = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_live_tensors_are_read_without_code_of_their_class() -> None:
    model = nn.Linear(4, 4)
    model.weight = Asked(torch.ones(4, 4))
    Asked.asked = 0
    held, largest = live_tensors(model, [], torch.device("cpu"))
    assert Asked.asked == 0
    assert held["parameter_bytes"] == 4 * (16 + 4)
    assert len(largest) > 0
