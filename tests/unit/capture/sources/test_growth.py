"""Holders of memory that has grown between two moments, with and without the time to search for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import random
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memprof.artifacts.series import HolderRow
from lightning_memprof.capture import census
from lightning_memprof.capture.census import take_census
from lightning_memprof.capture.sources import growth
from lightning_memprof.units import MIB


class Keeping(nn.Module):
    """Lists of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: list[list[int]] = [[] for _ in range(5)]
        self.by_name: dict[int, list[Any]] = {}
        self.by_number: dict[int, bytes] = {}
        self.tensors: list[torch.Tensor] = []
        self.total = torch.zeros(())
        self.weight = nn.Parameter(torch.ones(3, 4))


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


def test_freed_memory_is_told_without_time_for_a_search() -> None:
    before = take_census(1, 0)
    now = replace(take_census(2, 40 * MIB), free_bytes=before.free_bytes + 40 * MIB)
    assert growth.grown_holders(before, now, Keeping(), 0, ())[-1].kind == "free memory"


def test_the_container_that_gained_most_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    mean = growth._Content.mean

    def recorded(content: Any, container: Any, more: int) -> float:
        read.append(more)
        return mean(content, container, more)

    monkeypatch.setattr(growth._Content, "mean", recorded)
    grown(60)
    assert len(read) > 5
    assert read == sorted(read, reverse=True)


def step(model: Keeping, operators: int) -> torch.Tensor:
    """Return a loss whose graph has released what it saved."""
    loss = model.weight.sum()
    for _ in range(operators):
        loss = loss.tanh()
    loss.backward()
    return loss


def kept_graph(model: Keeping, size: int) -> HolderRow:
    """Return the row of the total after 40 steps of 200 operators each, about 5 MiB of nodes."""
    before = take_census(1, 0)
    for _ in range(40):
        model.total = model.total + step(model, 200)
    rows = growth.grown_holders(before, take_census(2, size), model, 60, ())
    return next(row for row in rows if row.place == "Keeping.total")


def test_a_graph_holds_its_nodes_after_a_backward() -> None:
    row = kept_graph(Keeping(), 8 * MIB)
    assert (row.kind, row.content) == ("autograd graph", "Tensor[] with its graph")
    assert 40 * 200 * 400 < (row.added_bytes or 0) < 8 * MIB


def test_views_of_parameters_do_not_hide_a_graph() -> None:
    # As of the weights of a linear layer that autograd saves: after an update the views have the latest nodes.
    model = Keeping()
    model.tensors = [model.weight.t() for _ in range(20)]
    with torch.no_grad():
        model.weight.add_(1.0)
    assert kept_graph(model, 8 * MIB).kind == "autograd graph"


def test_a_graph_that_is_too_large_to_read_has_what_nothing_else_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "MOST_NODES", 4000)
    assert kept_graph(Keeping(), 40 * MIB).added_bytes == 40 * MIB


def test_losses_in_a_list_hold_the_nodes_of_their_graphs() -> None:
    model = Keeping()
    before = take_census(1, 0)
    model.tensors += [step(model, 200) for _ in range(40)]
    rows = growth.grown_holders(before, take_census(2, 8 * MIB), model, 60, ())
    row = next(row for row in rows if row.place == "Keeping.tensors[...]")
    assert row.content == "Tensor[] with its graph"
    assert 40 * 200 * 400 < (row.added_bytes or 0) < 8 * MIB


@pytest.mark.parametrize(("rows", "content"), [(100, "Tensor[100,100]"), (2, "Tensor[2,100] of a larger tensor")])
def test_a_part_of_a_tensor_keeps_it_whole(rows: int, content: str) -> None:
    model = Keeping()
    before = take_census(1, 0)
    model.tensors += [torch.zeros(100, 100)[:rows] for _ in range(40)]
    found = growth.grown_holders(before, take_census(2, 8 * MIB), model, 60, ())
    row = next(row for row in found if row.place == "Keeping.tensors[...]")
    assert row.content == content
    assert (row.added_bytes or 0) >= 30 * 40_000


def test_tensors_of_all_shapes_at_one_place_count() -> None:
    # Three entries are too few for the containers that are counted.
    model = Keeping()
    before = take_census(1, 0)
    model.tensors += [torch.ones(1024, 1024), torch.ones(2048, 1024), torch.ones(1024, 2048)]
    rows = growth.grown_holders(before, take_census(2, 20 * MIB), model, 60, ())
    (row,) = (row for row in rows if row.place == "Keeping.tensors[...]")
    assert (row.added, row.added_bytes) == (3, 20 * MIB)
    assert (row.content or "").endswith(" and others")


def listed(model: Keeping, size: int, add: Callable[[], None]) -> HolderRow:
    """Return the row of a module's lists, of which each gained entries."""
    before = take_census(1, 0)
    add()
    rows = growth.grown_holders(before, take_census(2, size), model, 60, ())
    return next(row for row in rows if (row.place or "").startswith("Keeping.lists"))


@pytest.mark.parametrize(
    ("entry", "most"),
    [
        pytest.param(lambda: [random() for _ in range(10_000)], 20 * 10_000 * 34, id="many numbers"),
        pytest.param(lambda: [torch.ones(4) for _ in range(500)], 20 * 500 * 600, id="small tensors"),
    ],
)
def test_many_small_parts_of_an_entry_count(entry: Callable[[], list[Any]], most: int) -> None:
    model = Keeping()
    row = listed(model, most, lambda: model.lists.extend(entry() for _ in range(20)))
    assert 0.7 * most <= (row.added_bytes or 0) <= most


def test_a_tensor_in_many_lists_counts_once() -> None:
    model = Keeping()
    model.by_name = {number: [] for number in range(60)}
    before = take_census(1, 0)
    shared = torch.ones(2 * MIB)
    for found in model.by_name.values():
        found += [*range(10), shared]
    del found, shared
    rows = growth.grown_holders(before, take_census(2, 64 * MIB), model, 60, ())
    (size,) = (row.added_bytes or 0 for row in rows if (row.place or "").startswith("Keeping.by_name"))
    assert 8 * MIB <= size < 2 * 8 * MIB


def test_a_dict_that_the_garbage_collector_does_not_track_is_a_holder() -> None:
    model = Keeping()
    before = take_census(1, 0)
    model.by_number.update({number: bytes(MIB) for number in range(40)})
    found = growth.grown_holders(before, take_census(2, 40 * MIB), model, 60, ())
    (row,) = (row for row in found if row.place == "Keeping.by_number[...]")
    assert (row.kind, row.added, row.content) == ("attribute", 40, "bytes")
