"""Start and end of the forwards of a model's modules, only while a window is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from threading import get_ident
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from lightning_memprof.capture.observe import Link, wrapped
from lightning_memprof.capture.room import Room, with_room
from lightning_memprof.capture.sources.compiled import (
    COMPILED_CALL,
    compiled_modules,
    is_redirected,
    module_paths,
    outside_of_compilers,
)
from lightning_memprof.capture.torch_internals import DisableTorchFunction, _get_tracing_state

_CALL: Final = "_call_impl"
_CALLS: Final = "_memprof_calls"


@contextmanager
def module_calls(
    model: nn.Module, before: Callable[[str, tuple[Any, ...]], None], after: Callable[[str, Any], None]
) -> Iterator[None]:
    """Call ``before`` and ``after`` around the forward of every module of ``model``.

    They get the module's path, ``""`` for the model itself, and the positional arguments or the output. Each ``before``
    has its ``after``, also if a forward raises or the context ends inside one: the output is None then. Forwards in
    other threads than the one that opens the context are not reported, nor those inside compiled code.

    It takes the place of ``nn.Module._call_impl`` on the stack and adds no frame: a model that is nested as deeply as
    Python's recursion limit allows still runs. If the limit leaves no frame at all, a forward is not reported.
    torch's global hooks would add a frame, and send every module of the process through torch's slow path, 5 µs per
    forward, twice the cost of this. Not ``__call__``: torch's profiler recognizes its code when it records
    stacks, would read ``self`` from our frame, and crash. Copies, pickles and scripted versions of the model contain
    nothing of this. The call that a module's ``compile()`` makes is on the instance, and is wrapped there.
    """
    listener = _Listener(model, before, after)
    with ExitStack() as undo:
        calls = _shared_calls()
        # First of all: a wrapper that is still in a forward, or cannot be removed, passes through from now on.
        undo.callback(calls.remove, listener)
        calls.add(listener)
        places: list[tuple[Any, str]] = [(nn.Module, _CALL)]
        for module in _with_compiled_calls(model):
            wrap = partial(_compiled_call, module, listener, calls.thread)
            undo.enter_context(wrapped(module, COMPILED_CALL, wrap))
            places.append((module, COMPILED_CALL))
        ours = (with_room, Room.__enter__, Room.__exit__, _begin, _end)
        undo.enter_context(outside_of_compilers(ours, *places))
        yield


class _Listener:
    """The functions of one :func:`module_calls`, and the paths of the forwards that have begun and not ended."""

    def __init__(
        self, model: nn.Module, before: Callable[[str, tuple[Any, ...]], None], after: Callable[[str, Any], None]
    ) -> None:
        self.paths = {id(module): path for path, module in module_paths(model).items()}
        self.before = before
        self.after = after
        self.inside: list[str] = []

    def close(self) -> None:
        """End the forwards that have begun; none begins from now on."""
        self.paths.clear()
        while self.inside:
            self.after(self.inside.pop(), None)


class _Calls:
    """The wrapper of ``nn.Module._call_impl``, one for all listeners: each further one would be a frame per module."""

    def __init__(self) -> None:
        self.thread = get_ident()
        # The newest first: it is around the others.
        self._listeners: list[_Listener] = []
        self._by_module: dict[int, tuple[_Listener, ...]] = {}
        self._installed = ExitStack()
        self._installed.enter_context(wrapped(nn.Module, _CALL, self._wrap))

    def add(self, listener: _Listener) -> None:
        self._listeners.insert(0, listener)
        self._update()

    def remove(self, listener: _Listener) -> None:
        """Remove it; the last one removes the wrapper."""
        self._listeners = [each for each in self._listeners if each is not listener]
        self._update()
        if not self._listeners:
            self._installed.close()
        listener.close()

    def _update(self) -> None:
        modules = {key for listener in self._listeners for key in listener.paths}
        found = {key: tuple(each for each in self._listeners if key in each.paths) for key in modules}
        # The wrapper has this dictionary.
        self._by_module.clear()
        self._by_module.update(found)

    def _wrap(self, link: Link) -> Callable[..., Any]:
        hooks_of, shared_hooks = _hooks_that_torch_calls(link)
        is_compiling = torch.compiler.is_compiling
        listeners_of, thread = self._by_module.get, self.thread

        def call(module: nn.Module, /, *args: Any, **keywords: Any) -> Any:
            try:
                # First: a compiler that is loaded after the context has opened can trace nothing else here.
                is_traced = is_compiling()
            except RecursionError:
                is_traced = False
            if is_traced:
                return link.call(module, *args, **keywords)
            listeners = listeners_of(id(module)) if get_ident() == thread else None
            begun, output = False, None
            # Without hooks, this frame replaces torch's.
            __tracebackhide__ = False
            if listeners is not None:
                try:
                    begun = with_room(_begin, listeners, id(module), args)
                except RecursionError:
                    begun = False  # the program has no frame left
            try:
                if hooks_of is None or _get_tracing_state() is not None:
                    __tracebackhide__ = True
                    output = link.call(module, *args, **keywords)
                elif any(own := hooks_of(module)) or any(shared_hooks):
                    __tracebackhide__ = True
                    # torch adds a frame for hooks of ours that are global.
                    with Room(1 if any(own) else 2):
                        output = link.call(module, *args, **keywords)
                else:
                    # As torch's function does without hooks, in place of its frame.
                    output = module.forward(*args, **keywords)
                return output
            finally:
                if begun:
                    with_room(_end, listeners, output)

        vars(call)[_CALLS] = self
        return call


def _begin(listeners: tuple[_Listener, ...], key: int, args: tuple[Any, ...]) -> bool:
    """Call ``before`` of the listeners; return whether ``after`` follows."""
    with DisableTorchFunction():
        for listener in listeners:
            # None where another listener's function has ended its context.
            if (path := listener.paths.get(key)) is not None:
                listener.before(path, args)
                listener.inside.append(path)
    return True


def _end(listeners: tuple[_Listener, ...], output: Any) -> None:
    with DisableTorchFunction():
        for listener in reversed(listeners):
            if listener.inside:
                listener.after(listener.inside.pop(), output)


def _shared_calls() -> _Calls:
    """Return the installed wrapper of ``nn.Module._call_impl``; a new one if another library's hides it."""
    calls = vars(vars(nn.Module)[_CALL]).get(_CALLS)
    return calls if isinstance(calls, _Calls) and calls.thread == get_ident() else _Calls()


def _hooks_that_torch_calls(link: Link) -> tuple[Callable[[Any], tuple[Any, ...]] | None, list[Any]]:
    """Return a function that reads a module's dictionaries of hooks, and torch's global ones.

    Without an entry in any of them torch's ``_call_impl`` does nothing but call ``forward``. None where another
    function is in its place.
    """
    code = getattr(link.call, "__code__", None)
    if code is None or link.call.__module__ != torch_module.__name__:
        return None, []
    names = [name for name in code.co_names if name.endswith("_hooks")]
    shared = [name for name in names if hasattr(torch_module, name)]
    own = attrgetter(*(name for name in names if name not in shared))
    return own, [getattr(torch_module, name) for name in shared]


def _with_compiled_calls(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules whose ``compile()`` was called; the code of a compiled model calls no other."""
    if getattr(model, "_compiler_ctx", None) is None:
        compiled = compiled_modules(model)
        for path, module in compiled.items():
            is_inner = any(not other or path.startswith(f"{other}.") for other in compiled if other != path)
            if not is_inner and (path or not is_redirected()) and vars(module).get(COMPILED_CALL) is not None:
                yield module


def _compiled_call(module: nn.Module, listener: _Listener, thread: int, link: Link) -> Callable[..., Any]:
    """Return the wrapper of a module's compiled call, an attribute of the instance."""

    def call(*args: Any, **keywords: Any) -> Any:
        key = id(module)
        if key not in listener.paths or get_ident() != thread or not _begin((listener,), key, args):
            return link.call(*args, **keywords)
        output = None
        try:
            output = link.call(*args, **keywords)
            return output
        finally:
            _end((listener,), output)

    return call
