"""The program's own hooks on the modules and parameters of a model, each in a named range while a window is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath
from types import MethodType
from typing import Any, Final

from torch import nn
from torch.nn.modules import module as torch_module

from lightning_memprof.artifacts.trace_rewriting import range_name
from lightning_memprof.capture.observe import StandIn, without_torch_function
from lightning_memprof.capture.sources.compiled import is_compiled
from lightning_memprof.capture.torch_internals import _RecordFunctionFast
from lightning_memprof.packages import PACKAGES

# Attributes of modules, parameters and torch's module of global hooks: torch has no public access to them.
_FORWARD: Final = ("_forward_hooks", "_forward_pre_hooks", "_global_forward_hooks", "_global_forward_pre_hooks")
_BACKWARD: Final = (
    *("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)
# Weight normalization, sharding and ourselves: their hooks are part of the model, and they look for them by class.
_NOT_THE_PROGRAMS: Final = PACKAGES | {"torch", "lightning_memprof"}
_LOCAL: Final = "<locals>."


@contextmanager
def hook_ranges(model: nn.Module) -> Iterator[None]:
    """Put the program's hooks into ranges ``[pl][forward_hook]NAME (FILE:LINE)``, or ``backward_hook``.

    Those of forward and backward of every module, and of the gradients of parameters, that are registered when the
    context opens. Hooks of torch and Lightning are left alone, and all of them if a part of the model is compiled.
    Costs nothing for a model without hooks, and 1 µs for each call of one.
    """
    if is_compiled(model):
        yield
        return
    is_open = [True]
    ranged = _ranged(model, is_open)
    try:
        yield
    finally:
        is_open.clear()
        for hooks, key, hook, made in ranged:
            # The program may have removed it, or put another one in its place.
            if hooks.get(key) is made:
                hooks[key] = hook


@without_torch_function
def _ranged(model: nn.Module, is_open: list[bool]) -> list[tuple[MutableMapping[int, Any], int, Any, StandIn]]:
    """Replace the program's hooks; return for each its dictionary, its key, the hook and what stands for it."""
    found = []
    for hooks, kind in _registered(model):
        # Their order stays.
        for key, hook in list(hooks.items()):
            place = str(getattr(_function(hook), "__module__", None))
            if place.partition(".")[0] not in _NOT_THE_PROGRAMS:
                name = range_name(f"[pl][{kind}_hook]{hook_name(hook)}")
                hooks[key] = made = StandIn(hook, partial(_in_range, is_open, name, hook))
                found.append((hooks, key, hook, made))
    return found


def _in_range(is_open: list[bool], name: str, hook: Callable[..., Any], /, *args: Any, **keywords: Any) -> Any:
    __tracebackhide__ = True
    if not is_open:
        return hook(*args, **keywords)
    with _RecordFunctionFast(name):
        return hook(*args, **keywords)


def hook_name(hook: Callable[..., Any]) -> str:
    """Return the name of a hook and the place of its code: ``Probe.check (train.py:41)``."""
    function = _function(hook)
    owner = function if hasattr(function, "__qualname__") else type(function)
    name = owner.__qualname__.rpartition(_LOCAL)[2]
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f"{name} ({PurePath(code.co_filename).name}:{code.co_firstlineno})" if code is not None else name


def _function(hook: Callable[..., Any]) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    return hook.__func__ if isinstance(hook, MethodType) else hook


def _registered(model: nn.Module) -> Iterator[tuple[MutableMapping[int, Any], str]]:
    """Yield the non-empty dictionaries of hooks, each with the pass that calls them."""
    for owner in (*model.modules(), *model.parameters(), torch_module):
        for names, kind in ((_FORWARD, "forward"), (_BACKWARD, "backward")):
            for name in names:
                if hooks := getattr(owner, name, None):
                    yield hooks, kind
