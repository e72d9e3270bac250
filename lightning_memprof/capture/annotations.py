"""Names in the operator trace: module forwards and the Trainer's actions, only while a window is open."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from lightning_memprof.capture.base import ActionFeed

__all__ = ["action_ranges", "module_ranges"]


@contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """Name every sub-module's forward ``[pl][module]{type}: {path}`` in the trace.

    The hooks are torch's global ones: a model that is copied, pickled or scripted meanwhile takes none along. Where a
    part of the model is compiled there are no names at all: torch would compile it again for hooks that come or go.
    """
    if _is_compiled(model):
        yield
        return
    names = {
        id(module): _quoteless(f"[pl][module]{type(module).__module__}.{type(module).__qualname__}: {path}")
        for path, module in model.named_modules()
        if path
    }
    ranges: list[tuple[int, Any]] = []

    def before(module: nn.Module, args: Any) -> None:  # noqa: ARG001 torch's signature
        if torch.compiler.is_compiling():
            return
        name = names.get(id(module))
        if name is not None:
            opened = _RecordFunctionFast(name)
            opened.__enter__()
            ranges.append((id(module), opened))

    def after(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001 torch's signature
        if torch.compiler.is_compiling():
            return
        if ranges and ranges[-1][0] == id(module):
            ranges.pop()[1].__exit__(None, None, None)

    hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while ranges:
            ranges.pop()[1].__exit__(None, None, None)


def _is_compiled(model: nn.Module) -> bool:
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
def action_ranges(actions: ActionFeed) -> Iterator[Callable[[], None]]:
    """Name every action of the Trainer ``[pl][profile]{action}`` in the trace.

    Yields a function that ends the ranges that are open. It has to be called where a range around them ends before
    them, as a step does that is over in the middle of the next epoch's first action: ranges that overlap without one
    holding the other crash torch when the process ends.
    """
    ranges: list[tuple[str, Any]] = []

    def start(name: str) -> None:
        opened = _RecordFunctionFast(_quoteless("[pl][profile]" + name))
        opened.__enter__()
        ranges.append((name, opened))

    def stop(name: str) -> None:
        if ranges and ranges[-1][0] == name:
            ranges.pop()[1].__exit__(None, None, None)

    def cut() -> None:
        while ranges:
            ranges.pop()[1].__exit__(None, None, None)

    with actions.listen(start, stop):
        try:
            yield cut
        finally:
            cut()


def _quoteless(name: str) -> str:
    """Replace quotes: Kineto writes them unescaped, and the trace would be no JSON."""
    return name.replace('"', "'")
