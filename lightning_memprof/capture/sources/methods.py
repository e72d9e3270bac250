"""Named methods that are heard for a time: when each call of them starts and ends."""

from __future__ import annotations

import functools
import inspect
from contextlib import contextmanager
from types import FunctionType, GeneratorType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeVar

import torch

from lightning_memprof.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from torch import nn

__all__ = [
    "IN_COMPILED",
    "MethodCall",
    "MethodListener",
    "compiled_methods",
    "heard_method",
    "marked_methods",
    "memprofilable",
    "why_not",
]

_Method = TypeVar("_Method", bound="Callable[..., Any]")

IN_COMPILED: Final = "a compiled part of the model may call it: torch would compile it again for what comes or goes"

# What a Trainer calls itself, from outside of anything that is compiled, besides `*_step` and `on_*`.
_TRAINERS: Final = frozenset(
    {"backward", "optimizer_zero_grad", "configure_gradient_clipping", "transfer_batch_to_device"}
)
_LIGHTNING: Final = frozenset({"lightning", "pytorch_lightning"})


class MethodCall:
    """One call of a method.

    Attributes:
        function: the method's name.
        suspends: whether it is a generator or a coroutine, which other code runs inside of.
        raised: at its end, the name of the exception's class; None where it returned, or a generator was closed.
        note: of whoever listens.

    """

    __slots__ = ("function", "note", "raised", "suspends")

    def __init__(self, function: str, *, suspends: bool) -> None:
        self.function = function
        self.suspends = suspends
        self.raised: str | None = None
        self.note: Any = None


class MethodListener(Protocol):
    """Hears of calls, in whichever thread they happen; must not raise: it is called in the user's code."""

    def start(self, call: MethodCall, /) -> None:
        """Hear that a call starts."""

    def end(self, call: MethodCall, /) -> None:
        """Hear that it ends, however it ends."""


class _Heard:
    """A context around one call; each start that was told has its end."""

    __slots__ = ("_calls", "_listeners")

    def __init__(self, listeners: Sequence[MethodListener], function: str, *, suspends: bool = False) -> None:
        self._listeners = listeners
        self._calls = [MethodCall(function, suspends=suspends) for _ in listeners]

    def __enter__(self) -> None:
        for listener, call in zip(self._listeners, self._calls, strict=True):
            listener.start(call)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for listener, call in zip(reversed(self._listeners), reversed(self._calls), strict=True):
            if kind is not None and not (call.suspends and kind is GeneratorExit):
                call.raised = kind.__name__
            listener.end(call)


def _relay(made: Any, heard: _Heard) -> Generator[Any, Any, Any]:
    with heard:
        return (yield from made)


async def _relay_coroutine(made: Any, heard: _Heard) -> Any:
    with heard:
        return await made


def _call(
    method: Callable[..., Any], listeners: Sequence[MethodListener], name: str, args: Any, kwargs: Any
) -> Any:  # fmt: skip
    """Call ``method``; a generator or coroutine starts when its body does and ends when that ends."""
    if inspect.iscoroutinefunction(method):
        return _relay_coroutine(method(*args, **kwargs), _Heard(listeners, name, suspends=True))
    if inspect.isgeneratorfunction(method):
        made = method(*args, **kwargs)
        return _relay(made, _Heard(listeners, name, suspends=True)) if isinstance(made, GeneratorType) else made
    with _Heard(listeners, name):
        return method(*args, **kwargs)


def _dressed(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``wrapper`` look like ``original``, but not like something that torch has compiled."""
    functools.update_wrapper(wrapper, original)
    for name in [name for name in vars(wrapper) if name.startswith("_torchdynamo")]:
        delattr(wrapper, name)
    return wrapper


class _Marked:
    """Who hears of the methods that are marked."""

    listeners: ClassVar[tuple[MethodListener, ...]] = ()


def memprofilable(method: _Method) -> _Method:
    """Mark a method of any class, or a function: every :class:`FunctionMemory` that records hears of its calls.

    It is recorded under its own name beside the methods that are named, for every object that has it. While nothing
    records, a call costs one attribute test, and torch's answer to whether it is compiling; inside a compiled region
    a marked method is not recorded. Under a static method or a class method the mark goes nearest to the function.

    Raises:
        ConfigError: it is an asynchronous generator, a property or a class method.

    """
    given: Any = method
    if isinstance(given, (property, classmethod)) or inspect.isasyncgenfunction(given):
        msg = f"@memprofilable on {method!r}: only functions, generators and coroutines have a start and an end"
        raise ConfigError(msg)
    name = getattr(method, "__name__", type(method).__name__)

    def marked(*args: Any, **kwargs: Any) -> Any:
        # Asked first: a compiled region must not depend on whether somebody listens.
        if torch.compiler.is_compiling() or not (listeners := _Marked.listeners):
            return method(*args, **kwargs)
        return _call(method, listeners, name, args, kwargs)

    _dressed(marked, method)
    marked.__memprofilable__ = True  # type: ignore[attr-defined]
    return marked  # type: ignore[return-value]


@contextmanager
def marked_methods(listener: MethodListener) -> Iterator[None]:
    """Hear of every call of every marked method, on any object and in any thread, while the context is open."""
    _Marked.listeners = (*_Marked.listeners, listener)
    try:
        yield
    finally:
        _Marked.listeners = tuple(other for other in _Marked.listeners if other is not listener)


class _Patch:
    """A wrapper in place of a method, in a class or in one instance, and who hears of which object's calls."""

    def __init__(self, place: Any, name: str) -> None:
        self.place = place
        self.name = name
        self.entries: list[tuple[Any, MethodListener]] = []
        self.is_own = name in vars(place)
        self.original: Any = vars(place)[name] if self.is_own else inspect.getattr_static(place, name)
        self.wrapper = _dressed(self._of_class() if isinstance(place, type) else self._of_instance(), self.original)
        self.wrapper.memprof_patch = self  # type: ignore[attr-defined]
        self._put(self.wrapper)

    @staticmethod
    def of(place: Any, name: str) -> _Patch:
        """Return the patch that is in place, or put a new one there."""
        there = vars(place).get(name)
        patch = getattr(there, "memprof_patch", None)
        # Whoever wraps ours by the book copies its attributes.
        return patch if isinstance(patch, _Patch) and patch.wrapper is there else _Patch(place, name)

    def leave(self, model: Any, listener: MethodListener) -> None:
        """Take a listener out, and with the last one the wrapper, unless somebody has put another in its place."""
        self.entries.remove((model, listener))
        if self.entries:
            return
        if vars(self.place).get(self.name) is self.wrapper:
            if self.is_own:
                self._put(self.original)
            else:
                delattr(self.place, self.name)
        # DistributedDataParallel's strategy leaves the bound method that it found on the instance.
        left = vars(model).get(self.name)
        if isinstance(left, MethodType) and left.__func__ is self.wrapper:
            vars(model)[self.name] = self.original.__get__(model, type(model))

    def _put(self, value: Any) -> None:
        if isinstance(self.place, type):
            setattr(self.place, self.name, value)
        else:
            vars(self.place)[self.name] = value

    def _of_class(self) -> Callable[..., Any]:
        original, entries, name = self.original, self.entries, self.name
        is_function = isinstance(original, FunctionType)
        binds = hasattr(type(original), "__get__")

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            instance = args[0] if args else None
            listeners = [listener for model, listener in entries if model is instance]
            if is_function or instance is None:
                return _call(original, listeners, name, args, kwargs) if listeners else original(*args, **kwargs)
            bound = original.__get__(instance, type(instance)) if binds else original
            if listeners:
                return _call(bound, listeners, name, args[1:], kwargs)
            return bound(*args[1:], **kwargs)

        return wrapper

    def _of_instance(self) -> Callable[..., Any]:
        original, entries, name = self.original, self.entries, self.name

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if entries:
                return _call(original, [listener for _, listener in entries], name, args, kwargs)
            return original(*args, **kwargs)

        return wrapper


@contextmanager
def heard_method(model: nn.Module, name: str, listener: MethodListener) -> Iterator[None]:
    """Hear of every call of ``model``'s method ``name`` while the context is open.

    The method is replaced in the class, where calls of other instances pass through, so that the model is pickled and
    copied as ever; on the instance only where that has the attribute already, as a compiled model has, and the same
    object is put back. A method that is marked :func:`memprofilable` is left to its mark.

    Raises:
        ConfigError: it cannot be heard; the reason is that of :func:`why_not`.

    """
    if reason := why_not(model, name):
        raise ConfigError(reason)
    place = model if name in vars(model) else type(model)
    if getattr(inspect.getattr_static(place, name), "__memprofilable__", False):
        yield
        return
    patch = _Patch.of(place, name)
    patch.entries.append((model, listener))
    try:
        yield
    finally:
        patch.leave(model, listener)


def why_not(model: nn.Module, name: str) -> str | None:
    """Return why calls of ``model``'s method ``name`` cannot be heard, or None where they can."""
    owner = type(model).__name__
    if name in vars(model):
        method: Any = vars(model)[name]
    elif (method := inspect.getattr_static(type(model), name, None)) is None:
        what = "is no method" if hasattr(model, name) else "does not exist"
        return (
            f"functions holds {name!r}: {owner}.{name} {what}; name methods of the LightningModule, and leave out "
            "those of other objects: marked with @memprofilable they are recorded without a name here"
        )
    if isinstance(method, (staticmethod, classmethod, property)) or not callable(method):
        if not isinstance(method, functools.partialmethod):
            kind = type(method).__name__
            return f"functions holds {name!r}: {owner}.{name} is a {kind}; name methods of the LightningModule"
    elif inspect.isasyncgenfunction(method):
        return f"functions holds {name!r}: {owner}.{name} is an asynchronous generator, which has no one end"
    if _may_be_called_by_compiled(model, name):
        return f"{owner}.{name}: {IN_COMPILED}"
    return None


def compiled_methods(model: nn.Module) -> set[str]:
    """Return the names of the model's methods that torch.compile has taken, each from where it is called."""
    # A compiled function that the model merely holds, a loss for instance, calls no method of it.
    found = {name for name, value in vars(model).items() if isinstance(_compiled_from(value), MethodType)}
    for base in type(model).__mro__:
        found |= {name for name, value in vars(base).items() if _compiled_from(value) is not None}
    return found | ({"forward"} if getattr(model, "_compiled_call_impl", None) is not None else set())


def _may_be_called_by_compiled(model: nn.Module, name: str) -> bool:
    """Whether another method of the model is compiled, and ``name`` is none that the Trainer calls itself.

    A sub-module that is compiled calls its own code and not the model's methods.
    """
    if name == "forward" and getattr(model, "_compiled_call_impl", None) is not None:
        return True
    if not compiled_methods(model) - {name}:
        return False
    lightnings = any(
        name in vars(base) for base in type(model).__mro__ if base.__module__.partition(".")[0] in _LIGHTNING
    )
    hook = name in _TRAINERS or name.endswith("_step") or name.startswith("on_")
    return not (lightnings and hook)


def _compiled_from(value: Any) -> Any:
    """Return what torch.compile made ``value`` from, also behind a wrapper of ours; None where it did not."""
    patch = getattr(value, "memprof_patch", None)
    own = getattr(patch.original if isinstance(patch, _Patch) else value, "__dict__", {})
    return None if own.get("_torchdynamo_disable", False) else own.get("_torchdynamo_orig_callable")
