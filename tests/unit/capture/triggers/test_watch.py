from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lightning_memprof import ConfigError, Triggers
from lightning_memprof.artifacts.trigger import Plan, Request, read_plan, write_plan, write_request
from lightning_memprof.capture.base import RunContext, StepRecord
from lightning_memprof.capture.planner import WindowRequest
from lightning_memprof.capture.triggers.watch import TriggerWatch
from lightning_memprof.triggers import Anomaly
from recorded_rows import read_rows
from sessions import Times, context

QUIET = Triggers(signal=False)


class Every(Anomaly):
    """Finds every step unusual, and may fail."""

    name: ClassVar[str] = "every"

    def __init__(self, limit: int = 2, *, fails: bool = False) -> None:
        self.limit = limit
        self.fails = fails

    def watch(self, run: RunContext) -> Callable[[StepRecord], str | None]:
        def watch(record: StepRecord) -> str | None:
            if self.fails:
                raise ValueError("no")
            return f"step {record.step}"

        return watch


@contextmanager
def ranks(tmp_path: Path, triggers: Triggers = QUIET, world: int = 2) -> Iterator[list[TriggerWatch]]:
    """Give the watches of ranks that share a run directory."""
    with context(tmp_path) as run:
        yield [TriggerWatch(triggers, replace(run, rank=rank, world_size=world)) for rank in range(world)]


def directory(tmp_path: Path) -> Path:
    return tmp_path / "memprofiler"


def record(step: int, window: int | None = None) -> StepRecord:
    return StepRecord(step, step, 0, window, 0, 1, Times(), None)


def test_rank_0_plans_its_step_plus_20_and_the_others_read_it(tmp_path: Path) -> None:
    with ranks(tmp_path) as (first, second):
        assert [*first.before_step(6), *second.before_step(6)] == []
        write_request(directory(tmp_path), Request("id", "somebody", 4, None))
        expected = WindowRequest("somebody", 1, 4, 27)
        assert list(first.before_step(7)) == [expected]
        assert read_plan(directory(tmp_path)) == Plan("id", "somebody", 27, 1, 4, 7)
        assert list(second.before_step(6)) == [expected]
        assert [*first.before_step(8), *second.before_step(7)] == []
        assert not (directory(tmp_path) / "trigger.request.json").exists()


def test_a_request_for_holders_reaches_all_ranks(tmp_path: Path) -> None:
    with ranks(tmp_path) as (first, second):
        write_request(directory(tmp_path), Request("id", "somebody", leaks=True))
        planned = [*first.before_step(7), *second.before_step(8)]
    assert [request.leaks for request in planned] == [True, True]


def test_steps_that_rank_0_does_not_check_are_added_to_its_lead(tmp_path: Path) -> None:
    with ranks(tmp_path) as (first, second):
        for step in (0, 100, 101):
            assert [*first.before_step(step), *second.before_step(step)] == []
        write_request(directory(tmp_path), Request("id", "somebody"))
        (demand,) = first.before_step(102)
        assert demand.step == 102 + 20 + 99
        assert list(second.before_step(200)) == [demand]


def test_a_watch_is_due_50_ms_after_a_check_and_at_once_where_the_program_asks(tmp_path: Path) -> None:
    with ranks(tmp_path) as (first, _):
        assert first.due_ns == 0
        began = time.perf_counter_ns()
        list(first.before_step(0))
        assert first.due_ns >= began + 50_000_000
        first.call(None)
        assert first.due_ns == 0
    with ranks(tmp_path, Triggers(signal=True, file=False), world=1) as (only,):
        only.start()
        list(only.before_step(0))
        assert only.due_ns == sys.maxsize
        os.kill(os.getpid(), signal.SIGUSR2)
        assert only.due_ns == 0
        only.stop()


def test_alone_a_rank_opens_the_window_at_once(tmp_path: Path) -> None:
    with ranks(tmp_path, world=1) as (only,):
        write_request(directory(tmp_path), Request("id", "somebody"))
        assert list(only.before_step(7)) == [WindowRequest("somebody", 1, 3, 7)]


def test_a_rank_that_has_passed_the_planned_step_records_from_now_on_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ranks(tmp_path) as (_, second):
        write_plan(directory(tmp_path), Plan("id", "somebody", 27, 1, 2, 7))
        (demand,) = second.before_step(40)
    assert (demand.step, demand.warmup, demand.active) == (27, 1, 2)
    assert demand.cause == "somebody, planned for step 27, which this rank had passed when it read the plan"
    assert "rank 1 is at step 40: the window planned for step 27 opens late" in caplog.text


def test_requests_while_one_is_planned_get_the_same_window_and_later_ones_a_new_one(tmp_path: Path) -> None:
    with ranks(tmp_path) as (first, second):
        write_request(directory(tmp_path), Request("a", "one", 2))
        assert len(list(first.before_step(0))) == 1
        assert len(list(second.before_step(0))) == 1
        write_request(directory(tmp_path), Request("b", "two", 9))
        assert list(first.before_step(22)) == []
        plan = read_plan(directory(tmp_path))
        assert plan is not None
        assert (plan.id, plan.step, plan.active) == ("b", 20, 2)
        assert list(second.before_step(22)) == []
        write_request(directory(tmp_path), Request("c", "three", 9))
        # 20 steps after the check, and the 21 that were not checked before.
        expected = WindowRequest("three", 1, 9, 64)
        assert list(first.before_step(23)) == list(second.before_step(23)) == [expected]


def test_trigger_asks_all_ranks_through_rank_0(tmp_path: Path) -> None:
    with ranks(tmp_path) as (first, second):
        second.call(5)
        first.call(5)
        demands = list(first.before_step(3))
        assert demands == list(second.before_step(3)) == [WindowRequest("MemProfilerCallback.trigger()", 1, 5, 23)]


def test_trigger_without_files_records_on_the_rank_that_calls_it(tmp_path: Path) -> None:
    with ranks(tmp_path, Triggers(file=False, signal=False)) as (first, second):
        second.call(None)
        assert list(first.before_step(3)) == []
        assert list(second.before_step(3)) == [WindowRequest("MemProfilerCallback.trigger()", 1, 3)]
    assert not (directory(tmp_path) / "trigger.request.json").exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"id": "x", "cause": "y", "active": 0}', '{"id": "x", "cause": "y", "active": true}',
             '{"id": "x", "cause": "y", "active": 99999999}', "[" * 100_000]
)  # fmt: skip
def test_a_damaged_request_or_plan_is_said_once_and_never_raises(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ranks(tmp_path) as (first, second):
        (directory(tmp_path) / "trigger.request.json").write_text(text)
        assert [*first.before_step(0), *first.before_step(1), *first.before_step(2)] == []
        (directory(tmp_path) / "trigger.plan.json").write_text(text)
        assert [*second.before_step(0), *second.before_step(1)] == []
    assert len(caplog.records) == 2
    assert caplog.text.count("remove the file and ask again") == 2
    rows = read_rows(directory(tmp_path) / "manifest.rank00000.jsonl")[0]
    assert [row["collector"] for row in rows] == ["triggers"] * 2


def test_without_files_nothing_is_looked_for(tmp_path: Path) -> None:
    with ranks(tmp_path, Triggers(file=False, signal=False)) as (first, _):
        write_request(directory(tmp_path), Request("id", "somebody"))
        assert list(first.before_step(0)) == []


def test_an_anomaly_opens_windows_up_to_its_limit_and_never_because_of_a_window(tmp_path: Path) -> None:
    with ranks(tmp_path, Triggers(signal=False, file=False, anomalies=[Every(2)])) as (first, _):
        first.start()
        causes = []
        for step in range(6):
            first.after_step(record(step, window=0 if step == 1 else None))
            causes += [demand.cause for demand in first.before_step(step + 1)]
        first.stop()
    assert causes == ["Every: step 0", "Every: step 2"]


def test_an_anomaly_that_fails_is_reported_once_and_the_others_go_on(tmp_path: Path) -> None:
    with ranks(tmp_path, Triggers(signal=False, anomalies=[Every(fails=True), Every(1)])) as (first, _):
        first.start()
        first.after_step(record(0))
        assert [demand.cause for demand in first.before_step(1)] == ["Every: step 0"]
        first.after_step(record(1))
        first.stop()
    rows = read_rows(directory(tmp_path) / "manifest.rank00000.jsonl")[0]
    assert [(row["kind"], row["collector"], row["message"]) for row in rows] == [("error", "every", "ValueError: no")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"active": 0}, r"Triggers\(active=0\): must be an integer from 1 to 10000"),
        ({"warmup": -1}, r"Triggers\(warmup=-1\)"),
        ({"anomalies": "slow"}, r"must be a list, as in anomalies=\[SlowStep\(\)\]"),
        ({"anomalies": ["SlowStep"]}, "must be instances of Anomaly"),
    ],
)
def test_values_that_mean_nothing_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Triggers(**fields)


def test_one_look_without_a_request_is_one_call_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    real = os.access

    def access(path: Any, mode: int) -> bool:
        looked.append(path)
        return real(path, mode)

    with ranks(tmp_path) as (first, second):
        monkeypatch.setattr(os, "access", access)
        monkeypatch.setattr(os, "stat", pytest.fail)
        list(first.before_step(0))
        list(second.before_step(0))
        monkeypatch.undo()
    assert [Path(path).name for path in looked] == ["trigger.request.json", "trigger.plan.json"]
