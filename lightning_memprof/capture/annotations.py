"""Names in the operator trace: module forwards and the Trainer's actions, only while a window is open."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._C._profiler import _RecordFunctionFast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from lightning_memprof.capture.base import ActionFeed

__all__ = ["action_ranges", "module_ranges"]


@contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """Name every sub-module's forward ``[pl][module]{type}: {path}`` in the trace.

    Hooks are put on each module and removed at the end, but for modules that are compiled: torch would compile them
    again for every hook that comes or goes. What a compiled function calls without being a compiled module itself is
    not cut by the hooks either: while torch compiles, their first line is a constant.
    """
    ranges: list[Any] = []

    def before(name: str, module: nn.Module, args: Any) -> None:  # noqa: ARG001 torch's signature
        if torch.compiler.is_compiling():
            return
        opened = _RecordFunctionFast(name)
        opened.__enter__()
        ranges.append(opened)

    def after(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001 torch's signature
        if torch.compiler.is_compiling():
            return
        if ranges:
            ranges.pop().__exit__(None, None, None)

    with ExitStack() as hooks:
        compiled = _compiled_paths(model)
        for path, module in model.named_modules():
            if path and not any(path == part or path.startswith(f"{part}.") for part in compiled):
                kind = type(module)
                name = _quoteless(f"[pl][module]{kind.__module__}.{kind.__qualname__}: {path}")
                hooks.callback(module.register_forward_pre_hook(partial(before, name), prepend=True).remove)
                hooks.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


def _compiled_paths(model: nn.Module) -> list[str]:
    """Return the paths of modules that torch.compile has taken; all of them where Lightning says so of the whole."""
    if getattr(model, "_compiler_ctx", None) is not None:
        return [path for path, _ in model.named_children()]
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    optimized: type | tuple[()] = getattr(dynamo, "OptimizedModule", ())
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, optimized) or getattr(module, "_compiled_call_impl", None) is not None
    ]


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
