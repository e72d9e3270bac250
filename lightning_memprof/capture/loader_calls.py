"""Time inside a fetch by function: methods of the data set, transforms and functions that it holds, ``collate_fn``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, update_wrapper
from threading import get_ident
from time import perf_counter_ns
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch.compiler import is_compiling
from torch.utils.data import Dataset

from lightning_memprof.capture.observe import Link, wrapped

_OBJECTS: Final = 2000
# A list of samples is not searched.
_ENTRIES: Final = 256
_FUNCTIONS: Final = (FunctionType, MethodType, BuiltinFunctionType, partial)
_LEAVES: Final = (str, bytes, bytearray, int, float, complex, type, ModuleType, torch.Tensor, type(None))
_BY_SYNTAX: Final = ("__call__", "__getitem__", "__getitems__")
# Recording a call takes 0.5 µs: frequent short ones count for another name.
_CHEAP_NS: Final = 10_000
_MANY: Final = 1000


class Calls:
    """Count, self time and total time by name, in ns, of the thread that makes this object."""

    def __init__(self) -> None:
        self.times: dict[str, list[int]] = {}
        self._thread = get_ident()
        self._open: list[str] = []
        self._inside: list[int] = []
        self._cheap: set[str] = set()

    def run(self, name: str, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call a function and add its time; a call inside one of the same name adds self time only."""
        __tracebackhide__ = True
        if name in self._cheap or get_ident() != self._thread or is_compiling():
            return call(*arguments, **keywords)
        self._open.append(name)
        self._inside.append(0)
        began = perf_counter_ns()
        try:
            return call(*arguments, **keywords)
        finally:
            ns = perf_counter_ns() - began
            self._open.pop()
            times = self.times.setdefault(name, [0, 0, 0])
            times[1] += ns - self._inside.pop()
            if self._inside:
                self._inside[-1] += ns
            if name not in self._open:
                times[0] += 1
                times[2] += ns

    def drop_cheap(self, into: str) -> None:
        """Let functions of which recording takes much of the time count for another name from now on."""
        for name, (count, own_ns, total_ns) in list(self.times.items()):
            if count >= _MANY and total_ns < count * _CHEAP_NS:
                self._cheap.add(name)
                self.times[into][1] += own_ns
                del self.times[name]


@contextmanager
def timed_calls(calls: Calls, *roots: Any) -> Iterator[None]:
    """Time what objects hold, a data set and a ``collate_fn``, while the context is open."""
    with ExitStack() as undo:
        for place, name, label in _places(list(_held(roots))):
            # Classes of extension modules do not allow it.
            with suppress(Exception):
                undo.enter_context(_replaced(place, name, calls, label))
        yield


def name_of(function: Any) -> str:
    """Return how a program calls a function, or an object that is called."""
    function = function.func if isinstance(function, partial) else function
    name = getattr(function, "__qualname__", None)
    return name.rpartition("<locals>.")[2] if isinstance(name, str) else f"{type(function).__name__}.__call__"


class _Timed:
    """A function that adds its time; but for its type and identity it is the function, also pickled and copied."""

    __slots__ = ("function", "run")

    def __init__(self, calls: Calls, label: str, function: Any) -> None:
        _FUNCTION.__set__(self, function)
        _RUN.__set__(self, partial(calls.run, label, function))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _RUN.__get__(self)(*arguments, **keywords)

    def __getattribute__(self, name: str) -> Any:
        if name == "__reduce_ex__":
            return object.__getattribute__(self, name)
        return getattr(_FUNCTION.__get__(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_FUNCTION.__get__(self), name, value)

    def __eq__(self, other: object) -> bool:
        return bool(_FUNCTION.__get__(self) == (_FUNCTION.__get__(other) if type(other) is _Timed else other))

    def __hash__(self) -> int:
        return hash(_FUNCTION.__get__(self))

    def __repr__(self) -> str:
        return repr(_FUNCTION.__get__(self))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _same, (_FUNCTION.__get__(self),)


# The attributes that are not the function's.
_FUNCTION: Final = vars(_Timed)["function"]
_RUN: Final = vars(_Timed)["run"]


def _same(function: Any) -> Any:
    return function


@contextmanager
def _replaced(place: Any, name: Any, calls: Calls, label: str) -> Iterator[None]:
    """Replace a method of a class, or a function in a container, which may be the attributes of an object."""

    def timed(link: Link) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            __tracebackhide__ = True
            return calls.run(label, link.call, *arguments, **keywords)

        return update_wrapper(call, link.below)

    if isinstance(place, type):
        with wrapped(place, name, timed):
            yield
        return
    entry = place[name]
    place[name] = wrapper = _Timed(calls, label, entry)
    try:
        yield
    finally:
        # The program may have changed the container.
        with suppress(LookupError):
            place[name] = entry if place[name] is wrapper else place[name]


def _held(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield the roots and what they hold, breadth first."""
    held = list(roots)
    seen = {*map(id, held)}
    for value in held:
        yield value
        entries = _entries(value)
        for child in dict.values(entries) if isinstance(entries, dict) else entries:
            if id(child) not in seen and not isinstance(child, _LEAVES) and len(held) < _OBJECTS:
                seen.add(id(child))
                held.append(child)


def _entries(value: Any) -> Any:
    """Return the entries of a short container, what a function refers to, or the attributes of an object."""
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__self__,)
    kinds: tuple[Any, ...] = (list, tuple, dict)
    for kind in kinds:
        if isinstance(value, kind):
            # Not `len`: a derived class may have its own.
            return value if kind.__len__(value) <= _ENTRIES else ()
    with suppress(AttributeError, TypeError):
        # Without the object's own `__getattribute__`. A function that is replaced in compiled code is compiled again.
        found = object.__getattribute__(value, "__dict__")
        return found if isinstance(found, dict) and not type(value).__module__.startswith("torch._dynamo") else ()
    return ()


def _places(held: list[Any]) -> Iterator[tuple[Any, Any, str]]:
    """Yield class or container, the name or key of a function in it, and the function's label.

    Functions of modules stay what they are: a batch with one that is replaced could not be sent.
    """
    for kind in {type(value) for value in held} - {*_FUNCTIONS}:
        names = {name for base in kind.__mro__ for name in vars(base)} if issubclass(kind, Dataset) else set()
        for name in {name for name in names if not name.startswith("__")}.union(_BY_SYNTAX):
            method = inspect.getattr_static(kind, name, None)
            # A generator function returns before its code runs.
            if not isinstance(method, FunctionType) or inspect.isgeneratorfunction(method):
                continue
            if name == "__call__" or not method.__module__.startswith("torch."):
                is_forward = name == "__call__" and issubclass(kind, torch.nn.Module)
                yield kind, name, f"{kind.__name__}.{'forward' if is_forward else name}"
    for value in held:
        entries = _entries(value)
        if isinstance(entries, list | dict):
            keys = list(dict.keys(entries)) if isinstance(entries, dict) else range(list.__len__(entries))
            # The type: `isinstance` takes a function that is timed already for one.
            functions = [key for key in keys if issubclass(type(entries[key]), _FUNCTIONS)]
            yield from ((entries, key, name_of(entries[key])) for key in functions)
