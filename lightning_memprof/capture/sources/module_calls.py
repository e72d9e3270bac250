"""Start and end of the forwards of a model's modules, only while a window is open."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_memprof.capture.base import SkipWindow
from lightning_memprof.capture.observe import wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_memprof.capture.observe import Link

__all__ = ["COMPILED", "ForwardWatch", "Forwards", "is_compiled", "module_calls", "module_hooks", "skip_compiled"]

COMPILED: Final = "a part of the model is compiled: torch would recompile it when hooks come or go"


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model or a part of it is compiled."""
    if getattr(model, "_compiler_ctx", None) is not None:
        return True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    optimized: type | tuple[()] = getattr(dynamo, "OptimizedModule", ())
    return any(
        isinstance(module, optimized) or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def skip_compiled(model: nn.Module) -> None:
    """Check that hooks of the model's modules are possible.

    Raises:
        SkipWindow: a part of the model is compiled.

    """
    if is_compiled(model):
        raise SkipWindow(COMPILED)


@contextmanager
def module_calls(
    model: nn.Module, before: Callable[[str, tuple[Any, ...]], None], after: Callable[[str], None]
) -> Iterator[bool]:
    """Call ``before`` and ``after`` around the forward of every module of ``model``.

    They get the module's path, ``""`` for the model itself, and ``before`` also the positional arguments. Each
    ``before`` has its ``after``, also if a forward raises or the context ends inside one. Forwards in other threads
    than the one that opens the context are not reported.

    It wraps ``nn.Module._call_impl``: torch's global hooks send every module of the process through its slow path,
    5 µs per forward, twice the cost of this. Not ``__call__``: torch's profiler recognizes its code when it records
    stacks, would read ``self`` from our frame, and crash. Copies, pickles and scripted versions of the model contain
    nothing of this.

    Yields:
        Whether forwards are reported: they are not if a part of the model is compiled, see :data:`COMPILED`.

    """
    if is_compiled(model):
        yield False
        return
    paths = {id(module): path for path, module in model.named_modules()}
    path_of = paths.get
    inside: list[str] = []
    is_compiling = torch.compiler.is_compiling
    thread = get_ident()

    def wrap(link: Link) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **keywords: Any) -> Any:
            if is_compiling() or (path := path_of(id(module))) is None or get_ident() != thread:
                return link.call(module, *args, **keywords)
            before(path, args)
            inside.append(path)
            try:
                return link.call(module, *args, **keywords)
            finally:
                if inside:
                    after(inside.pop())

        return call

    with wrapped(nn.Module, "_call_impl", wrap):
        try:
            yield True
        finally:
            # A wrapper that is still in a forward, or cannot be removed, passes through from now on.
            paths.clear()
            while inside:
                after(inside.pop())


@contextmanager
def module_hooks(
    root: nn.Module, before: Callable[[nn.Module, Any], None], after: Callable[[nn.Module, Any, Any], None]
) -> Iterator[bool]:
    """Call ``before(module, args)`` and ``after(module, args, output)`` around the forward of every module of ``root``.

    Like torch's own hooks they are called in the thread of the forward, and ``after`` is not called if it raises. Their
    results are ignored, and the modules hold no reference to them.

    Yields:
        Whether they are called: not if a part of ``root`` is compiled, see :data:`COMPILED`.

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


@dataclass
class _Figure:
    """One quantity: at the start of the first forward, at the end of the last, and the growth over all forwards."""

    before: int = 0
    after: int = 0
    added: int = 0
    began: int = 0

    def named(self, name: str) -> dict[str, int]:
        return {f"{name}_pre_forward": self.before, f"{name}_post_forward": self.after, f"{name}_diff": self.added}


class Forwards:
    """The outermost forwards since ``packed_before`` bytes were saved for backward."""

    def __init__(self, packed_before: int) -> None:
        self.is_inside = False
        self._packed_before = packed_before
        self._count = 0
        self._rss = _Figure()
        self._npp = _Figure()

    def begin(self, rss_bytes: int, packed_bytes: int) -> None:
        """Start an outermost forward."""
        for figure, now in ((self._rss, rss_bytes), (self._npp, packed_bytes - self._packed_before)):
            figure.began = now
            if self._count == 0:
                figure.before = now
        self._count += 1
        self.is_inside = True

    def end(self, rss_bytes: int, packed_bytes: int) -> None:
        """End it; does nothing if none is open."""
        if self.is_inside:
            self.is_inside = False
            for figure, now in ((self._rss, rss_bytes), (self._npp, packed_bytes - self._packed_before)):
                figure.after = now
                figure.added += now - figure.began

    def rss(self) -> dict[str, int]:
        """Return RSS in bytes; 0 without a forward."""
        return self._rss.named("rss")

    def npp(self) -> dict[str, int]:
        """Return bytes of saved activations; 0 without a forward."""
        return self._npp.named("npp")


class ForwardWatch:
    """Reads memory at the start and end of the outermost forwards of a model's modules, in the creating thread.

    The modules inside an outermost forward are not read; each costs two function calls.

    Args:
        model: the model; no part of it is compiled.
        rss: returns the RSS in bytes.
        packed: returns the bytes saved for backward so far.
        guard: wraps a function so that it cannot raise into the user's code.

    """

    def __init__(
        self,
        model: nn.Module,
        rss: Callable[[], int],
        packed: Callable[[], int],
        guard: Callable[[Callable[..., None]], Any],
    ) -> None:
        self._rss = rss
        self._packed = packed
        self._open: list[Forwards] = []
        # For each running forward, those for which it is an outermost one.
        self._inside: list[list[Forwards]] = []
        self._calls = ExitStack()
        self._calls.enter_context(module_calls(model, guard(self._begin), guard(self._end)))

    def open(self) -> Forwards:
        """Watch the forwards that start from now on."""
        forwards = Forwards(self._packed())
        self._open.append(forwards)
        return forwards

    def close(self, forwards: Forwards) -> None:
        """Stop watching; a running forward ends here."""
        if forwards in self._open:
            self._open.remove(forwards)
            forwards.end(self._rss(), self._packed())

    def release(self) -> None:
        """Watch nothing from now on."""
        self._open.clear()
        self._calls.close()

    def _begin(self, *_: object) -> None:
        waiting = [forwards for forwards in self._open if not forwards.is_inside]
        self._inside.append(waiting)
        if waiting:
            rss, packed = self._rss(), self._packed()
            for forwards in waiting:
                forwards.begin(rss, packed)

    def _end(self, *_: object) -> None:
        if self._inside and (waiting := self._inside.pop()):
            rss, packed = self._rss(), self._packed()
            for forwards in waiting:
                forwards.end(rss, packed)
