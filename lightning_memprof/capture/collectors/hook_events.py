"""What Lightning's profiler does not tell of: the calls of single methods, and the parts of a fetch."""

from __future__ import annotations

import functools
import inspect
import os
from contextlib import ExitStack, contextmanager
from threading import get_ident
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from torch.compiler import is_compiling
from torch.utils.data import dataloader
from torch.utils.data._utils import fetch

from lightning_memprof.capture.observe import in_front_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lightning_memprof.capture.base import TimedPart

    Told = Callable[[str], None]
    # Gives the action of a call of this object's method, or None where nobody wants to hear of it.
    NameOf = Callable[[Any], str | None]

__all__ = ["timed_fetches", "timed_parts"]

_FETCH: Final = "fetch"
# Torch's own classes and methods, and what they are called in the name of an action: it has no public ones.
_FETCHES: Final = (
    (dataloader._BaseDataLoaderIter, "_next_index", "sampler"),  # noqa: SLF001
    (dataloader._MultiProcessingDataLoaderIter, "_get_data", "workers"),  # noqa: SLF001
    (fetch._MapDatasetFetcher, "fetch", _FETCH),  # noqa: SLF001
    (fetch._IterableDatasetFetcher, "fetch", _FETCH),  # noqa: SLF001
)


@contextmanager
def timed_parts(parts: Iterable[TimedPart], start: Told, stop: Told) -> Iterator[None]:
    """Call ``start`` and ``stop`` with a part's action around every call of its method while the context is open.

    The method is replaced in the class, where other instances pass through, so that the object is pickled and copied
    as ever; on the instance only where that has the attribute already, as an optimizer with a learning rate scheduler
    has, and the same object is put back. Calls of other threads are not told.
    """
    thread = get_ident()
    actions: dict[tuple[type, str], dict[int, str]] = {}
    with ExitStack() as undo:
        for owner, method, action in parts:
            known = actions.setdefault((type(owner), method), {})
            if isinstance(inspect.getattr_static(type(owner), method, None), FunctionType):
                known[id(owner)] = action
            if method in getattr(owner, "__dict__", {}):
                undo.enter_context(_on_instance(owner, method, known.pop(id(owner), action), (start, stop)))
        for (cls, method), known in actions.items():
            if known:
                undo.callback(known.clear)
                name_of = _of_this_thread(known, thread)
                undo.enter_context(in_front_of(cls, method, functools.partial(_told, name_of, (start, stop))))
        yield


@contextmanager
def timed_fetches(start: Told, stop: Told) -> Iterator[None]:
    """Call ``start`` and ``stop`` around the parts of a fetch from torch's data loaders while the context is open.

    The actions are ``[DataLoader]DATASET.sampler``, ``.workers`` (the wait for another process to give its batch),
    ``.fetch`` (the data set in this process) and in it ``.collate``. Only loaders that are iterated in the thread that
    opens the context are told; worker processes pass through.
    """
    here = [(os.getpid(), get_ident())]

    def name_of(what: str, iterator: Any) -> str | None:
        # A worker that was forked from this thread has its number.
        if not here or here[0] != (os.getpid(), get_ident()):
            return None
        # A data set may be a tensor, or anything else that has no truth value.
        dataset = getattr(iterator, "dataset", getattr(iterator, "_dataset", None))
        return f"[DataLoader]{type(dataset).__name__}.{what}"

    with ExitStack() as undo:
        undo.callback(here.clear)
        for cls, method, what in _FETCHES:
            if method in vars(cls):
                wrap = functools.partial(_told, functools.partial(name_of, what), (start, stop))
                undo.enter_context(in_front_of(cls, method, wrap))
                if what == _FETCH:
                    wrap = functools.partial(_collated, functools.partial(name_of, "collate"), (start, stop))
                    undo.enter_context(in_front_of(cls, method, wrap))
        yield


def _of_this_thread(actions: dict[int, str], thread: int) -> NameOf:
    def name_of(owner: Any) -> str | None:
        action = actions.get(id(owner))
        return action if action is not None and get_ident() == thread else None

    return name_of


def _told(name_of: NameOf, told: tuple[Told, Told], following: list[Callable[..., Any]]) -> Callable[..., Any]:
    """Give a method that tells of its calls and calls what follows."""
    start, stop = told

    def call(owner: Any, *args: Any, **keywords: Any) -> Any:
        # Asked first: a compiled region that steps its optimizer must find nothing of ours to trace.
        if is_compiling() or (action := name_of(owner)) is None:
            return following[0](owner, *args, **keywords)
        start(action)
        try:
            return following[0](owner, *args, **keywords)
        finally:
            stop(action)

    # Torch marks an optimizer's step with attributes, and reads signatures.
    return functools.update_wrapper(call, following[0])


def _collated(name_of: NameOf, told: tuple[Told, Told], following: list[Callable[..., Any]]) -> Callable[..., Any]:
    """Give a fetch in which its fetcher's ``collate_fn``, an attribute of the instance, tells of its call."""
    start, stop = told

    def call(fetcher: Any, *args: Any, **keywords: Any) -> Any:
        action = name_of(fetcher)
        if action is None:
            return following[0](fetcher, *args, **keywords)
        collate = fetcher.collate_fn

        def timed(data: Any) -> Any:
            start(action)
            try:
                return collate(data)
            finally:
                stop(action)

        fetcher.collate_fn = timed
        try:
            return following[0](fetcher, *args, **keywords)
        finally:
            fetcher.collate_fn = collate

    return functools.update_wrapper(call, following[0])


@contextmanager
def _on_instance(owner: Any, method: str, action: str, told: tuple[Told, Told]) -> Iterator[None]:
    """Tell of the calls of a method that stands on the instance itself."""
    start, stop = told
    original = vars(owner)[method]
    thread = get_ident()
    is_open = [True]

    def call(*args: Any, **keywords: Any) -> Any:
        if is_compiling() or not is_open or get_ident() != thread:
            return original(*args, **keywords)
        start(action)
        try:
            return original(*args, **keywords)
        finally:
            stop(action)

    vars(owner)[method] = mine = functools.update_wrapper(call, original)
    try:
        yield
    finally:
        is_open.clear()
        if vars(owner).get(method) is mine:
            vars(owner)[method] = original
