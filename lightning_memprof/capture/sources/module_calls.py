"""Start and end of the forwards of a model's modules, only while a window is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_memprof.capture.observe import Link, wrapped
from lightning_memprof.capture.sources.compiled import (
    COMPILED_CALL,
    compiled_modules,
    is_compiled,
    is_redirected,
    module_paths,
    outside_of_compilers,
)


@contextmanager
def module_calls(
    model: nn.Module, before: Callable[[str, tuple[Any, ...]], None], after: Callable[[str, Any], None]
) -> Iterator[None]:
    """Call ``before`` and ``after`` around the forward of every module of ``model``.

    They get the module's path, ``""`` for the model itself, and the positional arguments or the output. Each ``before``
    has its ``after``, also if a forward raises or the context ends inside one: the output is None then. Forwards in
    other threads than the one that opens the context are not reported, nor those inside compiled code.

    It wraps ``nn.Module._call_impl``: torch's global hooks send every module of the process through its slow path,
    5 µs per forward, twice the cost of this. Not ``__call__``: torch's profiler recognizes its code when it records
    stacks, would read ``self`` from our frame, and crash. Copies, pickles and scripted versions of the model contain
    nothing of this. The call that a module's ``compile()`` makes is on the instance, and is wrapped there.
    """
    paths = {id(module): path for path, module in module_paths(model).items()}
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
            output = None
            try:
                output = link.call(module, *args, **keywords)
                return output
            finally:
                if inside:
                    after(inside.pop(), output)

        return call

    with ExitStack() as wrappers:
        wrappers.callback(_end_all, paths, inside, after)
        wrappers.enter_context(wrapped(nn.Module, "_call_impl", wrap))
        places: list[tuple[Any, str]] = [(nn.Module, "_call_impl")]
        for module in _with_compiled_calls(model):
            wrappers.enter_context(wrapped(module, COMPILED_CALL, partial(_bound, module, wrap)))
            places.append((module, COMPILED_CALL))
        functions = vars(nn.Module)["_call_impl"], before, after
        wrappers.enter_context(outside_of_compilers(functions, *places))
        yield


def _end_all(paths: dict[int, str], inside: list[str], after: Callable[[str, Any], None]) -> None:
    # A wrapper that is still in a forward, or cannot be removed, passes through from now on.
    paths.clear()
    while inside:
        after(inside.pop(), None)


def _with_compiled_calls(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules whose ``compile()`` was called; the code of a compiled model calls no other."""
    if getattr(model, "_compiler_ctx", None) is None:
        compiled = compiled_modules(model)
        for path, module in compiled.items():
            is_inner = any(not other or path.startswith(f"{other}.") for other in compiled if other != path)
            if not is_inner and (path or not is_redirected()) and vars(module).get(COMPILED_CALL) is not None:
                yield module


def _bound(module: nn.Module, wrap: Callable[[Any], Callable[..., Any]], link: Link) -> Callable[..., Any]:
    """Return the wrapper of a call that has its module already."""

    def call(_: nn.Module, *args: Any, **keywords: Any) -> Any:
        return link.call(*args, **keywords)

    return partial(wrap(SimpleNamespace(call=call)), module)


@contextmanager
def module_hooks(
    root: nn.Module, before: Callable[[nn.Module, Any], None], after: Callable[[nn.Module, Any, Any], None]
) -> Iterator[bool]:
    """Call ``before(module, args)`` and ``after(module, args, output)`` around the forward of every module of ``root``.

    Like torch's own hooks they are called in the thread of the forward, and ``after`` is not called if it raises. Their
    results are ignored, and the modules hold no reference to them.

    Yields:
        Whether they are called: not if a part of ``root`` is compiled.
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
