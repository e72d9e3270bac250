"""Holders of memory that has grown between two moments, with and without the time to search for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_memprof.artifacts.series import HolderRow
from lightning_memprof.capture.census import take_census
from lightning_memprof.capture.sources import growth
from lightning_memprof.units import MIB


class Keeping(nn.Module):
    """Lists of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: list[list[int]] = [[] for _ in range(5)]
        self.tensors: list[torch.Tensor] = []


def grown(seconds: float) -> list[HolderRow]:
    """Return the holders of 40 tensors of 1 MiB in a list."""
    model = Keeping()
    before = take_census(1, 0)
    model.tensors += [torch.ones(512, 512) for _ in range(40)]
    for number, found in enumerate(model.lists):
        found.extend(range(10 + number))
    return growth.grown_holders(before, take_census(2, 40 * MIB), model, seconds, ())


def test_without_time_no_memory_is_said_to_have_no_holder() -> None:
    # Pages of this process that are touched meanwhile are found without a search.
    assert {row.kind for row in grown(0)} <= {"first touch", "mapped file"}
    (row,) = (row for row in grown(60) if row.place == "Keeping.tensors[...]")
    assert (row.kind, row.added) == ("attribute", 40)


def test_the_container_that_gained_most_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    mean_bytes = growth._mean_bytes

    def recorded(container: Any, more: int, *rest: Any) -> float:
        read.append(more)
        return mean_bytes(container, more, *rest)

    monkeypatch.setattr(growth, "_mean_bytes", recorded)
    grown(60)
    assert len(read) > 5
    assert read == sorted(read, reverse=True)
