"""Start and end of each call of named methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import GeneratorType, MethodType
from typing import Any, ClassVar, Final, Protocol, TypeVar

import torch
from torch import nn

from lightning_memprof.capture.observe import Link, original_of, place_of, wrapped
from lightning_memprof.capture.room import with_room
from lightning_memprof.capture.sources.compiled import is_redirected
from lightning_memprof.errors import ConfigError
from lightning_memprof.packages import PACKAGES

_Method = TypeVar("_Method", bound="Callable[..., Any]")

IN_COMPILED: Final = "a compiled part of the model may call it: torch would recompile when the wrapper comes or goes"

# Methods that the Trainer calls, from outside any compiled region, besides `*_step` and `on_*`.
_TRAINERS: Final = frozenset(
    {"backward", "optimizer_zero_grad", "configure_gradient_clipping", "transfer_batch_to_device"}
)


class MethodCall:
    """One call of a method.

    Attributes:
        function: the method's name.
        suspends: whether it is a generator or a coroutine, whose body other code interrupts.
        raised: at its end, the name of the exception's class; None if it returned, or a generator was closed.
    """

    __slots__ = ("function", "raised", "suspends")

    def __init__(self, function: str, *, suspends: bool) -> None:
        self.function = function
        self.suspends = suspends
        self.raised: str | None = None


class MethodListener(Protocol):
    """Is called in the user's code, in the thread of the call; must not raise."""

    def start(self, call: MethodCall, /) -> None:
        """Handle the start of a call."""

    def end(self, call: MethodCall, /) -> None:
        """Handle its end, by return or exception."""


class _Reported:
    """A context around one call that reports it to listeners; every reported start gets its end."""

    __slots__ = ("_function", "_listeners", "_started", "_suspends")

    def __init__(self, listeners: Sequence[MethodListener], function: str, *, suspends: bool = False) -> None:
        self._listeners = listeners
        self._function = function
        self._suspends = suspends
        self._started: list[tuple[MethodListener, MethodCall]] = []

    def __enter__(self) -> None:
        try:
            with_room(self._start)
        except RecursionError:
            return  # the program has no frame left

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._started:
            with_room(self._end, kind)

    def _start(self) -> None:
        for listener in self._listeners:
            call = MethodCall(self._function, suspends=self._suspends)
            self._started.append((listener, call))
            listener.start(call)

    def _end(self, kind: type[BaseException] | None) -> None:
        for listener, call in reversed(self._started):
            if kind is not None and not (call.suspends and kind is GeneratorExit):
                call.raised = kind.__name__
            listener.end(call)


def _relay(generator: Any, reported: _Reported) -> Generator[Any, Any, Any]:
    __tracebackhide__ = True
    with reported:
        return (yield from generator)


async def _relay_coroutine(coroutine: Any, reported: _Reported) -> Any:
    with reported:
        return await coroutine


class _Reporter:
    """Calls of one method, reported to listeners under its name.

    The call of a generator or a coroutine starts when its body starts and ends when that ends.
    """

    def __init__(self, name: str, original: Any) -> None:
        body = original.func if isinstance(original, functools.partialmethod) else original
        self._name = name
        self._is_coroutine = inspect.iscoroutinefunction(body)
        self._is_generator = inspect.isgeneratorfunction(body)

    def around(self, listeners: Sequence[MethodListener]) -> AbstractContextManager[None]:
        """Return a context that reports the call, if it does not suspend; it adds no frame to the program's stack."""
        return nullcontext() if self._is_coroutine or self._is_generator else _Reported(listeners, self._name)

    def result(self, listeners: Sequence[MethodListener], result: Any) -> Any:
        """Return the call's result; a generator or a coroutine reports when it runs."""
        if self._is_coroutine:
            return _relay_coroutine(result, _Reported(listeners, self._name, suspends=True))
        if self._is_generator and isinstance(result, GeneratorType):
            return _relay(result, _Reported(listeners, self._name, suspends=True))
        return result


def _like(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``wrapper`` with the metadata of ``original``, except the marks of torch.compile."""
    functools.update_wrapper(wrapper, original)
    for name in [name for name in vars(wrapper) if name.startswith("_torchdynamo")]:
        delattr(wrapper, name)
    return wrapper


class _Marked:
    """The listeners of marked methods."""

    listeners: ClassVar[tuple[MethodListener, ...]] = ()


def memprofilable(method: _Method) -> _Method:
    """Mark a method of any class, or a function: every :class:`FunctionMemory` that records includes its calls.

    They are recorded under its own name, besides those of the named methods, for every object that has it. While
    nothing records, a call costs one attribute test and a call of ``torch.compiler.is_compiling``; inside a compiled
    region a marked method is not recorded. Put the mark below ``@staticmethod`` and ``@classmethod``.

    Raises:
        ConfigError: it is an asynchronous generator, a property or a class method.
    """
    given: Any = method
    if isinstance(given, (property, classmethod)) or inspect.isasyncgenfunction(given):
        msg = f"@memprofilable on {method!r}: only functions, generators and coroutines have a start and an end"
        raise ConfigError(msg)
    reporter = _Reporter(getattr(method, "__name__", type(method).__name__), method)

    def marked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # First: a compiled region must not depend on whether there are listeners.
        if torch.compiler.is_compiling() or not (listeners := _Marked.listeners):
            return method(*args, **kwargs)
        with reporter.around(listeners):
            return reporter.result(listeners, method(*args, **kwargs))

    _like(marked, method)
    marked.__memprofilable__ = True  # type: ignore[attr-defined]
    return marked  # type: ignore[return-value]


@contextmanager
def marked_methods(listener: MethodListener) -> Iterator[None]:
    """Report every call of every marked method, on any object and in any thread, while the context is open."""
    _Marked.listeners = (*_Marked.listeners, listener)
    try:
        yield
    finally:
        _Marked.listeners = tuple(other for other in _Marked.listeners if other is not listener)


@contextmanager
def method_calls(model: nn.Module, name: str, listener: MethodListener) -> Iterator[None]:
    """Report every call of ``model``'s method ``name`` while the context is open.

    The calls of a method that is marked :func:`memprofilable` are reported by its mark only.

    Raises:
        ConfigError: its calls cannot be reported; the reason is that of :func:`unsupported_method`.
    """
    if reason := unsupported_method(model, name):
        raise ConfigError(reason)
    place = place_of(model, name)
    method = inspect.getattr_static(place, name)
    if getattr(method, "__memprofilable__", False):
        yield
        return
    listeners = (listener,)
    is_open = True
    reporter = _Reporter(name, original_of(method))
    wrappers: list[Any] = []

    def wrap(link: Link) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if is_open and (place is model or (args and args[0] is model)):
                with reporter.around(listeners):
                    return reporter.result(listeners, link.call(*args, **kwargs))
            return link.call(*args, **kwargs)

        wrappers.append(_like(wrapper, link.below))
        return wrapper

    try:
        with wrapped(place, name, wrap):
            yield
    finally:
        is_open = False
        # DistributedDataParallel's strategy leaves the bound method that it found on the instance.
        left = vars(model).get(name)
        if isinstance(left, MethodType) and any(left.__func__ is wrapper for wrapper in wrappers):
            vars(model)[name] = inspect.getattr_static(place, name).__get__(model, type(model))


def unsupported_method(model: nn.Module, name: str) -> str | None:
    """Return why calls of ``model``'s method ``name`` cannot be reported, or None if they can."""
    owner = type(model).__name__
    if name in vars(model):
        method: Any = vars(model)[name]
    elif (method := inspect.getattr_static(type(model), name, None)) is None:
        problem = "is not a method" if hasattr(model, name) else "does not exist"
        return (
            f"functions holds {name!r}: {owner}.{name} {problem}; name methods of the LightningModule, and mark those "
            "of other objects with @memprofilable instead"
        )
    if isinstance(method, (staticmethod, classmethod, property)) or not callable(method):
        if not isinstance(method, functools.partialmethod):
            kind = type(method).__name__
            return f"functions holds {name!r}: {owner}.{name} is a {kind}; name methods of the LightningModule"
    elif inspect.isasyncgenfunction(method):
        return f"functions holds {name!r}: {owner}.{name} is an asynchronous generator, which has no single end"
    if _may_be_called_by_compiled(model, name):
        return f"{owner}.{name}: {IN_COMPILED}"
    return None


def compiled_methods(model: nn.Module) -> set[str]:
    """Return the names of the model's methods that torch.compile has compiled, each as it is called."""
    # A compiled function that the model merely holds, a loss for instance, calls no method of it.
    found = {name for name, value in vars(model).items() if isinstance(_compiled_from(value), MethodType)}
    for base in type(model).__mro__:
        found |= {name for name, value in vars(base).items() if _compiled_from(value) is not None}
    return found | ({"forward"} if getattr(model, "_compiled_call_impl", None) is not None else set())


def _may_be_called_by_compiled(model: nn.Module, name: str) -> bool:
    """Whether another method of the model is compiled, and ``name`` is not one that only the Trainer calls.

    A compiled sub-module calls its own code, not the model's methods.
    """
    if getattr(model, "_compiled_call_impl", None) is not None and (
        name == "forward" or (is_redirected() and name.endswith("_step"))
    ):
        return True
    if not compiled_methods(model) - {name}:
        return False
    is_lightnings = any(
        name in vars(base) for base in type(model).__mro__ if base.__module__.partition(".")[0] in PACKAGES
    )
    is_hook = name in _TRAINERS or name.endswith("_step") or name.startswith("on_")
    return not (is_lightnings and is_hook)


def _compiled_from(value: Any) -> Any:
    """Return what torch.compile made ``value`` from, also below our wrappers; None if it is not compiled."""
    own = getattr(original_of(value), "__dict__", {})
    return None if own.get("_torchdynamo_disable", False) else own.get("_torchdynamo_orig_callable")
