from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_memprof.capture.collectors.host import HostMemory
from lightning_memprof.capture.collectors.operator_trace import OperatorTrace
from lightning_memprof.errors import ConfigError
from lightning_memprof.integration.ranks import (
    check_ranks,
    choice_note,
    for_this_rank,
    group_timeout_seconds,
    is_chosen,
)
from lightning_memprof.integration.settings import Settings, default_collectors, joined
from lightning_memprof.schedule import Schedule

EIGHT_A_NODE = 8


def chosen(ranks: Any, world_size: int) -> list[int]:
    """Which ranks choose themselves, each asked alone, on nodes of eight."""
    return [
        rank
        for rank in range(world_size)
        if is_chosen(check_ranks(ranks), rank=rank, world_size=world_size, local_rank=rank % EIGHT_A_NODE)
    ]


def a_trainer(rank: int, world_size: int, timeout: Any = None) -> Any:
    strategy = SimpleNamespace(_timeout=timeout)
    return SimpleNamespace(
        global_rank=rank, world_size=world_size, local_rank=rank % EIGHT_A_NODE, strategy=strategy
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "world_size", "expected"),
    [
        (None, 1, [0]),
        (None, 8, list(range(8))),
        (None, 9, [0, 8]),
        (None, 32, [0, 8, 16, 24]),
        ("all", 32, list(range(32))),
        ("none", 2, []),
        ([3, 5, 99], 8, [3, 5]),
        ([], 8, []),
        ((1,), 2, [1]),
        (1, 32, [0]),
        (3, 32, [0, 1, 2]),
        (64, 2, [0, 1]),
        ({"every": 8}, 20, [0, 8, 16]),
        ({"every": 1}, 3, [0, 1, 2]),
    ],
)
def test_each_rank_knows_from_its_own_numbers_whether_it_is_chosen(
    ranks: Any, world_size: int, expected: list[int]
) -> None:
    assert chosen(ranks, world_size) == expected


@pytest.mark.parametrize(
    ("ranks", "world_size", "note"),
    [
        (None, 8, None),
        (None, 9, "on the first rank of each node; ranks='all' gives them to all"),
        ("all", 64, None),
        (64, 64, None),
        ([0, 1], 2, None),
        ([1], 2, "on these ranks only: ranks=[1]"),
        ({"every": 8}, 64, "on these ranks only: ranks={'every': 8}"),
    ],
)
def test_a_choice_that_leaves_ranks_out_is_told_on_the_page(ranks: Any, world_size: int, note: str | None) -> None:
    told = choice_note(ranks, world_size)
    assert told == (note and f"windows have every collector {note}")


@pytest.mark.parametrize("ranks", [[-1], [0, 1.0], [True], ["0"]])
def test_what_is_no_rank_is_refused(ranks: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no global rank; give integers from 0, or 'all'"):
        check_ranks(ranks)


@pytest.mark.parametrize("ranks", ["some", 0, -1, True, 1.5, {}, {"every": 0}, {"every": 8, "of": 2}, {"evry": 8}])
def test_what_chooses_nothing_is_refused_with_all_that_may_be_given(ranks: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be 'all', 'none', a list of global ranks, a count of at least 1, "):
        check_ranks(ranks)


def test_the_other_ranks_keep_what_is_light() -> None:
    wanted = Settings(schedule=Schedule(), collectors=joined(None, ()), ranks=[1])
    assert for_this_rank(wanted, a_trainer(1, 2)) is wanted
    here = for_this_rank(wanted, a_trainer(0, 2))
    assert not here.every_collector
    light = {collector.name for collector, _ in here.collectors}
    assert light >= {"pulse", "host", "allocator", "hooks", "oom"}
    assert light.isdisjoint({"operator_trace", "allocator_history", "functions", "saved_tensors"})
    assert light < {collector.name for collector in default_collectors()}


def test_whether_a_collector_was_asked_for_is_kept() -> None:
    wanted = Settings(schedule=Schedule(), collectors=joined([HostMemory(), OperatorTrace()], ()), ranks="none")
    assert for_this_rank(wanted, a_trainer(0, 2)).collectors == [(wanted.collectors[0][0], True)]


@pytest.mark.parametrize(
    ("trainer", "seconds"),
    [
        (a_trainer(0, 2, timedelta(minutes=30)), 1800.0),
        (a_trainer(0, 1, timedelta(minutes=30)), None),
        (a_trainer(0, 2, None), None),
    ],
)
def test_the_process_groups_timeout_counts_where_there_is_a_group(trainer: Any, seconds: float | None) -> None:
    assert group_timeout_seconds(trainer) == seconds
