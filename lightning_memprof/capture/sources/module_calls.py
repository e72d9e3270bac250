"""The forwards of a model's modules as they begin and end, only while a window is open."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_memprof.capture.observe import in_front_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["COMPILED", "is_compiled", "module_calls", "module_hooks"]

COMPILED: Final = "a part of the model is compiled: torch would compile it again for hooks that come or go"
_CALL: Final = "_call_impl"


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has taken the model or a part of it."""
    if getattr(model, "_compiler_ctx", None) is not None:
        return True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    optimized: type | tuple[()] = getattr(dynamo, "OptimizedModule", ())
    return any(
        isinstance(module, optimized) or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


@contextmanager
def module_calls(
    model: nn.Module, before: Callable[[str, tuple[Any, ...]], None], after: Callable[[str], None]
) -> Iterator[bool]:
    """Call ``before`` and ``after`` around the forward of every module of ``model``.

    They are given the module's path, ``""`` for the model itself, and ``before`` also the positional arguments. Each
    ``before`` has its ``after``, also where a forward raises and where the context ends inside of one. Forwards of
    other threads than the one that opens the context are not told.

    ``nn.Module._call_impl`` is exchanged for the time of the context: torch's global hooks send every module of the
    process through its slow half, 5 us a forward, twice of what this takes. Not ``__call__``, whose code torch's
    profiler looks for when it records stacks: it would take ``self`` out of the frame of ours, and crash. A model that
    is copied, pickled or scripted meanwhile takes nothing along.

    Yields:
        Whether forwards are told at all: where a part of the model is compiled they are not, for :data:`COMPILED`.

    """
    if is_compiled(model):
        yield False
        return
    paths = {id(module): path for path, module in model.named_modules()}
    path_of = paths.get
    inside: list[str] = []
    is_compiling = torch.compiler.is_compiling
    thread = get_ident()

    def patched(following: list[Callable[..., Any]]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **keywords: Any) -> Any:
            if is_compiling() or (path := path_of(id(module))) is None or get_ident() != thread:
                return following[0](module, *args, **keywords)
            before(path, args)
            inside.append(path)
            try:
                return following[0](module, *args, **keywords)
            finally:
                if inside:
                    after(inside.pop())

        return call

    with in_front_of(nn.Module, "_call_impl", patched):
        try:
            yield True
        finally:
            # What still stands in a forward, or cannot be taken out, does nothing from now on.
            paths.clear()
            while inside:
                after(inside.pop())


@contextmanager
def module_hooks(
    root: nn.Module, before: Callable[[nn.Module, Any], None], after: Callable[[nn.Module, Any, Any], None]
) -> Iterator[bool]:
    """Call ``before(module, args)`` and ``after(module, args, output)`` around the forward of every module of ``root``.

    As torch's own hooks they are called in whichever thread it runs, and ``after`` not where it raises. What they
    return changes nothing, and the modules themselves hold nothing of them.

    Yields:
        Whether they are called at all: not where a part of ``root`` is compiled, for :data:`COMPILED`.

    """
    if is_compiled(root):
        yield False
        return
    members = {id(module) for module in root.modules()}

    def begin(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and id(module) in members:
            before(module, args)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and id(module) in members:
            after(module, args, output)

    hooks = [register_module_forward_pre_hook(begin), register_module_forward_hook(end)]
    try:
        yield True
    finally:
        for hook in hooks:
            hook.remove()
