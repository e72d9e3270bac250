"""Forwards of modules are told in pairs, and leave nothing behind."""

from __future__ import annotations

import copy
import pickle
from threading import Thread
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn

from lightning_memprof.capture.sources.module_calls import module_calls


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(value))


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.inner(value)
        raise ArithmeticError


def test_each_forward_begins_and_ends_also_of_a_module_that_is_called_twice():
    told: list[str] = []
    model = Twice()
    with module_calls(
        model, lambda path, _: told.append(f"+{path}"), lambda path: told.append(f"-{path}")
    ) as told_at_all:
        model(torch.ones(1, 2))
        nn.Linear(2, 2)(torch.ones(1, 2))  # no part of the model
    model(torch.ones(1, 2))
    assert told_at_all
    assert told == ["+", "+inner", "-inner", "+inner", "-inner", "-"]


def test_a_forward_that_raises_has_its_end():
    told: list[str] = []
    model = Fails()
    with (
        module_calls(model, lambda path, _: told.append(f"+{path}"), lambda path: told.append(f"-{path}")),
        pytest.raises(ArithmeticError),
    ):
        model(torch.ones(1, 2))
    assert told == ["+", "+inner", "-inner", "-"]


def test_a_context_that_ends_inside_a_forward_ends_it():
    told: list[str] = []
    model = Twice()
    context = module_calls(model, lambda path, _: told.append(f"+{path}"), lambda path: told.append(f"-{path}"))
    context.__enter__()

    def leave(*_: object) -> None:
        if len(told) == 3:
            context.__exit__(None, None, None)

    model.inner.register_forward_hook(leave)
    model(torch.ones(1, 2))
    assert told.count("+") == told.count("-") == 1
    assert told.count("+inner") == told.count("-inner")


def test_other_threads_are_not_told():
    told: list[str] = []
    model = Twice()
    with module_calls(model, lambda path, _: told.append(path), told.append):
        thread = Thread(target=lambda: model(torch.ones(1, 2)))
        thread.start()
        thread.join()
    assert told == []


def test_nothing_is_told_of_a_model_with_a_compiled_part():
    told: list[str] = []
    model = Twice()
    model.inner.compile(backend="eager")
    with module_calls(model, lambda path, _: told.append(path), told.append) as told_at_all:
        model(torch.ones(1, 2))
    assert not told_at_all
    assert told == []


def test_a_model_is_copied_and_pickled_without_anything_of_ours():
    model = Twice()
    original = nn.Module._call_impl
    with module_calls(model, lambda *_: None, lambda _: None):
        twin = copy.deepcopy(model)
        pickle.dumps(nn.Linear(2, 2))
        assert vars(twin.inner).keys() == vars(model.inner).keys()
    assert nn.Module._call_impl is original


@pytest.mark.parametrize("first", [0, 1])
def test_contexts_end_in_any_order(first: int):
    told: list[str] = []
    model = Twice()
    original = nn.Module._call_impl

    def telling(name: str):
        return module_calls(model, lambda *_: told.append(name), lambda _: None)

    contexts = [telling("a"), telling("b")]
    for context in contexts:
        context.__enter__()
    model.inner(torch.ones(1, 2))
    contexts[first].__exit__(None, None, None)
    model.inner(torch.ones(1, 2))
    contexts[1 - first].__exit__(None, None, None)
    model.inner(torch.ones(1, 2))
    assert told == ["b", "a", "ba"[first]]
    assert nn.Module._call_impl is original


def test_somebody_elses_function_in_front_of_ours_stays_and_ours_does_nothing(monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    model = Twice()
    # What is undone at the end of the test, with ours in it.
    monkeypatch.setattr(nn.Module, "_call_impl", nn.Module._call_impl)
    context = module_calls(model, lambda path, _: told.append(path), lambda _: None)
    context.__enter__()
    ours: Any = nn.Module._call_impl

    def theirs(module: nn.Module, *args: object, **keywords: object) -> object:
        return ours(module, *args, **keywords)

    monkeypatch.setattr(nn.Module, "_call_impl", theirs)
    context.__exit__(None, None, None)
    assert vars(nn.Module)["_call_impl"] is theirs
    model(torch.ones(1, 2))
    assert told == []


def test_a_model_is_traced_and_scripted_meanwhile():
    told: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    value = torch.ones(1, 2)
    with module_calls(model, lambda path, _: told.append(path), lambda _: None):
        assert torch.equal(torch.fx.symbolic_trace(model)(value), model(value))
        assert torch.equal(torch.jit.script(model)(value), model(value))
    assert set(told) == {"", "0", "1"}
