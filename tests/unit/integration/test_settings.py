from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprof.capture.collectors.host import HostMemory
from lightning_memprof.capture.collectors.operator_trace import OperatorTrace
from lightning_memprof.capture.collectors.pulse import Pulse
from lightning_memprof.errors import ConfigError
from lightning_memprof.integration.settings import as_schedule, default_collectors, joined
from lightning_memprof.schedule import Action, Schedule
from lightning_memprof.testing import FakeCollector


def names(entries: list[Any]) -> list[str]:
    return [collector.name for collector, _ in entries]


def test_by_default_every_collector_of_the_default_set_is_there_and_nobody_asked_for_it() -> None:
    entries = joined(None, [])
    assert names(entries) == [
        "pulse", "host", "allocator", "hooks", "garbage", "system", "throughput", "allocator_history",
        "functions", "saved_tensors", "oom", "operator_trace",
    ]  # fmt: skip
    assert not any(asked for _, asked in entries)
    assert names(entries) == [collector.name for collector in default_collectors()]


def test_what_the_user_names_is_all_there_is_and_asked_for() -> None:
    assert [(collector.name, asked) for collector, asked in joined([HostMemory()], [])] == [("host", True)]


def test_an_empty_list_asks_for_nothing() -> None:
    assert joined([], []) == []


def test_a_lent_collector_comes_in_the_place_of_a_default_one() -> None:
    lent = OperatorTrace(record_shapes=True)
    entries = joined(None, [lent])
    assert [collector for collector, _ in entries if collector.name == "operator_trace"] == [lent]
    assert len(entries) == len(default_collectors())


def test_what_the_user_named_himself_wins_over_what_is_lent() -> None:
    asked, lent = OperatorTrace(with_stack=True), OperatorTrace(record_shapes=True)
    assert joined([asked], [lent]) == [(asked, True)]
    assert joined([Pulse()], [lent])[1] == (lent, False)


def test_the_operator_trace_comes_last_wherever_it_was_named() -> None:
    assert names(joined([OperatorTrace(), FakeCollector("a"), Pulse()], [])) == ["a", "pulse", "operator_trace"]


def test_two_of_one_name_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="collectors holds host more than once; leave one"):
        joined([HostMemory(), Pulse(), HostMemory()], [])


def test_a_schedule_stays_what_it_is_and_a_mapping_becomes_one() -> None:
    schedule = Schedule(wait=3)
    assert as_schedule(schedule) is schedule
    assert as_schedule({"wait": 3}) == schedule


def test_a_mapping_may_have_a_schedule_for_each_stage() -> None:
    by_stage = {"fit": {"wait": 3}, "test": None}
    assert as_schedule(by_stage) == Schedule(wait=3)
    assert {as_schedule(by_stage, "test")(step) for step in range(9)} == {Action.NONE}


@given(st.integers(0, 4), st.integers(0, 4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 60))
def test_torchs_own_schedule_may_be_given(wait: int, warmup: int, active: int, repeat: int, step: int) -> None:
    theirs = torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
    ours = Schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
    assert as_schedule(theirs)(step) is ours(step)


def test_a_function_of_ours_may_be_given() -> None:
    assert as_schedule(lambda step: Action.RECORD if step else Action.NONE)(1) is Action.RECORD


def test_none_records_every_step() -> None:
    assert {as_schedule(None)(step) for step in range(5)} == {Action.RECORD}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"wiat": 1}, "unexpected keyword argument 'wiat'; its fields are skip_first, wait"),
        ({"train": {"wait": 1}}, "or each stage has its own under fit, validate, test, predict"),
        ({"active": 0}, "active=0"),
        (lambda _: True, "returns True, a torch.profiler.ProfilerAction is expected"),
        (3, "must be a Schedule, a mapping of its fields, StageSchedules, or a function of the step"),
        ("fit", "must be a Schedule"),
    ],
)
def test_anything_else_is_refused_with_the_value_and_the_rule(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_schedule(value)
