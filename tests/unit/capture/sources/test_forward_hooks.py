"""Memory at outermost forwards, and hooks of the user's own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from lightning_memprof.capture.sources.forward_hooks import ForwardWatch, UserHooks, user_hooks


class Reading:
    """Gives one more at each reading: 1, 2, 3."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> int:
        self.times += 1
        return self.times


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


@pytest.fixture
def rss() -> Reading:
    return Reading()


Watching = Callable[[nn.Module], ForwardWatch]


@pytest.fixture
def watching(rss: Reading) -> Iterator[Watching]:
    made: list[ForwardWatch] = []

    def make(model: nn.Module) -> ForwardWatch:
        made.append(ForwardWatch(model, rss, lambda: rss.times * 10, unguarded))
        return made[-1]

    yield make
    for watch in made:
        watch.release()
    assert not torch_module._global_forward_pre_hooks
    assert not torch_module._global_forward_hooks


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_only_outermost_forwards_are_read_and_their_differences_add_up(rss: Reading, watching: Watching) -> None:
    model = Parts()
    watch = watching(model)
    forwards = watch.open()
    model.net(VALUE)
    model.head(VALUE)
    model(VALUE)
    nn.Linear(2, 2)(VALUE)  # no part of the model
    watch.close(forwards)
    model(VALUE)
    assert rss.times == 7  # one more at the end, which is not used
    assert forwards.rss() == {"rss_pre_forward": 1, "rss_post_forward": 6, "rss_diff": 3}
    assert forwards.npp() == {"npp_pre_forward": 10, "npp_post_forward": 60, "npp_diff": 30}


def test_without_a_forward_all_is_0(watching: Watching) -> None:
    watch = watching(Parts())
    forwards = watch.open()
    watch.close(forwards)
    assert set(forwards.rss().values()) == {0}
    assert set(forwards.npp().values()) == {0}


def test_there_are_no_hooks_but_for_the_next_forward_and_on_the_one_that_goes_on(watching: Watching) -> None:
    found: list[tuple[int, int]] = []

    class Watched(Parts):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            found.append((len(torch_module._global_forward_pre_hooks), hooks_of(self)))
            value = self.net(value)
            found.append((len(torch_module._global_forward_hooks), hooks_of(self.net)))
            return value

    model = Watched()
    watch = watching(model)
    model(VALUE)
    forwards = watch.open()
    model(VALUE)
    assert len(torch_module._global_forward_pre_hooks) == 1
    watch.close(forwards)
    model(VALUE)
    assert found == [(0, 0), (0, 0), (0, 2), (0, 0), (0, 0), (0, 0)]
    assert hooks_of(model) == 0


def test_inside_of_a_forward_the_outermost_are_those_that_begin_there(watching: Watching) -> None:
    class Watched(Parts):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            inner = watch.open()
            value = self.head(self.net(value))
            watch.close(inner)
            found.append(inner.rss()["rss_diff"])
            return value

    found: list[int] = []
    model = Watched()
    watch = watching(model)
    outer = watch.open()
    model(VALUE)
    watch.close(outer)
    # Readings: outer 1; net 2, 3; head 4, 5; one at the inner end; outer 7.
    assert found == [2]
    assert outer.rss() == {"rss_pre_forward": 1, "rss_post_forward": 7, "rss_diff": 6}


def test_two_that_watch_share_the_forwards_of_both(watching: Watching) -> None:
    model = Parts()
    watch = watching(model)
    first = watch.open()
    model.net(VALUE)
    second = watch.open()
    model.head(VALUE)
    watch.close(second)
    watch.close(first)
    assert first.rss()["rss_diff"] == 2
    assert second.rss() == {"rss_pre_forward": 3, "rss_post_forward": 4, "rss_diff": 1}


def test_a_module_that_calls_itself_ends_with_its_outer_call(watching: Watching) -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, value: torch.Tensor, count: int = 2) -> torch.Tensor:
            return self.inner(self(value, count - 1)) if count else value

    model = Recursive()
    watch = watching(model)
    forwards = watch.open()
    model(VALUE)
    watch.close(forwards)
    assert forwards.rss() == {"rss_pre_forward": 1, "rss_post_forward": 2, "rss_diff": 1}


def test_a_forward_that_raises_has_its_end(watching: Watching) -> None:
    model = Parts()
    watch = watching(model)
    forwards = watch.open()
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    model(VALUE)
    watch.close(forwards)
    assert forwards.rss()["rss_diff"] == 2
    assert hooks_of(model) == 0


def test_a_forward_that_is_interrupted_ends_with_the_call(watching: Watching) -> None:
    class Interrupted(Parts):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    model = Interrupted()
    watch = watching(model)
    forwards = watch.open()
    with pytest.raises(KeyboardInterrupt):
        model(VALUE)
    watch.close(forwards)
    assert forwards.rss()["rss_diff"] == 1
    assert hooks_of(model) == 0


def test_forwards_of_other_threads_are_not_read(rss: Reading, watching: Watching) -> None:
    model = Parts()
    watch = watching(model)
    watch.open()
    thread = Thread(target=model, args=(VALUE,))
    thread.start()
    thread.join()
    assert rss.times == 0


def test_a_scripted_module_is_read_as_any(watching: Watching) -> None:
    model = nn.Sequential(nn.ReLU())
    model.append(torch.jit.trace(nn.Linear(2, 2), VALUE))
    watch = watching(model)
    forwards = watch.open()
    model[1](VALUE)
    watch.close(forwards)
    assert forwards.rss()["rss_diff"] == 1


def test_a_copy_made_inside_of_the_forward_works_and_is_not_read(rss: Reading, watching: Watching) -> None:
    copies: list[nn.Module] = []

    class Copied(Parts):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if not copies:
                copies.append(copy.deepcopy(self))
                pickle.dumps(self.net.state_dict())
            return super().forward(value)

    model = Copied()
    watch = watching(model)
    forwards = watch.open()
    expected = model(VALUE)
    before = rss.times
    assert torch.equal(copies[0](VALUE), expected)
    assert rss.times == before
    watch.close(forwards)


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
