from __future__ import annotations

import copy
import functools
import gc
import multiprocessing
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any

import pytest
import torch

from lightning_memprof.capture.observe import (
    Guard,
    Link,
    deferred,
    discard,
    gc_callback,
    hide_wrappers,
    kept_interrupts,
    original_of,
    place_of,
    wrapped,
)
from lightning_memprof.capture.room import Room, is_at_limit, with_room
from stack import at_the_limit


class Base:
    def method(self) -> list[str]:
        return ["original"]


def saying(word: str) -> Callable[[Link], Callable[..., Any]]:
    def wrap(link: Link) -> Callable[..., Any]:
        return lambda *instance: [word, *link.call(*instance)]

    return wrap


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("inherited", [True, False])
def test_contexts_end_in_any_order_and_leave_the_class_as_it_was(first: int, inherited: bool) -> None:
    owner: Any = type("Derived", (Base,), {} if inherited else {"method": lambda _: ["own"]})
    last = owner().method()
    before = dict(vars(owner))
    contexts = [wrapped(owner, "method", saying(word)) for word in "ab"]
    for context in contexts:
        context.__enter__()
    assert owner().method() == ["b", "a", *last]
    contexts[first].__exit__(None, None, None)
    assert owner().method() == ["ba"[first], *last]
    contexts[1 - first].__exit__(None, None, None)
    assert dict(vars(owner)) == before


def test_a_method_of_torchs_storages_is_left_as_inherited_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    if "resize_" in vars(torch.UntypedStorage):  # torch's own memory tracker leaves it behind
        monkeypatch.delattr(torch.UntypedStorage, "resize_")
    assert "resize_" not in vars(torch.UntypedStorage)
    sizes: list[int] = []

    def wrap(link: Link) -> Callable[..., Any]:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            sizes.append(size)
            return link.call(storage, size)

        return resize

    with wrapped(torch.UntypedStorage, "resize_", wrap):
        torch.empty(4).untyped_storage().resize_(8)
    assert sizes == [8]
    assert "resize_" not in vars(torch.UntypedStorage)


class Counted:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def work(self, value: int = 1) -> int:
        self.calls += 1
        return value

    twice = functools.partialmethod(work, 2)


def logged(log: list[str]) -> Callable[[Link], Callable[..., Any]]:
    def wrap(link: Link) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            log.append("called")
            return link.call(*args, **kwargs)

        return functools.update_wrapper(call, link.below)

    return wrap


def test_an_object_is_pickled_and_copied_without_the_wrapper() -> None:
    log: list[str] = []
    part = Counted()
    place = place_of(part, "work")
    assert place is Counted
    with wrapped(place, "work", logged(log)):
        before = dict(vars(part))
        copied, pickled = copy.deepcopy(part), pickle.loads(pickle.dumps(part))  # noqa: S301 our own
        bound = pickle.dumps(part.work)
        assert dict(vars(part)) == before
    assert (copied.work(3), pickled.work(4), pickle.loads(bound)(5)) == (3, 4, 5)  # noqa: S301 our own
    assert log == []


def test_an_attribute_of_the_instance_is_wrapped_there_and_restored_as_the_same_object() -> None:
    log: list[str] = []
    part, own = Counted(), functools.partial(int, "7")
    vars(part)["work"] = own
    place = place_of(part, "work")
    assert place is part
    with wrapped(place, "work", logged(log)):
        assert part.work() == 7
        assert Counted().work(2) == 2
    assert vars(part)["work"] is own
    assert log == ["called"]


def test_an_instance_without_the_attribute_loses_it_again() -> None:
    log: list[str] = []
    part = Counted()
    before = dict(vars(part))
    with wrapped(part, "work", logged(log)):
        assert part.work(3) == 3
        assert "work" in vars(part)
    assert (log, part.calls) == (["called"], 1)
    assert {name: value for name, value in vars(part).items() if name != "calls"} == {
        name: value for name, value in before.items() if name != "calls"
    }


def test_the_method_is_restored_after_an_exception() -> None:
    before = dict(vars(Counted))
    with pytest.raises(LookupError), wrapped(Counted, "work", logged([])):
        raise LookupError
    assert dict(vars(Counted)) == before


def test_an_exception_of_the_method_is_the_callers() -> None:
    log: list[str] = []
    with wrapped(Counted, "work", logged(log)), pytest.raises(TypeError):
        Counted().work(1, 2)  # type: ignore[call-arg]
    assert log == ["called"]


def test_a_partial_method_and_a_callable_without_binding_are_called_as_before() -> None:
    owner: Any = type("Owner", (Counted,), {"plain": functools.partial(int, "5")})
    log: list[str] = []
    with wrapped(owner, "twice", logged(log)), wrapped(owner, "plain", logged(log)):
        assert (owner().twice(), owner().plain()) == (2, 5)
    assert log == ["called", "called"]
    assert "twice" not in vars(owner)


def test_another_programs_wrapper_stays_and_ours_below_it_passes_calls_through() -> None:
    log: list[str] = []
    own = Counted.work
    context = wrapped(Counted, "work", logged(log))
    context.__enter__()
    ours = Counted.work

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    Counted.work = theirs  # type: ignore[method-assign]
    try:
        assert original_of(theirs) is own
        context.__exit__(None, None, None)
        assert Counted.work is theirs
        with wrapped(Counted, "work", logged(log)):
            assert Counted().work(3) == 3
        assert Counted.work is theirs
        assert Counted().work(4) == 4
    finally:
        Counted.work = own  # type: ignore[method-assign]


def test_contexts_on_an_instance_end_in_any_order() -> None:
    for first in (0, 1):
        log: list[str] = []
        part = Counted()
        contexts = [wrapped(part, "work", logged(log)) for _ in range(2)]
        for context in contexts:
            context.__enter__()
        part.work()
        contexts[first].__exit__(None, None, None)
        part.work()
        contexts[1 - first].__exit__(None, None, None)
        part.work()
        assert (len(log), part.calls) == (3, 3)
        assert "work" not in vars(part)


def test_a_compiled_callers_graph_is_compiled_once_and_the_wrapper_is_called_from_outside() -> None:
    class Net(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value + 1

        def run(self, value: torch.Tensor) -> torch.Tensor:
            return self(value)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    log: list[str] = []
    net = Net()
    net.compile(backend="eager")
    net.run(torch.ones(2))
    with wrapped(place_of(net, "run"), "run", logged(log)):
        net.run(torch.ones(2))
    net.run(torch.ones(2))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert log == ["called"]
    torch._dynamo.reset()


class TestGuardBetween:
    """What stands between torch and the user's code does the original's work once, whatever happens."""

    def test_the_original_runs_once_where_the_wrapper_fails_before_it(self) -> None:
        calls: list[int] = []
        guard = Guard()

        def original(value: int) -> str:
            calls.append(value)
            return "done"

        def wrap(_original: Any) -> Any:
            def fail(_value: int) -> None:
                raise LookupError

            return fail

        called = guard.between(wrap, original)
        assert called(1) == "done"
        assert called(2) == "done"
        assert calls == [1, 2]
        assert isinstance(guard.failure, LookupError)

    def test_the_originals_result_is_given_where_the_wrapper_fails_behind_it(self) -> None:
        calls: list[int] = []
        guard = Guard()

        def original(value: int) -> str:
            calls.append(value)
            return "done"

        def wrap(inner: Any) -> Any:
            def fail(value: int) -> None:
                inner(value)
                raise LookupError

            return fail

        assert guard.between(wrap, original)(1) == "done"
        assert calls == [1]

    def test_the_originals_exception_is_raised_as_it_is(self) -> None:
        guard = Guard()
        error = NotImplementedError("theirs")

        def original() -> None:
            raise error

        with pytest.raises(NotImplementedError) as raised:
            guard.between(lambda inner: inner, original)()
        assert raised.value is error
        assert guard.failure is None

    @pytest.mark.parametrize("is_called", [True, False], ids=["behind it", "before it"])
    def test_the_originals_exception_has_no_context_where_the_wrapper_fails_too(self, is_called: bool) -> None:
        guard = Guard()
        error = NotImplementedError("theirs")

        def original() -> None:
            raise error

        def wrap(inner: Any) -> Any:
            def fail() -> None:
                try:
                    if is_called:
                        inner()
                finally:
                    raise LookupError

            return fail

        with pytest.raises(NotImplementedError) as raised:
            guard.between(wrap, original)()
        assert raised.value is error
        assert error.__context__ is None
        assert isinstance(guard.failure, LookupError)


def test_wrappers_leave_the_traceback_of_an_exception_and_of_its_context() -> None:
    def original(number: int) -> None:
        raise ProgramError(number)

    def failing(number: int) -> None:
        try:
            original(number)
        except ProgramError as error:
            raise LookupError from error

    def wrapper(call: Callable[[int], None], number: int) -> None:
        __tracebackhide__ = True
        call(number)

    ours: Any = FunctionType(wrapper.__code__, {"__name__": "lightning_memprof.part"})
    with pytest.raises(LookupError) as raised:
        ours(lambda number: ours(failing, number), 1)
    error = raised.value
    hide_wrappers(error)
    hide_wrappers(error)
    assert error.__context__ is not None
    names = [entry.name for entry in traceback.extract_tb(error.__traceback__)]
    assert names == [names[0], "<lambda>", "failing"]
    assert [entry.name for entry in traceback.extract_tb(error.__context__.__traceback__)] == ["failing", "original"]


class ProgramError(Exception):
    pass


class Refusing:
    """Is not compared with anything."""

    def __eq__(self, _: object) -> bool:
        raise TypeError

    __hash__ = object.__hash__

    def __call__(self, *_: object) -> None:
        pass


def test_an_entry_is_removed_by_identity() -> None:
    first, second = Refusing(), Refusing()
    entries = [first, second]
    discard(entries, second)
    discard(entries, second)
    assert len(entries) == 1
    assert entries[0] is first


def test_our_gc_callback_is_found_among_those_of_the_program() -> None:
    own = Refusing()
    gc.callbacks.insert(0, own)
    try:
        with gc_callback(lambda *_: None):
            assert len(gc.callbacks) >= 2
        assert gc.callbacks.pop(0) is own
    finally:
        gc.callbacks[:] = [entry for entry in gc.callbacks if entry is not own]


def collect_garbage(error: BaseException, module: str) -> None:
    """Collect garbage while a function of a module raises in ``gc.callbacks``."""

    def on_collection(phase: str, _: dict[str, int]) -> None:
        if phase == "stop":
            raise error

    on_collection.__module__ = module
    with gc_callback(on_collection):
        gc.collect()


def test_a_forked_process_does_not_call_our_gc_callback() -> None:
    phases: list[str] = []

    def collect() -> None:
        phases.clear()
        gc.collect()
        raise SystemExit(len(phases))

    with gc_callback(lambda phase, _: phases.append(phase)):
        gc.collect()
        assert phases[-2:] == ["start", "stop"]
        child = multiprocessing.get_context("fork").Process(target=collect)
        child.start()
        child.join()
    assert child.exitcode == 0


def test_an_interrupt_of_our_gc_callback_is_raised_at_the_end_unless_it_was_taken(monkeypatch: Any) -> None:
    hook: Any = pytest.fail
    monkeypatch.setattr(sys, "unraisablehook", hook)
    interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as raised, kept_interrupts():
        collect_garbage(interrupt, "lightning_memprof.capture.clock")
    assert raised.value is interrupt
    with kept_interrupts() as kept:
        collect_garbage(interrupt, "lightning_memprof.capture.clock")
        assert kept.pop() is interrupt
    assert sys.unraisablehook is hook


@pytest.mark.parametrize(
    ("error", "module"),
    [(KeyboardInterrupt(), "another_program"), (ValueError(), "lightning_memprof.capture.clock")],
)
def test_other_errors_that_python_drops_reach_the_earlier_hook(error: Any, module: str, monkeypatch: Any) -> None:
    passed_on: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: passed_on.append(unraisable.exc_value))
    with kept_interrupts() as kept:
        collect_garbage(error, module)
        assert not kept
    assert passed_on == [error]


def dead_worker(number: int, _: Any) -> None:
    raise RuntimeError("DataLoader worker (pid 2) exited unexpectedly with exit code 3.")


@pytest.fixture
def raising_handler() -> Iterator[None]:
    earlier = signal.signal(signal.SIGCHLD, dead_worker)
    yield
    signal.signal(signal.SIGCHLD, earlier)


@pytest.mark.usefixtures("raising_handler")
def test_the_handler_of_a_deferred_signal_runs_at_the_end_unless_it_was_taken() -> None:
    with pytest.raises(RuntimeError, match="pid 2"), deferred(signal.SIGCHLD):
        signal.raise_signal(signal.SIGCHLD)
    with deferred(signal.SIGCHLD) as arrived:
        signal.raise_signal(signal.SIGCHLD)
        assert arrived == [signal.SIGCHLD]
        arrived.clear()
    assert signal.getsignal(signal.SIGCHLD) is dead_worker


@pytest.mark.usefixtures("raising_handler")
def test_a_signal_is_not_deferred_outside_the_main_thread_or_over_an_error() -> None:
    def elsewhere() -> None:
        with deferred(signal.SIGCHLD):
            assert signal.getsignal(signal.SIGCHLD) is dead_worker

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    with suppress(ValueError), deferred(signal.SIGCHLD):
        signal.raise_signal(signal.SIGCHLD)
        raise ValueError
    assert signal.getsignal(signal.SIGCHLD) is dead_worker


def deep(frames: int) -> int:
    return frames if frames == 0 else 1 + deep(frames - 1)


def test_our_code_has_room_where_the_program_has_none_and_the_limit_stays() -> None:
    limit = sys.getrecursionlimit()
    with pytest.raises(RecursionError):
        at_the_limit(lambda: deep(200), 20)
    assert at_the_limit(lambda: with_room(deep, 200), 20) == 200
    with pytest.raises(ArithmeticError):
        with_room(lambda: 1 / 0)
    assert sys.getrecursionlimit() == limit


def test_without_a_frame_left_nothing_is_called_and_the_error_says_so() -> None:
    limit = sys.getrecursionlimit()
    outcomes: list[tuple[bool, int]] = []

    def attempt() -> None:
        called: list[int] = []
        try:
            with_room(called.append, 1)
        except RecursionError as error:
            # Where no frame is left, nothing of ours can be called.
            caught.append((error, len(called)))
        else:
            outcomes.append((False, len(called)))

    caught: list[tuple[RecursionError, int]] = []
    for spare in range(12):
        with suppress(RecursionError):
            at_the_limit(attempt, spare)
    outcomes += [(is_at_limit(error), called) for error, called in caught]
    assert {*outcomes} == {(True, 0), (False, 1)}
    assert sys.getrecursionlimit() == limit


def test_an_endless_recursion_of_ours_is_no_lack_of_room() -> None:
    with pytest.raises(RecursionError) as raised:
        with_room(deep, 100_000)
    assert not is_at_limit(raised.value)


def test_only_the_main_thread_changes_the_limit() -> None:
    limits: list[int] = []

    def read() -> None:
        with_room(lambda: limits.append(sys.getrecursionlimit()))
        with Room(7):
            limits.append(sys.getrecursionlimit())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert limits == [sys.getrecursionlimit()] * 2


def test_a_limit_that_the_program_sets_meanwhile_stays() -> None:
    limit = sys.getrecursionlimit()
    try:
        with Room(7):
            assert sys.getrecursionlimit() == limit + 7
            sys.setrecursionlimit(limit + 500)
        assert sys.getrecursionlimit() == limit + 500
        with_room(sys.setrecursionlimit, limit + 600)
        assert sys.getrecursionlimit() == limit + 600
    finally:
        sys.setrecursionlimit(limit)


def test_a_collection_where_the_program_has_no_frame_left_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def recurse(*_: object) -> None:
        deep(50)

    with gc_callback(recurse):
        at_the_limit(gc.collect, 20)
    assert capfd.readouterr().err == ""


def test_contexts_that_overlap_leave_the_hook_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.unraisablehook
    monkeypatch.setattr(sys, "unraisablehook", before)
    first, second = kept_interrupts(), kept_interrupts()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.unraisablehook is not before
    second.__exit__(None, None, None)
    assert sys.unraisablehook is before
