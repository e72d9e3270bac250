from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
import torch

from lightning_memprof.capture.census import large_objects, take_census
from lightning_memprof.capture.sources.growth import holders_of
from lightning_memprof.capture.sources.objects import (
    referents_of_tuples,
    referrers,
    tracked_objects,
    tracked_types,
    untracked_referents,
)
from lightning_memprof.capture.sources.oom_state import live_tensors, tracked_tensors


class Held:
    pass


HELD = Held()

LISTED: dict[str, Callable[[], Any]] = {
    "types": tracked_types,
    "objects": lambda: tracked_objects(lambda _: True),
    "lists": lambda: tracked_objects(lambda kind: kind is list),
    "tensors": tracked_tensors,
    "tuples": lambda: referents_of_tuples({id(None), id(HELD)}),
    "referents": lambda: untracked_referents((str, bytes)),
    "referrers": lambda: referrers(HELD),
}
SEARCHED: dict[str, Callable[[], Any]] = {
    "census": lambda: take_census(1, 0),
    "large": lambda: list(large_objects(1 << 20)),
    "holders": lambda: holders_of(Held, None),
    "tensors": lambda: live_tensors(torch.nn.Linear(2, 2), [], torch.device("cpu")),
}


@pytest.mark.parametrize("entries", [5, 10, 11, 25, 26, 40])
@pytest.mark.parametrize("ask", LISTED.values(), ids=LISTED)
def test_a_tuple_that_is_being_made_is_not_referred_to(ask: Callable[[], Any], entries: int) -> None:
    kept = []

    def made() -> Iterator[Any]:
        yield HELD
        yield from range(entries - 1)
        kept.append(ask())
        yield from range(50)

    assert len(tuple(made())) == entries + 50


@pytest.mark.parametrize("ask", LISTED.values(), ids=LISTED)
def test_no_list_of_all_objects_stays(ask: Callable[[], Any]) -> None:
    value = Held()
    weak = ref(value)
    gc.disable()
    try:
        ask()
        del value
        assert weak() is None
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("ask", SEARCHED.values(), ids=SEARCHED)
def test_other_threads_make_tuples_during_a_search(ask: Callable[[], Any]) -> None:
    errors: list[SystemError] = []
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            try:
                tuple(HELD if number == 3 else str(number) for number in range(23))
            except SystemError as error:
                errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            ask()
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)
    assert errors == []


def test_objects_are_chosen_by_their_own_type() -> None:
    class Proxy:
        @property
        def __class__(self) -> Any:
            raise AssertionError

        @__class__.setter
        def __class__(self, value: Any) -> None:
            pass

    class Rows(list[int]):
        pass

    class Strange(type):
        def __eq__(cls, other: object) -> bool:
            raise AssertionError

        __hash__ = __eq__  # type: ignore[assignment]

    class Made(metaclass=Strange):
        pass

    proxy, rows, made = Proxy(), Rows([1]), Made()
    found = tracked_objects(lambda kind: issubclass(kind, list))
    assert any(value is rows for value in found)
    assert not any(value is proxy or type(value) is tuple for value in found)
    assert any(value is made for value in tracked_objects(lambda kind: kind is Made))
    assert [number for kind, number in tracked_types() if kind is Made] == [1]


def test_referrers_include_complete_tuples() -> None:
    value = Held()
    pair, many = (1, value), tuple([value] * 30)
    found = referrers(value)
    assert {*map(id, found)} == {id(pair), id(many)}


def test_what_tuples_and_objects_refer_to_is_listed() -> None:
    value, text = Held(), b"x" * 5000
    pair = (1, value, [text])
    ((number, held),) = referents_of_tuples({id(value)})
    assert number == id(pair)
    assert {*map(id, held)} == {*map(id, pair)}
    assert any(found is text for found in untracked_referents((bytes,)))
