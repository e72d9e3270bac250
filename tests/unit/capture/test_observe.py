from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_memprof.capture.observe import Guard, Link, wrapped


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
