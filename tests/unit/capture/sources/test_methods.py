"""Each start of a method that is heard has its end, and nothing of ours stays on the class or the instance."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from threading import Thread
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memprof.capture.sources.methods import (
    IN_COMPILED,
    MethodCall,
    _Marked,
    marked_methods,
    memprofilable,
    method_calls,
    unsupported_method,
)
from lightning_memprof.errors import ConfigError
from stack import at_the_limit, frames


class Listener:
    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self, call: MethodCall, /) -> None:
        self.told.append(f"+{call.function}")

    def end(self, call: MethodCall, /) -> None:
        self.told.append(f"-{call.function}{'!' + call.raised if call.raised else ''}")


class Base(nn.Module):
    def inherited(self) -> int:
        return 1


class Model(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def work(self, value: int = 1, *, more: int = 0) -> int:
        """Add."""
        return value + more

    def again(self, count: int) -> int:
        return 0 if count == 0 else 1 + self.again(count - 1)

    def outer(self) -> int:
        return self.work(2) + self.inherited()

    def fails(self) -> None:
        raise ArithmeticError

    def numbers(self, count: int) -> Generator[int, int | None, str]:
        for number in range(count):
            if (yield number) == 7:
                raise ArithmeticError
        return "all"

    async def waits(self) -> int:
        await asyncio.sleep(0)
        return 3

    async def streams(self) -> AsyncIterator[int]:
        yield 1

    @staticmethod
    def alone() -> None: ...

    @classmethod
    def of_class(cls) -> None: ...

    @property
    def size(self) -> int:
        return 1

    partial = functools.partialmethod(work, 5)

    @memprofilable
    def marked(self, value: int) -> int:
        """Return it."""
        return value


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = dict(vars(Model)), dict(vars(Base))
    yield
    assert (dict(vars(Model)), dict(vars(Base))) == before
    assert _Marked.listeners == ()


def test_a_call_starts_and_ends_and_returns_what_it_did(listener: Listener) -> None:
    model = Model()
    with method_calls(model, "work", listener):
        assert model.work(2, more=3) == 5
        assert Model.work(model, 4) == 4
    assert model.work() == 1
    assert listener.told == ["+work", "-work"] * 2


def test_other_instances_pass_through(listener: Listener) -> None:
    model = Model()
    with method_calls(model, "work", listener):
        assert Model().work(3) == 3
        assert copy.deepcopy(model).work(4) == 4
    assert listener.told == []


def test_nested_and_re_entrant_calls_end_in_reverse(listener: Listener) -> None:
    model = Model()
    with method_calls(model, "outer", listener), method_calls(model, "work", listener):
        model.outer()
    assert listener.told == ["+outer", "+work", "-work", "-outer"]
    with method_calls(model, "again", again := Listener()):
        assert model.again(2) == 2
    assert again.told == ["+again"] * 3 + ["-again"] * 3


def test_a_reported_call_adds_one_frame(listener: Listener) -> None:
    class Counting(Model):
        def work(self, value: int = 1, *, more: int = 0) -> int:
            return frames()

    model = Counting()
    bare = model.work()
    with method_calls(model, "work", listener):
        assert model.work() == bare + 1


def test_a_call_where_no_frame_is_left_for_its_listener_runs() -> None:
    class Deep(Listener):
        def start(self, call: MethodCall, /) -> None:
            model.again(50)
            super().start(call)

    model, listener = Model(), Deep()
    with method_calls(model, "work", listener):
        # C functions on the stack below take more than a frame of Python before 3.12.
        for spare in range(30):
            with contextlib.suppress(RecursionError):
                assert at_the_limit(model.work, spare) == 1
    assert listener.told == ["+work", "-work"] * (len(listener.told) // 2)
    # With room of its own, the listener is called with fewer frames left than it takes.
    assert listener.told


def test_an_exception_arrives_as_the_same_object_and_is_named(listener: Listener) -> None:
    model = Model()
    with method_calls(model, "fails", listener), pytest.raises(ArithmeticError):
        model.fails()
    assert listener.told == ["+fails", "-fails!ArithmeticError"]


def test_calls_of_other_threads_are_heard(listener: Listener) -> None:
    model = Model()
    with method_calls(model, "work", listener):
        thread = Thread(target=model.work)
        thread.start()
        thread.join()
    assert listener.told == ["+work", "-work"]


def test_a_generator_starts_with_its_body_and_ends_with_it(listener: Listener) -> None:
    model = Model()
    with method_calls(model, "numbers", listener):
        made = model.numbers(2)
        assert listener.told == []
        assert inspect.isgenerator(made)
        assert next(made) == 0
        assert listener.told == ["+numbers"]
        assert next(made) == 1
        with pytest.raises(StopIteration) as stopped:
            next(made)
        assert stopped.value.value == "all"
        assert listener.told == ["+numbers", "-numbers"]
        with pytest.raises(TypeError):
            model.numbers()  # type: ignore[call-arg]


def test_a_generator_that_is_closed_or_forgotten_or_raises_has_its_end(listener: Listener) -> None:
    model = Model()
    with method_calls(model, "numbers", listener):
        made = model.numbers(3)
        next(made)
        made.close()
        assert listener.told == ["+numbers", "-numbers"]
        made = model.numbers(3)
        next(made)
        del made
        assert listener.told == ["+numbers", "-numbers"] * 2
        made = model.numbers(3)
        next(made)
        with pytest.raises(ArithmeticError):
            made.send(7)
        assert listener.told[-1] == "-numbers!ArithmeticError"
        unstarted = model.numbers(3)
        unstarted.close()
        assert len(listener.told) == 6


def test_a_coroutine_is_heard_while_it_runs(listener: Listener) -> None:
    model = Model()
    with method_calls(model, "waits", listener):
        made = model.waits()
        assert listener.told == []
        assert asyncio.run(made) == 3
    assert listener.told == ["+waits", "-waits"]


def test_a_partial_method_is_heard(listener: Listener) -> None:
    model = Model()
    with method_calls(model, "partial", listener):
        assert model.partial(more=1) == 6
    assert listener.told == ["+partial", "-partial"]


def test_the_wrapper_looks_like_the_method(listener: Listener) -> None:
    model = Model()
    signature = inspect.signature(model.work)
    original = Model.work
    with method_calls(model, "work", listener):
        assert model.work.__doc__ == "Add."
        assert model.work.__name__ == "work"
        assert inspect.signature(model.work) == signature
        assert model.work.__wrapped__ is original


def test_two_models_of_one_class_are_told_apart() -> None:
    model, two, first, second = Model(), Model(), Listener(), Listener()
    with method_calls(model, "work", first):
        with method_calls(two, "work", second):
            model.work()
            two.work()
            two.work()
        model.work()
    assert (len(first.told), len(second.told)) == (4, 4)


def test_what_somebody_put_over_ours_stays_and_passes_through(listener: Listener) -> None:
    model = Model()
    own = Model.work
    context = method_calls(model, "work", listener)
    context.__enter__()
    ours: Callable[..., Any] = Model.work

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    Model.work = theirs  # type: ignore[method-assign]
    context.__exit__(None, None, None)
    try:
        assert Model.work is theirs
        assert model.work(3) == 3
        with method_calls(model, "work", listener):
            model.work()
        assert Model.work is theirs
    finally:
        Model.work = own  # type: ignore[method-assign]
    assert listener.told == ["+work", "-work"]


def test_a_bound_wrapper_that_was_left_on_the_instance_becomes_the_method_again(listener: Listener) -> None:
    model = Model()
    with method_calls(model, "work", listener):
        bound = model.work
        vars(model)["work"] = bound  # as the strategy of DistributedDataParallel does with `forward`
    assert vars(model)["work"].__func__ is Model.work
    assert model.work(2) == 2
    assert listener.told == []


def test_a_bound_object_of_the_program_stays_on_the_instance_uncompared(listener: Listener) -> None:
    class Refusing:
        def __eq__(self, _: object) -> bool:
            raise TypeError

        __hash__ = object.__hash__

        def __call__(self, *_: object) -> int:
            return 7

    model = Model()
    with method_calls(model, "work", listener):
        vars(model)["work"] = MethodType(Refusing(), model)
    assert model.work(2) == 7


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nothing", "Model.nothing does not exist"),
        ("net", "Model.net is not a method"),
        ("alone", "Model.alone is a staticmethod"),
        ("of_class", "Model.of_class is a classmethod"),
        ("size", "Model.size is a property"),
        ("streams", "Model.streams is an asynchronous generator"),
    ],
)
def test_what_cannot_be_heard_says_why(name: str, reason: str, listener: Listener) -> None:
    model = Model()
    found = unsupported_method(model, name)
    assert found is not None
    assert reason in found
    with pytest.raises(ConfigError, match=reason), method_calls(model, name, listener):
        pass


def test_a_marked_method_is_heard_on_every_object_under_its_name(listener: Listener) -> None:
    model = Model()
    assert model.marked(1) == 1
    with marked_methods(listener):
        assert model.marked(2) == 2
        assert Model().marked(3) == 3
    assert model.marked(4) == 4
    assert listener.told == ["+marked", "-marked"] * 2
    assert Model.marked.__doc__ == "Return it."


def test_a_marked_function_generator_and_coroutine_are_heard(listener: Listener) -> None:
    @memprofilable
    def function() -> int:
        return 1

    @memprofilable
    def generator() -> Iterator[int]:
        yield from (1, 2)

    @memprofilable
    async def coroutine() -> int:
        return 3

    with marked_methods(listener):
        assert function() == 1
        assert list(generator()) == [1, 2]
        assert asyncio.run(coroutine()) == 3
    assert listener.told == [f"{edge}{name}" for name in ("function", "generator", "coroutine") for edge in "+-"]


def test_a_marked_method_that_is_also_named_is_told_once(listener: Listener) -> None:
    model = Model()
    with marked_methods(listener), method_calls(model, "marked", listener):
        model.marked(1)
    assert listener.told == ["+marked", "-marked"]


def test_what_has_no_one_end_cannot_be_marked() -> None:
    async def streams() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(ConfigError, match="streams"):
        memprofilable(streams)
    with pytest.raises(ConfigError, match="property"):
        memprofilable(property(lambda _: 1))  # type: ignore[type-var]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(value)


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Part()

    def helper(self, value: torch.Tensor) -> torch.Tensor:
        return self.net(value)

    @memprofilable
    def marked(self, value: torch.Tensor) -> torch.Tensor:
        return value + 1

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.marked(self.helper(value)).relu()

    def run(self, value: torch.Tensor) -> torch.Tensor:
        return self(value).sum()


@pytest.fixture
def compilations() -> Iterator[Callable[[], int]]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def test_what_a_compiled_region_may_call_is_not_heard_and_the_region_is_not_compiled_again(
    listener: Listener, compilations: Callable[[], int]
) -> None:
    model, value = Compiled(), torch.ones(2, 2)
    model.compile(backend="eager")
    model.run(value)
    before = compilations()
    for name in ("helper", "forward"):
        reason = unsupported_method(model, name)
        assert reason is not None
        assert reason.endswith(IN_COMPILED)
    assert before == 1
    assert unsupported_method(model.net, "forward") is None


def test_a_mark_inside_a_compiled_region_neither_breaks_the_graph_nor_compiles_it_again(
    listener: Listener, compilations: Callable[[], int]
) -> None:
    model, value = Compiled(), torch.ones(2, 2)
    model.compile(backend="eager")
    model(value)
    with marked_methods(listener):
        model(value)
    model(value)
    assert compilations() == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert listener.told == []


def test_a_compiled_method_is_heard_from_outside(listener: Listener, compilations: Callable[[], int]) -> None:
    model, value = Compiled(), torch.ones(2, 2)
    vars(model)["run"] = torch.compile(model.run, backend="eager")
    own = vars(model)["run"]
    model.run(value)
    assert unsupported_method(model, "run") is None
    assert unsupported_method(model, "helper") is not None
    with method_calls(model, "run", listener):
        model.run(value)
    model.run(value)
    assert vars(model)["run"] is own
    assert compilations() == 1
    assert listener.told == ["+run", "-run"]


def test_a_model_with_a_compiled_part_is_heard_and_the_part_is_not_compiled_again(
    listener: Listener, compilations: Callable[[], int]
) -> None:
    model, value = Compiled(), torch.ones(2, 2)
    model.net.compile(backend="eager")
    model.run(value)
    with method_calls(model, "run", listener), method_calls(model, "helper", listener):
        model.run(value)
    model.run(value)
    assert compilations() == 1
    assert listener.told == ["+run", "+helper", "-helper", "-run"]
