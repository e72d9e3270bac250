from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_memprof.capture.observe import in_front_of


class Base:
    def method(self) -> list[str]:
        return ["original"]


def saying(word: str) -> Callable[[list[Callable[..., Any]]], Callable[..., Any]]:
    def wrap(following: list[Callable[..., Any]]) -> Callable[..., Any]:
        return lambda instance: [word, *following[0](instance)]

    return wrap


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("inherited", [True, False])
def test_contexts_end_in_any_order_and_leave_the_class_as_it_was(first: int, inherited: bool) -> None:
    owner: Any = type("Derived", (Base,), {} if inherited else {"method": lambda _: ["own"]})
    last = owner().method()
    before = dict(vars(owner))
    contexts = [in_front_of(owner, "method", saying(word)) for word in "ab"]
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

    def wrap(following: list[Callable[..., Any]]) -> Callable[..., Any]:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            sizes.append(size)
            return following[0](storage, size)

        return resize

    with in_front_of(torch.UntypedStorage, "resize_", wrap):
        torch.empty(4).untyped_storage().resize_(8)
    assert sizes == [8]
    assert "resize_" not in vars(torch.UntypedStorage)
