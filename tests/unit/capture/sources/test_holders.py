"""Chains of references: each is an expression that leads to the object, and the search leaves nothing behind."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import OrderedDict, UserDict, deque
from collections.abc import Iterator
from queue import Queue
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memprof.capture.sources.growth import holders_of
from lightning_memprof.capture.sources.holders import HolderSearch, entries_of, length_of

pytestmark = pytest.mark.usefixtures("thawed")
GLOBAL: dict[str, Any] = {}


class Slotted:
    __slots__ = ("before", "value")

    def __init__(self, value: Any, before: Any = None) -> None:
        self.value = value
        self.before = before


class Net(nn.Module):
    shared: list[Any] = []  # noqa: RUF012 the fault that is looked for

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2))
        self.put: Any = None


class Loud(list[Any]):
    """Its methods are the program's code, which a search must not run."""

    def __len__(self) -> int:
        raise AssertionError

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise AssertionError


class Mute:
    """A key whose text is the program's code."""

    def __repr__(self) -> str:
        raise AssertionError


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    yield
    GLOBAL.clear()
    Net.shared.clear()


def found(model: nn.Module | None, value: Any) -> str | None:
    holder = HolderSearch(model, 60).find(value)
    return None if holder is None else holder.chain


def attribute(net: Net, put: Any) -> None:
    net.put = put


def queue_of(value: Any) -> Queue[Any]:
    queue: Queue[Any] = Queue()
    queue.put(value)
    return queue


PLACES = {
    "list": lambda net, value: attribute(net, [0, value]),
    "dict": lambda net, value: attribute(net, {"a": value}),
    "nested": lambda net, value: attribute(net, {"a": [(1, {"b": value})]}),
    "deque": lambda net, value: attribute(net, deque([value], maxlen=9)),
    "ordered": lambda net, value: attribute(net, OrderedDict(a=value)),
    "user dict": lambda net, value: attribute(net, UserDict(a=value)),
    "attribute": attribute,
    "slots": lambda net, value: attribute(net, Slotted(value)),
    "queue": lambda net, value: attribute(net, queue_of(value)),
    "derived list": lambda net, value: attribute(net, Loud([value])),
    "submodule": lambda net, value: setattr(net.body[0], "kept", [value]),
    "buffer": lambda net, value: net.body.register_buffer("kept", value),
    "class": lambda _net, value: Net.shared.append(value),
    "global": lambda _net, value: GLOBAL.update(a=[value]),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLACES)
def test_a_chain_is_an_expression_that_leads_to_the_object(kind: str) -> None:
    net, value = Net(), torch.ones(3)
    PLACES[kind](net, value)
    chain = found(net, value)
    assert chain is not None
    if kind == "derived list":
        assert chain == "Net.put[0]"
        return
    expression = chain.replace(f"{__name__}.", "").replace(".body.0", ".body[0]").replace(".body['", ".body._buffers['")
    names = {"Net": Net if kind == "class" else net, "GLOBAL": GLOBAL, "UserDict": UserDict}
    assert eval(expression, names) is value  # noqa: S307 an oracle: Python itself follows the chain


@pytest.mark.slow
def test_the_last_reference_of_a_chain_is_one_that_the_garbage_collector_knows() -> None:
    net, value = Net(), torch.ones(3)
    net.put = [value]
    assert found(net, value) == "Net.put[0]"
    assert any(owner is net.put for owner in gc.get_referrers(value))


@pytest.mark.slow
def test_a_key_of_the_programs_own_class_is_named_by_its_class() -> None:
    net, value = Net(), torch.ones(3)
    net.put = {Mute(): {("a", 1): value}}
    assert found(net, value) == "Net.put[Mute][('a', 1)]"


@pytest.mark.slow
def test_a_linked_list_has_one_place_for_all_of_its_links() -> None:
    net = Net()
    for number in range(5):
        net.put = Slotted(torch.ones(number), net.put)
    oldest = net.put.before.before.before
    holder = HolderSearch(net, 60).find(oldest.value)
    assert holder is not None
    assert holder.chain == "Net.put.before.before.before.value"
    assert holder.place == "Net.put.before.value"


def test_a_variable_of_a_closure_is_named_with_its_function() -> None:
    def made() -> Any:
        kept = [torch.ones(3)]

        def use() -> list[Any]:
            return kept

        return use

    use = made()
    chain = found(None, use()[0])
    assert chain is not None
    assert chain.endswith("made.<locals>.use (closure variable kept)[0]")


def test_a_cache_has_its_limit() -> None:
    @functools.lru_cache(maxsize=7)
    def cached(size: int) -> torch.Tensor:
        return torch.ones(size)

    holder = HolderSearch(None, 60).find(cached(3))
    assert holder is not None
    assert (holder.kind, holder.bound) == ("lru_cache", 7)


def test_an_optimizer_has_one_state_per_parameter_but_other_attributes_have_no_limit() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    optimizer.trace = [torch.ones(3)]
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.state[parameter]["exp_avg"] = torch.ones(2, 2)
    state = HolderSearch(None, 60).find(optimizer.state[parameter]["exp_avg"])
    trace = HolderSearch(None, 60).find(optimizer.trace[0])
    assert state is not None
    assert trace is not None
    assert (state.kind, state.bound, trace.bound) == ("optimizer state", 2, None)


def test_objects_that_only_refer_to_each_other_are_a_cycle() -> None:
    gc.disable()
    try:
        node = Slotted(torch.ones(3))
        node.before = node
        value = weakref.ref(node.value)
        del node
        holder = HolderSearch(None, 60).find(value())
        assert holder is not None
        assert holder.kind == "reference cycle"
        assert "Slotted" in holder.chain
        assert holder.places
    finally:
        gc.enable()


def test_a_local_variable_has_no_holder() -> None:
    assert found(None, torch.ones(3)) is None


@pytest.mark.slow
def test_a_search_keeps_nothing_alive_and_leaves_no_cycle() -> None:
    gc.disable()
    try:
        for put in PLACES.values():
            net, value = Net(), torch.ones(3)
            put(net, value)
            assert found(net, value) is not None
            reference = weakref.ref(value)
            # By the count of references alone.
            _clear(net)
            del net, value
            assert reference() is None
    finally:
        gc.enable()


def _clear(net: Net) -> None:
    net.put = None
    vars(net.body[0]).pop("kept", None)
    vars(net.body)["_buffers"].clear()
    Net.shared.clear()
    GLOBAL.clear()


def test_a_search_without_time_finds_nothing_and_does_not_fail() -> None:
    net, value = Net(), torch.ones(3)
    net.put = [[[value]]]
    search = HolderSearch(net, seconds=0)
    assert search.is_over
    assert search.find(value) is None


def test_derived_containers_are_read_without_their_own_code() -> None:
    loud = Loud([1, 2])
    assert (length_of(loud), entries_of(loud)) == (2, [1, 2])


@pytest.mark.slow
def test_the_holders_of_a_type_are_counted_and_have_a_line() -> None:
    class Marked:
        pass

    net = Net()
    net.put = [Marked() for _ in range(9)]
    (words,) = holders_of(Marked, net, 60)
    assert words.startswith("Net.put[...] (sources/test_holders.py:")
