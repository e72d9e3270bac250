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

__all__ = ["COMPILED", "is_compiled", "module_calls"]

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
def module_calls(model: nn.Module, before: Callable[[str], None], after: Callable[[str], None]) -> Iterator[bool]:
    """Call ``before`` and ``after`` with the path of every module of ``model`` whose forward begins and ends.

    The model itself has the path ``""``. Each ``before`` has its ``after``, also where a forward raises and where the
    context ends inside of one. The hooks are torch's global ones: a model that is copied, pickled or scripted meanwhile
    takes none along. Forwards of other threads than the one that opens the context are not told.

    Yields:
        Whether forwards are told at all: where a part of the model is compiled they are not, for :data:`COMPILED`.

    """
    if is_compiled(model):
        yield False
        return
    paths = {id(module): path for path, module in model.named_modules()}
    inside: list[tuple[int, str]] = []
    thread = get_ident()

    def begin(module: nn.Module, args: Any) -> None:  # noqa: ARG001 torch's signature
        if torch.compiler.is_compiling() or get_ident() != thread:
            return
        path = paths.get(id(module))
        if path is not None:
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
