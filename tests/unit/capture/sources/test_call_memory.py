"""The user's own hooks around forwards."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from lightning_memprof.capture.sources.call_memory import ForwardWatch, UserHooks, user_hooks
from lightning_memprof.capture.sources.module_calls import module_calls


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.head = nn.Linear(2, 2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(value))


VALUE = torch.ones(1, 2)


def unguarded(call: Callable[..., None]) -> Callable[..., None]:
    return call


def write_seen(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    module.seen = getattr(module, "seen", 0) + 1  # type: ignore[assignment]
    module.size = module.mem_info_handle().rss  # type: ignore[operator]


def write_result(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    module.result = args[1].detach().sum()


def write_zeros(model: nn.Module, names: list[str]) -> None:
    for module in model.modules():
        for name in names:
            setattr(module, name, 0)


HOOKS = UserHooks(
    pre_forward=[write_seen],
    post_forward=[write_result],
    reset_state=[write_zeros],
    save_attributes=["seen", "size", "result", "never"],
)


def test_a_users_hooks_see_every_module_and_their_attributes_are_read_and_removed() -> None:
    model = Parts()
    before = [dict(vars(module)) for module in model.modules()]
    with user_hooks(model, HOOKS, unguarded) as state:
        assert state.read() == {"seen": 0, "size": 0, "result": 0, "never": 0}
        result = model(VALUE)
        model(VALUE)
        values = state.read()
        assert [module.seen for module in model.modules()] == [2] * 5
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))  # noqa: S301 our own
        assert not twin._forward_hooks
        state.reset()
        assert state.read()["seen"] == 0
    assert values["seen"] == 2
    assert values["size"] > 1 << 20
    assert values["result"] == pytest.approx(float(result.detach().sum()))
    assert [dict(vars(module)) for module in model.modules()] == before
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks


def test_the_root_is_the_attribute_model_where_there_is_one() -> None:
    outer = nn.Module()
    outer.model = Parts()
    with user_hooks(outer, HOOKS, unguarded) as state:
        outer.model(VALUE)
        assert state.read()["seen"] == 1
        assert not hasattr(outer, "seen")


def test_attributes_that_were_there_before_are_there_again() -> None:
    model = Parts()
    model.head.seen = "mine"  # type: ignore[assignment]
    with user_hooks(model, HOOKS, unguarded):
        model(VALUE)
    assert model.head.seen == "mine"
    assert not hasattr(model, "seen")


def test_what_a_users_hook_returns_changes_neither_input_nor_output() -> None:
    model = Parts()
    expected = model(VALUE)
    hooks = UserHooks(pre_forward=[lambda *_: (VALUE * 2,)], post_forward=[lambda *_: VALUE * 3])
    with user_hooks(model, hooks, unguarded):
        assert torch.equal(model(VALUE), expected)


def test_an_attribute_that_no_hook_wrote_is_none_and_one_that_is_no_plain_value_is_text() -> None:
    model = Parts()

    def write(module: nn.Module, *_: Any) -> None:
        module.seen = {1}  # type: ignore[assignment]

    with user_hooks(model, UserHooks(pre_forward=[write], save_attributes=["seen", "never"]), unguarded) as state:
        model(VALUE)
        assert state.read() == {"seen": "{1}", "never": None}


def test_after_an_exception_nothing_is_left_on_the_modules() -> None:
    model = Parts()
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(RuntimeError), user_hooks(model, HOOKS, unguarded):
        model(torch.ones(1, 3))
    assert [dict(vars(module)) for module in model.modules()] == before


@contextmanager
def watching(model: nn.Module) -> Iterator[ForwardWatch]:
    """Watch with readings of 1, 2, 3, ... and ten times as many saved bytes."""
    readings = itertools.count(1)

    def read() -> tuple[int, int]:
        number = next(readings)
        return number, 10 * number

    watch = ForwardWatch(read)
    with module_calls(model, watch.begin, watch.end):
        yield watch


def test_only_outermost_forwards_are_read_and_their_differences_add_up() -> None:
    model = Parts()
    with watching(model) as watch:
        forwards = watch.open()
        model.net(VALUE)
        model.head(VALUE)
        model(VALUE)
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 3))
        nn.Linear(2, 2)(VALUE)  # no part of the model
        watch.close(forwards)
        model(VALUE)
    # The first reading is of the start.
    assert forwards.rss == [2, 9, 4]
    assert forwards.npp == [10, 80, 40]


def test_without_a_forward_all_is_0() -> None:
    watch = ForwardWatch(lambda: (5, 50))
    forwards = watch.open()
    watch.close(forwards)
    assert forwards.rss == forwards.npp == [0, 0, 0]


def test_inside_a_forward_the_outermost_are_those_that_begin_there() -> None:
    class Watched(Parts):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            inner = watch.open()
            value = self.head(self.net(value))
            watch.close(inner)
            found.append(inner.rss)
            return value

    found: list[list[int]] = []
    model = Watched()
    with watching(model) as watch:
        outer = watch.open()
        model(VALUE)
        watch.close(outer)
    # Readings: outer 1, 2; inner 3; net 4, 5; head 6, 7; the inner end 8; outer 9.
    assert found == [[4, 7, 2]]
    assert outer.rss == [2, 9, 7]


def test_a_call_that_ends_inside_a_forward_ends_it() -> None:
    class Ends(Parts):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            watch.close(forwards)
            return super().forward(value)

    model = Ends()
    with watching(model) as watch:
        forwards = watch.open()
        model(VALUE)
    assert forwards.rss == [2, 3, 1]


def test_two_calls_share_the_forwards_of_both() -> None:
    model = Parts()
    with watching(model) as watch:
        first = watch.open()
        model.net(VALUE)
        second = watch.open()
        model.head(VALUE)
        watch.close(second)
        watch.close(first)
    assert first.rss == [2, 6, 2]
    assert second.rss == [5, 6, 1]
