"""Forwards of modules are told in pairs, and leave nothing behind."""

from __future__ import annotations

import copy
import pickle
from threading import Thread

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from lightning_memprof.capture.module_calls import module_calls


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
    with module_calls(model, lambda path: told.append(f"+{path}"), lambda path: told.append(f"-{path}")) as told_at_all:
        model(torch.ones(1, 2))
        nn.Linear(2, 2)(torch.ones(1, 2))  # no part of the model
    model(torch.ones(1, 2))
    assert told_at_all
    assert told == ["+", "+inner", "-inner", "+inner", "-inner", "-"]


def test_a_forward_that_raises_has_its_end():
    told: list[str] = []
    model = Fails()
    with (
        module_calls(model, lambda path: told.append(f"+{path}"), lambda path: told.append(f"-{path}")),
        pytest.raises(ArithmeticError),
    ):
        model(torch.ones(1, 2))
    assert told == ["+", "+inner", "-inner", "-"]


def test_a_context_that_ends_inside_a_forward_ends_it():
    told: list[str] = []
    model = Twice()
    context = module_calls(model, lambda path: told.append(f"+{path}"), lambda path: told.append(f"-{path}"))
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
    with module_calls(model, told.append, told.append):
        thread = Thread(target=lambda: model(torch.ones(1, 2)))
        thread.start()
        thread.join()
    assert told == []


def test_nothing_is_told_of_a_model_with_a_compiled_part():
    told: list[str] = []
    model = Twice()
    model.inner.compile(backend="eager")
    with module_calls(model, told.append, told.append) as told_at_all:
        model(torch.ones(1, 2))
    assert not told_at_all
    assert told == []


def test_a_model_is_copied_and_pickled_without_the_hooks():
    model = Twice()
    with module_calls(model, lambda _: None, lambda _: None):
        twin = copy.deepcopy(model)
        pickle.dumps(nn.Linear(2, 2))
        assert not twin._forward_hooks
        assert not twin._forward_pre_hooks
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks
