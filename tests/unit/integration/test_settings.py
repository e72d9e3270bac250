from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprof import ConfigError, MemProfilerCallback, OutputOptions
from lightning_memprof.capture.collectors.host import HostMemory
from lightning_memprof.capture.collectors.operator_trace import OperatorTrace
from lightning_memprof.capture.collectors.pulse import Pulse
from lightning_memprof.integration.callback import load_options
from lightning_memprof.integration.settings import (
    Settings,
    check_collectors,
    check_ranks,
    choice_note,
    default_collectors,
    for_this_rank,
    group_timeout_seconds,
    is_chosen,
    joined,
    parse_schedule,
    schedule_of,
)
from lightning_memprof.schedule import Action, Schedule
from lightning_memprof.testing import FakeCollector


def names(entries: list[Any]) -> list[str]:
    return [collector.name for collector, _ in entries]


def test_by_default_every_collector_of_the_default_set_is_there_and_nobody_asked_for_it() -> None:
    entries = joined(None, [])
    assert names(entries) == [
        "pulse", "host", "allocator", "hooks", "garbage", "system", "throughput", "allocator_history",
        "functions", "saved_tensors", "holders", "hangs", "oom", "operator_trace",
    ]  # fmt: skip
    assert not any(asked for _, asked in entries)
    assert names(entries) == [collector.name for collector in default_collectors()]


@pytest.mark.parametrize("asked", [[], [HostMemory()]])
def test_what_the_user_names_is_all_there_is_and_asked_for(asked: list[Any]) -> None:
    assert joined(asked, []) == [(collector, True) for collector in asked]


@pytest.mark.parametrize("asked", [None, ["default", FakeCollector("mine")]])
def test_a_lent_collector_comes_in_the_place_of_a_default_one(asked: list[Any] | None) -> None:
    lent = OperatorTrace(record_shapes=True)
    entries = joined(asked, [lent])
    assert [entry for entry in entries if entry[0].name == "operator_trace"] == [(lent, False)]
    assert len(entries) == len(default_collectors()) + len(asked or [None]) - 1


def test_what_the_user_named_himself_wins_over_what_is_lent() -> None:
    asked, lent = OperatorTrace(with_stack=True), OperatorTrace(record_shapes=True)
    assert joined([asked], [lent]) == [(asked, True)]
    assert joined([Pulse()], [lent])[1] == (lent, False)


def test_the_operator_trace_comes_last_wherever_it_was_named() -> None:
    assert names(joined([OperatorTrace(), FakeCollector("a"), Pulse()], [])) == ["a", "pulse", "operator_trace"]


def test_default_in_the_list_adds_the_default_set_and_only_the_named_collector_is_required() -> None:
    entries = joined(["default", FakeCollector("mine")], [])
    assert sorted(names(entries)) == sorted([*(collector.name for collector in default_collectors()), "mine"])
    assert names(entries)[-1] == "operator_trace"
    assert [collector.name for collector, required in entries if required] == ["mine"]


def test_a_named_collector_replaces_the_one_of_the_default_set_with_its_name() -> None:
    mine = OperatorTrace(with_stack=True)
    entries = joined(["default", mine], [OperatorTrace(record_shapes=True)])
    assert [entry for entry in entries if entry[0].name == "operator_trace"] == [(mine, True)]
    assert len(entries) == len(default_collectors())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([HostMemory(), Pulse(), HostMemory()], "collectors contains host more than once; keep one"),
        (["default", "default"], "collectors contains default more than once; keep one"),
        (["defaults"], r"collectors contains 'defaults': must be 'default' or a Collector, as in \['default'"),
        ([HostMemory], "must be 'default' or a Collector"),
        ("default", r"collectors='default': must be a list, as in collectors=\[...\], or None"),
        ([FakeCollector("a.b")], r"FakeCollector.name = 'a.b': must be 1 to 64 of letters, digits, '_' and '-'"),
    ],
)
def test_other_choices_of_collectors_are_refused_with_the_value_and_the_rule(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_collectors(value)


def test_a_schedule_stays_what_it_is_and_a_mapping_becomes_one_or_one_for_each_stage() -> None:
    schedule = Schedule(wait=3)
    assert parse_schedule(schedule) is schedule
    assert parse_schedule({"wait": 3}) == schedule
    by_stage = parse_schedule({"fit": {"wait": 3}, "test": None})
    assert schedule_of(by_stage, "fit") == schedule
    assert {schedule_of(by_stage, "test")(step) for step in range(9)} == {Action.NONE}


@given(st.integers(0, 4), st.integers(0, 4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 60))
def test_torchs_own_schedule_may_be_given(wait: int, warmup: int, active: int, repeat: int, step: int) -> None:
    theirs = torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
    ours = Schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
    assert schedule_of(parse_schedule(theirs), "fit")(step) is ours(step)


@pytest.mark.parametrize("given", [lambda step: Action.RECORD if step else Action.NONE, None])
def test_a_function_of_ours_may_be_given_and_none_records_every_step(given: Any) -> None:
    assert [schedule_of(parse_schedule(given), "fit")(step) for step in (1, 2)] == [Action.RECORD] * 2


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
        parse_schedule(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "explode"}, r"OutputOptions\(on_error='explode'\): must be 'warn' or 'raise'"),
        *(({"summary": summary}, rf"OutputOptions\(summary={summary!r}\)") for summary in ("page", 2, "")),
        ({"dirpath": 3}, r"OutputOptions\(dirpath=3\): must be a path or a URL"),
        ({"dirpath": "nowhere://b/x"}, "nowhere://b/x: Protocol not known: nowhere; install fsspec's package"),
        ({"dirpath": Path("s3://bucket/runs")}, "a Path drops one '/' of a URL; give the URL as a string"),
    ],
)
def test_an_output_that_does_not_exist_is_refused_by_its_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OutputOptions(**options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("text", "summary"), [("line", "line"), ("false", False), ("true", True), ("null", None)])
def test_yaml_has_the_summary_as_python_has_it(tmp_path: Path, text: str, summary: Any) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(f"output: {{summary: {text}}}\n")
    assert load_options(path)["output"] == OutputOptions(summary=summary)


@pytest.mark.parametrize(
    "dirpath", ["memory://bucket/runs", "file:///tmp/runs", "runs", Path("C:/runs"), Path("/a:/b")]
)
def test_urls_and_directories_are_taken(dirpath: str | Path) -> None:
    assert OutputOptions(dirpath=dirpath).dirpath == dirpath


def test_looking_at_a_url_asks_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", refuse)
    assert OutputOptions(dirpath="s3://bucket/runs").dirpath == "s3://bucket/runs"


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
    with pytest.raises(ConfigError, match=r"is not a global rank; use integers from 0, or 'all'"):
        check_ranks(ranks)


@pytest.mark.parametrize("ranks", ["some", 0, -1, True, 1.5, {}, {"every": 0}, {"every": 8, "of": 2}, {"evry": 8}])
def test_what_chooses_nothing_is_refused_with_all_that_may_be_given(ranks: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be 'all', 'none', a list of global ranks, a count of at least 1, "):
        check_ranks(ranks)


def test_the_other_ranks_keep_what_is_light() -> None:
    wanted = Settings(schedule=Schedule(), collectors=joined(None, ()), ranks=[1])
    assert for_this_rank(wanted, rank=1, world_size=2, local_rank=0) is wanted
    here = for_this_rank(wanted, rank=0, world_size=2, local_rank=0)
    assert not here.every_collector
    light = {collector.name for collector, _ in here.collectors}
    assert light >= {"pulse", "host", "allocator", "hooks", "oom"}
    assert light.isdisjoint({"operator_trace", "allocator_history", "functions", "saved_tensors"})
    assert light < {collector.name for collector in default_collectors()}


def test_whether_a_collector_was_asked_for_is_kept() -> None:
    wanted = Settings(schedule=Schedule(), collectors=joined([HostMemory(), OperatorTrace()], ()), ranks="none")
    assert for_this_rank(wanted, rank=0, world_size=2, local_rank=0).collectors == [(wanted.collectors[0][0], True)]


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


@pytest.mark.parametrize("name", ["triggers", "budget", "output"])
def test_a_mapping_in_place_of_options_is_refused_when_the_callback_is_made(name: str) -> None:
    options: dict[str, Any] = {name: {}}
    with pytest.raises(ConfigError, match=name):
        MemProfilerCallback(**options)
