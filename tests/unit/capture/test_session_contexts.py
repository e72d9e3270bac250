from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof.capture.base import RunContext
from lightning_memprof.capture.collectors.host import HostMemory
from lightning_memprof.schedule import Point, Schedule
from lightning_memprof.testing import FakeCollector
from recorded_rows import read_rows, read_series
from sessions import context, drive, session

TWO_WINDOWS = Schedule(wait=0, warmup=0, active=2, repeat=2)


def rows(run: RunContext, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(run.sink.manifest.path)[0] if row["kind"] == kind]


def occasions(fake: FakeCollector) -> list[str]:
    return [occasion for occasion, _ in fake.calls]


@pytest.mark.parametrize("occasion", ["enter", "mark", "exit"])
def test_a_collector_that_fails_is_switched_off_and_the_others_are_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, occasion: Any
) -> None:
    error = ValueError("no")
    faulty = FakeCollector("faulty", fails={occasion: error})
    other = FakeCollector("other")
    with context(tmp_path) as run, caplog.at_level(logging.WARNING):
        with session(run, TWO_WINDOWS, [faulty, HostMemory(), other]) as made:
            drive(made, range(5))
        (row,) = rows(run, "error")
        closed = rows(run, "window")[1::2]
    assert (row["collector"], row["where"], row["window"], row["message"]) == ("faulty", occasion, 0, "ValueError: no")
    assert "in _call" in row["traceback"]
    assert [window["truncated"] for window in closed] == [False, False]
    assert len(other.marks) == 4 * 8
    for window in (0, 1):
        assert len(read_series(tmp_path / f"memprofiler/window00{window}/rank00000.host.jsonl")) == 16
    assert occasions(faulty).count("enter") == 1
    assert len(faulty.marks) == {"enter": 0, "mark": 1, "exit": 16}[occasion]
    (warning,) = caplog.records
    assert warning.getMessage() == f"collector faulty failed on {occasion} and is disabled; training continues"
    assert warning.exc_info is not None
    assert warning.exc_info[1] is error


def test_a_collector_that_fails_in_a_mark_is_left_at_once_with_its_error(tmp_path: Path) -> None:
    error = ValueError("no")
    faulty = FakeCollector(fails={"mark": error})
    with context(tmp_path) as run, session(run, TWO_WINDOWS, [faulty]) as made:
        drive(made, [0])
        assert occasions(faulty) == ["enter", "mark", "exit"]
        assert faulty.calls[-1][1] is error


def test_a_way_out_that_fails_as_well_is_written_down_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FakeCollector(fails={"mark": ValueError("mark"), "exit": OSError("exit")})
    with context(tmp_path) as run:
        with session(run, TWO_WINDOWS, [faulty]) as made:
            drive(made, range(4))
        found = {(row["where"], row["message"]) for row in rows(run, "error")}
    assert found == {("mark", "ValueError: mark"), ("exit", "OSError: exit")}
    assert len(caplog.records) == 1


def test_on_request_the_failure_reaches_the_test(tmp_path: Path) -> None:
    error = ValueError("no")
    with context(tmp_path, on_error="raise") as run:
        made = session(run, TWO_WINDOWS, [FakeCollector(fails={"enter": error})])
        with pytest.raises(ValueError) as caught, made as opened:
            drive(opened, [0])
        assert caught.value is error
        assert len(rows(run, "error")) == 1


def test_ctrl_c_in_a_collector_is_the_users_and_no_fault(tmp_path: Path) -> None:
    interrupt = KeyboardInterrupt()

    class Interrupted(FakeCollector):
        def _call(self, occasion: Any, what: Any) -> None:
            super()._call(occasion, what)
            if occasion == "mark" and len(self.marks) == 1:
                raise interrupt

    other = FakeCollector("other")
    with context(tmp_path) as run:
        made = session(run, TWO_WINDOWS, [Interrupted(), other])
        with pytest.raises(KeyboardInterrupt) as caught, made as opened:
            drive(opened, [0])
        assert caught.value is interrupt
        assert rows(run, "error") == []
        assert occasions(other)[-1] == "exit"


def test_a_window_that_cannot_be_recorded_now_is_nobodys_fault(tmp_path: Path) -> None:
    fake = FakeCollector(skip_reason="the tool is in use")
    with context(tmp_path) as run:
        with session(run, TWO_WINDOWS, [fake]) as made:
            drive(made, range(5))
        assert rows(run, "error") == []
        found = [(row["collector"], row["window"], row["reason"]) for row in rows(run, "unavailable")]
    assert found == [("fake", 0, "the tool is in use"), ("fake", 1, "the tool is in use")]
    assert occasions(fake) == ["enter", "enter"]


def test_collectors_are_told_in_order_and_of_the_end_of_a_step_in_reverse(tmp_path: Path) -> None:
    journal: list[Any] = []
    fakes = [FakeCollector(name, journal=journal) for name in "ab"]
    with context(tmp_path) as run, session(run, Schedule(wait=0, warmup=0, active=1), fakes) as made:
        drive(made, range(2))

    def order(occasion: str, point: Point | None = None) -> str:
        return "".join(
            name for name, heard, what in journal if heard == occasion and (point is None or what.point is point)
        )

    assert order("enter") == "ab"
    assert order("mark", Point.STEP_START) == "ab"
    assert order("mark", Point.BATCH_START) == "ab"
    assert order("mark", Point.STEP_END) == "ba"
    assert order("exit") == "ba"


def test_work_after_the_window_that_fails_is_the_collectors_fault(tmp_path: Path) -> None:
    class Late(FakeCollector):
        def __init__(self, run: RunContext) -> None:
            super().__init__("late")
            self.run = run

        def _call(self, occasion: Any, what: Any) -> None:
            if occasion == "enter":
                self.run.in_background(lambda: 1 // 0, collector="late", window=what)  # type: ignore[arg-type]

    with context(tmp_path) as run:
        with session(run, TWO_WINDOWS, [Late(run)]) as made:
            drive(made, [0, 1])
            run.sink.drain()
            drive(made, [2, 3])
        (row,) = rows(run, "error")
    assert (row["where"], row["window"]) == ("write", 0)
    assert row["message"].startswith("ZeroDivisionError")
