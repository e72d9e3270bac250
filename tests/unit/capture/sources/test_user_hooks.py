from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm

from lightning_memprof.capture.sources.user_hooks import hook_name, hook_ranges


def look(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 1


class Probe:
    def __call__(self, module: nn.Module, inputs: Any) -> None:
        pass

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def ranges(model: nn.Module) -> list[str]:
    """The names of the ranges of hooks in a forward and a backward."""
    with torch.profiler.profile() as profiler:
        model(torch.ones(2, 3)).sum().backward()
    return [event.name for event in profiler.events() if "_hook]" in event.name]


def test_hooks_of_modules_and_parameters_are_ranges_with_name_and_line() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer)
    probe = Probe()
    layer.register_forward_hook(look)
    layer.register_forward_pre_hook(probe)
    layer.weight.register_hook(probe.gradient)
    with hook_ranges(model):
        found = ranges(model)
    assert sorted(name.partition(" (test_user_hooks.py:")[0] for name in found) == [
        "[pl][backward_hook]Probe.gradient", "[pl][forward_hook]Probe", "[pl][forward_hook]look",
    ]  # fmt: skip
    assert ranges(model) == []


def test_results_are_those_without_ranges() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer)
    layer.register_forward_hook(look)
    layer.weight.register_hook(Probe().gradient)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(torch.ones(2, 3)).pow(2).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    expected = gradient()
    with hook_ranges(model):
        assert torch.equal(gradient(), expected)


def test_a_hook_that_is_removed_in_the_window_stays_removed_and_the_others_are_as_before() -> None:
    model = nn.Linear(3, 3)
    removed = model.register_forward_hook(look)
    model.register_forward_hook(look)
    with hook_ranges(model):
        removed.remove()
        late = model.register_forward_hook(look)
    assert list(model._forward_hooks.values()) == [look, look]
    late.remove()
    assert list(model._forward_hooks.values()) == [look]


def _pickled(hook: Any) -> Any:
    return pickle.loads(pickle.dumps(hook))  # noqa: S301 our own bytes


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, _pickled])
def test_copies_and_pickles_have_the_hook_itself(copied: Any) -> None:
    model = nn.Linear(3, 3)
    model.register_forward_hook(look)
    with hook_ranges(model):
        (ranged,) = model._forward_hooks.values()
        assert ranged is not look
        assert copied(ranged) is look
        assert list(copy.deepcopy(model)._forward_hooks.values()) == [look]


def test_hooks_of_torch_are_left_alone() -> None:
    model = spectral_norm(nn.Linear(3, 3))
    before = list(model._forward_pre_hooks.values())
    assert before
    with hook_ranges(model):
        assert list(model._forward_pre_hooks.values()) == before


def test_names_of_partial_and_local_hooks() -> None:
    def local(scale: float, *_: Any) -> None:
        pass

    line = local.__code__.co_firstlineno
    assert hook_name(functools.partial(local, 2.0)) == f"local (test_user_hooks.py:{line})"
    assert hook_name(lambda *_: None).startswith("<lambda> (test_user_hooks.py:")
    assert hook_name(print) == "print"
