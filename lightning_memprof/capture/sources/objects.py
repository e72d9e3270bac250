"""Reads the objects that the garbage collector tracks.

``tuple(generator)`` fills a tuple that the collector already lists, and raises SystemError if anything else refers to
the tuple when its size changes, as a list of all objects does. Here such a list exists only within one call of C code,
during which no other thread runs Python. C functions, composed in advance, choose from it.
"""

from __future__ import annotations

import gc
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial, reduce
from itertools import chain, compress, islice, repeat
from typing import Any, Final

_TUPLE: Final = id(tuple)
_MOST_ENTRIES: Final = 4096


def tracked_types() -> list[tuple[type, int]]:
    """Return the types of the objects that the garbage collector tracks, each with the number of its objects."""
    types = _types()
    numbers = Counter(map(id, types))
    return [(kind, numbers[key]) for key, kind in _by_id(types).items()]


def tracked_objects(wanted: Callable[[type], bool]) -> list[Any]:
    """Return the objects that the garbage collector tracks, of all wanted types except tuples.

    Args:
        wanted: called with each type.
    """
    ids = {key for key, kind in _by_id(_types()).items() if kind is not tuple and wanted(kind)}
    return _taken(_chosen(_times(2, _answer(gc.get_objects)), ids.__contains__))


def referents_of_tuples(wanted: set[int]) -> list[tuple[int, list[Any]]]:
    """Return the ``id`` of each tuple that refers to a wanted object, with its referents.

    Args:
        wanted: the ``id`` of each wanted object.
    """
    tuples = _times(2, map(list, _chosen(_times(2, _answer(gc.get_objects)), _TUPLE.__eq__)))
    referents = map(partial(map, partial(map, id)), map(partial(map, gc.get_referents), tuples))
    is_other = map(partial(map, wanted.isdisjoint), referents)
    # One at a time: when memory has run out, there is no room for what every tuple refers to.
    kept = _times(2, map(list, map(compress, tuples, map(partial(map, operator.not_), is_other))))
    return _taken(map(zip, map(partial(map, id), kept), map(partial(map, gc.get_referents), kept)))


def untracked_referents(kinds: Collection[type]) -> list[Any]:
    """Return the referents of tracked objects that are exactly of ``kinds``, types that the collector does not track.

    A referent of several objects is repeated. Blocks other threads for 0.4 s per million objects.
    """
    referents = map(chain.from_iterable, map(partial(map, gc.get_referents), _times(2, _answer(gc.get_objects))))
    return _taken(_chosen(referents, set(map(id, kinds)).__contains__))


def referrers(value: Any) -> list[Any]:
    """Return the referrers of an object, without tuples that may be unfinished.

    Such tuples have fewer entries than their size, a size at which Python enlarges them, or more than 4096 entries.
    """
    ask = partial(gc.get_referrers, value)
    answers = _times(4, _answer(ask))
    others = islice(_chosen(answers, _TUPLE.__ne__), 1)
    tuples = _times(3, map(list, _chosen(answers, _TUPLE.__eq__)))
    sizes = map(partial(map, _final_sizes().get), map(partial(map, len), tuples))
    entries = map(partial(map, len), map(partial(map, gc.get_referents), tuples))
    complete = map(compress, tuples, map(partial(map, operator.eq), sizes, entries))
    return [owner for owner in _taken(chain(others, complete)) if owner is not ask and owner is not ask.args]


@cache
def _final_sizes() -> dict[int, int]:
    """Return the sizes at which ``tuple(generator)`` is never full and still grows, each as its own value."""
    growing, size = set[int](), 10
    while size <= _MOST_ENTRIES:
        growing.add(size)
        size += 10
        size += size >> 2
    return {size: size for size in range(_MOST_ENTRIES + 1) if size not in growing}


def _types() -> list[type]:
    return _taken(map(partial(map, type), _answer(gc.get_objects)))


def _by_id(types: list[type]) -> dict[int, type]:
    # By identity: a metaclass may have code of the program.
    return dict(zip(map(id, types), types, strict=True))


def _answer(ask: Callable[[], list[Any]]) -> Iterator[list[Any]]:
    """Return an iterator over one list, which is asked for at its first use."""
    return islice(iter(ask, None), 1)


def _times(number: int, lists: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator that repeats each list ``number`` times, once for each function that shares the iterator."""
    return chain.from_iterable(map(repeat, lists, repeat(number)))


def _chosen(twice: Iterator[Iterable[Any]], choose: Callable[[int], bool]) -> Iterator[Iterable[Any]]:
    """Return an iterator over the values whose type has an ``id`` that is chosen, of iterables that come twice."""
    ids = map(partial(map, id), map(partial(map, type), twice))
    return map(compress, twice, map(partial(map, choose), ids))


def _taken(values: Iterator[Iterable[Any]]) -> list[Any]:
    """Return the values of iterables as a list."""
    # Before Python 3.12 a garbage collection may start inside C code, and runs Python.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        # Until the iterator has ended, it refers to the list of all objects, which refers to the iterator. The new list
        # is not in that one.
        joined: list[Any] = reduce(operator.add, map(list, values), [])
        return joined
    finally:
        if was_enabled:
            gc.enable()
