"""The one way in which this package wraps a method of somebody else's object while a window is open, or a run.

A wrapper goes into the class, where calls of other instances pass through it: the object is pickled and copied as
before. It goes onto the instance only where the instance already has the attribute, as a compiled model has, or an
optimizer with a learning-rate scheduler; its pickles and copies are those of that attribute.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import operator
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any, Final, ParamSpec, TypeVar

from lightning_memprof.capture.room import with_room
from lightning_memprof.capture.torch_internals import DisableTorchFunction

_LINK: Final = "_memprof_link"
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Link:
    """A wrapper's connection to the method below it, which may itself be a wrapper.

    Attributes:
        call: calls the method below: in a class with the instance first, on an instance without it.
        below: the attribute that the wrapper replaced, as it was found.
        is_own: whether the class or the instance had the attribute itself; otherwise it was inherited.
    """

    def __init__(self, place: Any, name: str) -> None:
        own = vars(place)
        self.is_own = name in own
        if isinstance(place, type):
            self.below: Any = own[name] if self.is_own else inspect.getattr_static(place, name)
            self.call = _unbound(self.below)
        else:
            self.below = self.call = own[name] if self.is_own else getattr(place, name)

    def take_over(self, other: Link) -> None:
        """Connect to the method below ``other``, whose wrapper has ended."""
        self.call, self.below, self.is_own = other.call, other.below, other.is_own


class _OnInstance(functools.partial):  # type: ignore[type-arg]
    """The wrapper of an instance's own attribute; copying or pickling it gives the attribute."""

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ((vars(self)[_LINK].below,), 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(vars(self)[_LINK].below, memo)


@contextmanager
def wrapped(place: Any, name: str, wrap: Callable[[Link], Callable[..., Any]]) -> Iterator[None]:
    """Put the function ``wrap(link)`` in place of a method while the context is open.

    Contexts may end in any order: a wrapper that ends takes itself out of the chain of those above it. Where another
    program's wrapper hides the chain it stays there, so the function must pass calls through after the context.

    Args:
        place: a class, for the calls of all its instances, or one instance; see :func:`place_of`.
        name: of the method; an inherited one is not left behind.
        wrap: returns the replacement, a function that calls ``link.call``.
    """
    link, wrapper = _put_wrapper(place, name, wrap)
    try:
        yield
    finally:
        if (top := vars(place).get(name)) is not wrapper:
            above = _link_of(top)
            while above is not None and above.below is not wrapper:
                above = _link_of(above.below)
            if above is not None:
                above.take_over(link)
        elif link.is_own:
            put(place, name, link.below)
        elif isinstance(place, type):
            delattr(place, name)
        else:
            del vars(place)[name]


def replaced(place: Any, name: str, wrap: Callable[[Link], Callable[..., Any]]) -> None:
    """Put the function ``wrap(link)`` in place of a method until the process ends, where no wrapper is yet."""
    if _link_of(getattr(place, name)) is None:
        _put_wrapper(place, name, wrap)


def _put_wrapper(place: Any, name: str, wrap: Callable[[Link], Callable[..., Any]]) -> tuple[Link, Callable[..., Any]]:
    link = Link(place, name)
    wrapper = wrap(link) if isinstance(place, type) else _OnInstance(wrap(link))
    vars(wrapper)[_LINK] = link
    put(place, name, wrapper)
    return link, wrapper


def place_of(instance: Any, name: str) -> Any:
    """Return where to wrap the method ``name`` of one object: its class, or the instance if that has the attribute."""
    return instance if name in getattr(instance, "__dict__", {}) else type(instance)


def original_of(method: Any) -> Any:
    """Return the method below all wrappers of this module."""
    while (link := _link_of(method)) is not None:
        method = link.below
    return method


class StandIn:
    """Stands for a function: calls go to another one; all else, its copies and its pickles are the function's."""

    __slots__ = ("call", "function")

    def __init__(self, function: Any, call: Callable[..., Any]) -> None:
        _FUNCTION.__set__(self, function)
        _CALL.__set__(self, call)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the other function."""
        __tracebackhide__ = True
        return _CALL.__get__(self)(*arguments, **keywords)

    def __getattribute__(self, name: str) -> Any:
        if name == "__reduce_ex__":
            return object.__getattribute__(self, name)
        return getattr(_FUNCTION.__get__(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_FUNCTION.__get__(self), name, value)

    def __eq__(self, other: object) -> bool:
        return bool(_FUNCTION.__get__(self) == (_FUNCTION.__get__(other) if type(other) is StandIn else other))

    def __hash__(self) -> int:
        return hash(_FUNCTION.__get__(self))

    def __repr__(self) -> str:
        return repr(_FUNCTION.__get__(self))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return operator.getitem, ((_FUNCTION.__get__(self),), 0)


# The attributes that are not the function's.
_FUNCTION: Final = vars(StandIn)["function"]
_CALL: Final = vars(StandIn)["call"]


@contextmanager
def gc_callback(call: Callable[[str, dict[str, int]], None]) -> Iterator[None]:
    """Call a function at the start and the stop of each garbage collection of this process while the context is open.

    Each collection is in the thread that caused it. The function must not raise: Python would print it.
    """
    process = os.getpid()

    @functools.wraps(call)
    def call_here(phase: str, info: dict[str, int]) -> None:
        # A forked process has it too. Removing it during a collection would make Python skip the next callback.
        try:
            if os.getpid() == process:
                call(phase, info)
        except RecursionError:
            return  # the program has no frame left

    gc.callbacks.append(call_here)
    try:
        yield
    finally:
        discard(gc.callbacks, call_here)


@contextmanager
def kept_interrupts() -> Iterator[list[BaseException]]:
    """Collect each Ctrl-C that arrives in a function of ours whose exceptions Python drops, to raise it later.

    Python may run a signal's handler on entry to any function. In a function of ``gc.callbacks`` it prints what the
    handler raises and continues. An ``Exception`` is not collected: it may be a failure of ours.

    Raises:
        BaseException: at the end of the context, the first one that nobody took from the list.
    """
    hook = _Unraisable(sys.unraisablehook)
    sys.unraisablehook = hook
    try:
        yield hook.kept
    finally:
        # The program, or a run in another thread, may have put a hook above this one: it passes everything on then.
        hook.is_open = False
        while isinstance(top := sys.unraisablehook, _Unraisable) and not top.is_open:
            sys.unraisablehook = top.below
    if hook.kept:
        raise hook.kept[0]


class _Unraisable:
    """A hook for exceptions that Python drops; of those of our functions it keeps all but an ``Exception``."""

    def __init__(self, below: Callable[[sys.UnraisableHookArgs], Any]) -> None:
        self.below = below
        self.kept: list[BaseException] = []
        self.is_open = True

    def __call__(self, unraisable: sys.UnraisableHookArgs) -> None:
        error, module = unraisable.exc_value, getattr(unraisable.object, "__module__", None) or ""
        is_ours = self.is_open and module.startswith("lightning_memprof.")
        if is_ours and error is not None and not isinstance(error, Exception):
            self.kept.append(error)
        else:
            self.below(unraisable)


@contextmanager
def deferred(number: int) -> Iterator[list[int]]:
    """Keep a signal from the program's handler, which may raise, until the end of the context.

    torch's handler of SIGCHLD raises for a DataLoader worker that died, wherever the main thread is.

    Yields:
        The signals that arrived: the handler is called for the last one, unless the list is empty at the end.
    """
    handler = signal.getsignal(number)
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield arrived
        return

    def keep(number: int, _: FrameType | None) -> None:
        arrived.append(number)

    signal.signal(number, keep)
    try:
        yield arrived
    finally:
        if signal.getsignal(number) is keep:
            signal.signal(number, handler)
    if arrived:
        handler(arrived[-1], None)


def hide_wrappers(error: BaseException) -> None:
    """Remove this package's wrappers from the tracebacks of an exception, its causes and its contexts.

    A wrapper is a function whose local variable ``__tracebackhide__`` is True, as in pytest; other functions of this
    package stay.
    """
    pending, seen = [error], set[int]()
    while pending:
        error = pending.pop()
        if id(error) not in seen:
            seen.add(id(error))
            pending += [behind for behind in (error.__cause__, error.__context__) if behind is not None]
            entry = error.__traceback__
            while entry is not None:
                below = entry.tb_next
                while below is not None and _is_wrapper(below.tb_frame):
                    below = below.tb_next
                if below is not entry.tb_next:
                    entry.tb_next = below
                entry = below


def _is_wrapper(frame: FrameType) -> bool:
    is_ours = str(frame.f_globals.get("__name__", "")).startswith("lightning_memprof.")
    return is_ours and frame.f_locals.get("__tracebackhide__") is True


def discard(entries: list[Any], entry: object) -> None:
    """Remove an object from a list if it is there, by identity: ``list.remove`` calls the program's ``__eq__``."""
    for index, found in enumerate(entries):
        if found is entry:
            del entries[index]
            return


def without_torch_function(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that reads tensors without calling the program's ``__torch_function__``."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def take_out(pop: Callable[[], Any], push: Callable[[Any], object], is_own: Callable[[Any], bool]) -> None:
    """Remove an entry from any place in one of torch's stacks: the program's own entries need not nest with ours.

    Args:
        pop: removes the top entry and returns it; None if the stack is empty.
        push: puts an entry on top.
        is_own: whether an entry is ours.
    """
    above: list[Any] = []
    while (top := pop()) is not None and not is_own(top):
        above.append(top)
    # An entry that started before ours and ended before it has removed ours, and remains as the last one.
    if top is None and above:
        above.pop(0)
    for entry in reversed(above):
        push(entry)


class Guard:
    """Runs our code inside the user's; keeps the first failure and runs nothing after it."""

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def run(self, call: Callable[..., object], *values: Any) -> None:
        """Call it unless something failed before, without the program's ``__torch_function__``."""
        if self.failure is None:
            try:
                with DisableTorchFunction():
                    with_room(call, *values)
            except Exception as error:  # noqa: BLE001 nothing of ours may raise into the user's code
                self.failure = error

    def between(
        self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return ``wrap(original)``, which calls ``original`` exactly once, also if the code of ``wrap`` fails."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.failure is not None:
                return original(*args, **kwargs)
            outcome: list[tuple[Any, BaseException | None]] = []

            def watched(*args: Any, **kwargs: Any) -> Any:
                try:
                    outcome.append((original(*args, **kwargs), None))
                except BaseException as error:
                    outcome.append((None, error))
                    raise
                return outcome[0][0]

            try:
                return wrap(watched)(*args, **kwargs)
            except Exception as error:
                if outcome and outcome[0][1] is error:
                    raise
                self.failure = error
            # Not in the handler: our failure would be the context of the program's exceptions.
            if not outcome:
                return original(*args, **kwargs)
            result, raised = outcome[0]
            if raised is not None:
                raise raised
            return result

        return call


def _link_of(method: Any) -> Link | None:
    # Any object may answer any name.
    link = getattr(method, _LINK, None)
    return link if isinstance(link, Link) else None


def put(place: Any, name: str, value: Any) -> None:
    """Set the attribute of a class or an instance."""
    if isinstance(place, type):
        setattr(place, name, value)
    else:
        # Without the object's own `__setattr__`.
        vars(place)[name] = value


def _unbound(method: Any) -> Callable[..., Any]:
    """Return a class's attribute as a function whose first argument is the instance."""
    if isinstance(method, FunctionType):
        return method

    def call(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(instance, type(instance)) if hasattr(type(method), "__get__") else method
        return bound(*args, **kwargs)

    return call
