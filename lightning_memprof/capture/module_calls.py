"""The forwards of a model's modules as they begin and end, only while a window is open."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

__all__ = ["COMPILED", "is_compiled", "module_calls", "module_hooks"]

COMPILED = "a part of the model is compiled: torch would compile it again for hooks that come or go"


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
    model: nn.Module,
    before: Callable[[str], None],
    after: Callable[[str], None],
    given: Callable[[tuple[Any, ...]], None] | None = None,
) -> Iterator[bool]:
    """Call ``before`` and ``after`` with the path of every module of ``model`` whose forward begins and ends.

    The model itself has the path ``""``. Each ``before`` has its ``after``, also where a forward raises and where the
    context ends inside of one. The hooks are torch's global ones: a model that is copied, pickled or scripted meanwhile
    takes none along. Forwards of other threads than the one that opens the context are not told. Just before
    ``before``, ``given`` is called with the forward's positional arguments.

    Yields:
        Whether forwards are told at all: where a part of the model is compiled they are not, for :data:`COMPILED`.

    """
    if is_compiled(model):
        yield False
        return
    paths = {id(module): path for path, module in model.named_modules()}
    inside: list[tuple[int, str]] = []
    thread = get_ident()

    def begin(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or get_ident() != thread:
            return
        path = paths.get(id(module))
        if path is not None:
            if given is not None:
                given(args)
            before(path)
            inside.append((id(module), path))

    def end(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001 torch's signature
        if torch.compiler.is_compiling() or get_ident() != thread:
            return
        if inside and inside[-1][0] == id(module):
            after(inside.pop()[1])

    hooks = [register_module_forward_pre_hook(begin), register_module_forward_hook(end, always_call=True)]
    try:
        yield True
    finally:
        for hook in hooks:
            hook.remove()
        while inside:
            after(inside.pop()[1])


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
        if id(module) in members and not torch.compiler.is_compiling():
            before(module, args)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in members and not torch.compiler.is_compiling():
            after(module, args, output)

    hooks = [register_module_forward_pre_hook(begin), register_module_forward_hook(end)]
    try:
        yield True
    finally:
        for hook in hooks:
            hook.remove()
