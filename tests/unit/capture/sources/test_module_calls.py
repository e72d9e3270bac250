"""Forwards of modules are told in pairs, and leave nothing behind."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.nn.modules import module as torch_module

from lightning_memprof.capture.sources.module_calls import module_calls
from stack import at_the_limit, frames

VALUE = torch.ones(1, 2)


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
    with module_calls(model, lambda path, _: told.append(f"+{path}"), lambda path, _: told.append(f"-{path}")):
        model(torch.ones(1, 2))
        nn.Linear(2, 2)(torch.ones(1, 2))  # no part of the model
    model(torch.ones(1, 2))
    assert told == ["+", "+inner", "-inner", "+inner", "-inner", "-"]


def test_a_forward_that_raises_has_its_end():
    told: list[str] = []
    model = Fails()
    with (
        module_calls(model, lambda path, _: told.append(f"+{path}"), lambda path, _: told.append(f"-{path}")),
        pytest.raises(ArithmeticError),
    ):
        model(torch.ones(1, 2))
    assert told == ["+", "+inner", "-inner", "-"]


def test_a_context_that_ends_inside_a_forward_ends_it():
    told: list[str] = []
    model = Twice()
    context = module_calls(model, lambda path, _: told.append(f"+{path}"), lambda path, _: told.append(f"-{path}"))
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
    with module_calls(model, lambda path, _: told.append(path), lambda path, _: told.append(path)):
        thread = Thread(target=lambda: model(torch.ones(1, 2)))
        thread.start()
        thread.join()
    assert told == []


class Net(nn.Module):
    """A part between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.pre, self.part, self.post = nn.Linear(2, 2), Twice(), nn.Linear(2, 2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.post(self.part(self.pre(value)))


def compiled_net(kind: str) -> nn.Module:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model: Any = Net()
    if "torch's own class" in kind:
        # torch compiles another frame than that of a class of the program.
        model.part = nn.Sequential(nn.Linear(2, 2), Twice())
    if "wrapped" in kind:
        model.part = torch.compile(model.part, backend="eager")
    else:
        model.part.compile(backend="eager")
    return model


@pytest.mark.parametrize("opens_first", [False, True])
@pytest.mark.parametrize("kind", ["wrapped", "called", "wrapped, torch's own class", "called, torch's own class"])
def test_a_compiled_part_is_one_forward_and_is_compiled_once(kind: str, opens_first: bool) -> None:
    told: list[str] = []
    value = torch.ones(1, 2)
    compiled_net(kind)(value)
    bare = dict(torch._dynamo.utils.counters["stats"])
    model = compiled_net(kind)
    if not opens_first:
        model(value)
    for _ in range(2):
        told.clear()
        with module_calls(model, lambda path, _: told.append(f"+{path}"), lambda path, _: told.append(f"-{path}")):
            model(value)
        model(value)
    # torch runs the loop of its own class as it is, and compiles the parts.
    outer = [call for call in told if not call[1:].startswith("part.")]
    assert outer == ["+", "+pre", "-pre", "+part", "-part", "+post", "-post", "-"]
    assert torch._dynamo.utils.counters["stats"] == bare
    assert bare["unique_graphs"] == 1
    assert nn.Module._call_impl.__module__ == "torch.nn.modules.module"
    torch._dynamo.reset()


def test_a_model_is_copied_and_pickled_without_anything_of_ours():
    model = Twice()
    original = nn.Module._call_impl
    with module_calls(model, lambda *_: None, lambda *_: None):
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
        return module_calls(model, lambda *_: told.append(name), lambda *_: None)

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
    context = module_calls(model, lambda path, _: told.append(path), lambda *_: None)
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
    with module_calls(model, lambda path, _: told.append(path), lambda *_: None):
        assert torch.equal(torch.fx.symbolic_trace(model)(value), model(value))
        assert torch.equal(torch.jit.script(model)(value), model(value))
    assert set(told) == {"", "0", "1"}


class Counted(nn.Module):
    """Counts the frames of a forward, each with what is left to the recursion limit."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def forward(self, value: torch.Tensor, **_: object) -> torch.Tensor:
        count = frames()
        self.seen.append((count, sys.getrecursionlimit() - count))
        return value


@contextmanager
def several(model: nn.Module, number: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(number):
            stack.enter_context(module_calls(model, lambda *_: None, lambda *_: None))
        yield


@pytest.mark.parametrize("number", [1, 3])
def test_any_number_of_listeners_adds_no_frame(number: int) -> None:
    counted = Counted()
    model = nn.Sequential(nn.Sequential(counted))
    model(VALUE)
    with several(model, number):
        model(VALUE)
    bare, heard = counted.seen
    assert heard == bare


def test_a_module_with_hooks_has_as_many_frames_left() -> None:
    counted = Counted()
    model = nn.Sequential(nn.Sequential(counted))
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: None)
    model(VALUE)
    limit = sys.getrecursionlimit()
    with several(model, 3):
        model(VALUE)
    bare, heard = counted.seen
    assert heard[1] == bare[1]
    assert sys.getrecursionlimit() == limit


def test_global_hooks_that_came_with_the_window_leave_as_many_frames() -> None:
    counted = Counted()
    model = nn.Sequential(counted)
    model(VALUE)
    with several(model, 1):
        hook = torch_module.register_module_forward_pre_hook(lambda *_: None)
        model(VALUE)
        hook.remove()
    bare, heard = counted.seen
    assert heard[1] == bare[1]


HOOKS = (
    "register_forward_pre_hook", "register_forward_hook", "register_full_backward_pre_hook",
    "register_full_backward_hook",
)  # fmt: skip
GLOBAL_HOOKS = (
    "register_module_forward_pre_hook", "register_module_forward_hook", "register_module_full_backward_pre_hook",
    "register_module_full_backward_hook",
)  # fmt: skip


@pytest.mark.parametrize("register", [*HOOKS, *GLOBAL_HOOKS])
def test_every_kind_of_hook_is_called_meanwhile(register: str) -> None:
    model, called = nn.Linear(2, 2), []
    owner: Any = model if register in HOOKS else torch_module
    hook = getattr(owner, register)(lambda *_: called.append(1))
    with several(model, 1):
        model(VALUE.clone().requires_grad_()).sum().backward()
    hook.remove()
    assert called == [1]


def test_the_traceback_of_an_exception_is_as_long_as_without() -> None:
    model = Fails()
    lengths = []
    for number in (0, 3):
        with several(model, number), pytest.raises(ArithmeticError) as raised:
            model(VALUE)
        lengths.append(len(raised.traceback))
    assert lengths[0] == lengths[1]


def test_a_forward_may_take_any_keyword() -> None:
    model = Counted()
    with several(model, 1):
        assert model(VALUE, module=1, args=2) is VALUE


def test_forwards_near_the_recursion_limit_run_as_without_and_are_reported_in_pairs() -> None:
    model = nn.Identity()
    told: list[str] = []
    listening = partial(module_calls, model, lambda *_: told.append("+"), lambda *_: told.append("-"))

    def runs(context: Callable[[], AbstractContextManager[object]], spare: int) -> bool:
        with context():
            for _ in range(20):
                # Python takes a frame less for what it has specialized.
                model(VALUE)
            try:
                at_the_limit(partial(model, VALUE), spare)
            except RecursionError:
                return False
            return True

    outcomes: set[bool] = set()
    for spare in range(25):
        # Other tests' modules undo the specialization, and the number of calls until the next one grows: five rounds.
        pairs = [(runs(nullcontext, spare), runs(listening, spare)) for _ in range(5)]
        assert any(without == listened for without, listened in pairs), spare
        outcomes.update(*pairs)
    assert outcomes == {True, False}
    assert told == ["+", "-"] * (len(told) // 2)
