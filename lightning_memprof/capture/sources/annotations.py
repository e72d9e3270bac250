"""Names in the operator trace: module forwards and the Trainer's actions, only while a window is open."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch._C._profiler import _RecordFunctionFast

from lightning_memprof.capture.sources.module_calls import module_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from lightning_memprof.capture.base import ActionFeed

__all__ = ["action_ranges", "module_ranges"]


@contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """Name every sub-module's forward ``[pl][module]{type}: {path}`` in the trace.

    Where a part of the model is compiled there are no names at all.
    """
    names = {
        path: _quoteless(f"[pl][module]{type(module).__module__}.{type(module).__qualname__}: {path}")
        for path, module in model.named_modules()
        if path
    }
    ranges: list[Any] = []

    def before(path: str, args: tuple[Any, ...]) -> None:  # noqa: ARG001 a name is all that is needed
        if path:
            ranges.append(_RecordFunctionFast(names[path]))
            ranges[-1].__enter__()

    def after(path: str) -> None:
        if path:
            ranges.pop().__exit__(None, None, None)

    with module_calls(model, before, after):
        yield


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
