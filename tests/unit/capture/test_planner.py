from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_memprof.capture.base import Position, StepRecord
from lightning_memprof.capture.planner import WindowPlanner, WindowRequest
from lightning_memprof.capture.session import Session
from lightning_memprof.schedule import Action, Point, Schedule
from lightning_memprof.testing import FakeCollector
from recorded_rows import read_rows
from sessions import POINTS, context

NONE, WARMUP, RECORD, SAVE = Action.NONE, Action.WARMUP, Action.RECORD, Action.RECORD_AND_SAVE
demands = st.builds(
    WindowRequest, cause=st.just("a test"), warmup=st.integers(0, 2), active=st.integers(1, 3),
    step=st.none() | st.integers(0, 25),
)  # fmt: skip
schedules = st.builds(
    Schedule, wait=st.integers(0, 4), warmup=st.integers(0, 2), active=st.integers(1, 3), repeat=st.integers(1, 2)
)


class Wanted:
    """Wishes that a test has, by the step at which they are told."""

    due_ns = 0
    watched = (None,)

    def __init__(self, *wanted: tuple[int, WindowRequest]) -> None:
        self.wanted = wanted
        self.records: list[StepRecord] = []

    def before_step(self, step: int) -> list[WindowRequest]:
        return [demand for told, demand in self.wanted if told == step]

    def after_step(self, record: StepRecord) -> None:
        self.records.append(record)


def steps_of(tmp_path: Path, schedule: Any, wanted: Any, positions: list[Position]) -> tuple[Any, FakeCollector]:
    fake = FakeCollector()
    with context(tmp_path) as run:
        made = Session(run, schedule, [fake], requests=wanted)
        made.open()
        for position in positions:
            made.begin_step(position)
            for point in POINTS:
                made.mark(point)
        made.close()
        return read_rows(run.sink.manifest.path)[0], fake


def closed(rows: Any) -> list[tuple[list[int], bool]]:
    return [(row["steps"], row["truncated"]) for row in rows if row.get("event") == "close"]


def fit(steps: int, start: int = 0) -> list[Position]:
    return [Position(step, step, 0, step - start) for step in range(start, start + steps)]


@given(schedules, st.lists(st.tuples(st.integers(0, 25), demands), max_size=3))
def test_every_scheduled_step_is_recorded_and_every_wanted_window_is_whole(
    schedule: Schedule, wanted: list[tuple[int, WindowRequest]]
) -> None:
    planner, opened, actions = WindowPlanner(schedule), [], []
    for position in fit(80):
        for told, demand in wanted:
            if told == position.step:
                planner.request(demand)
        turn = planner.turn(position)
        actions.append(turn.action)
        if turn.request is not None:
            opened.append((position.step, turn.request))
    assert all(actions[step] in (RECORD, SAVE) for step in range(80) if schedule(step) in (RECORD, SAVE)
               and not any(first <= step < first + window.warmup for first, window in opened))  # fmt: skip
    assert sorted(map(repr, (window for _, window in opened))) == sorted(repr(window) for _, window in wanted)
    assert not planner.pending
    for first, window in opened:
        whole = [WARMUP] * window.warmup + [RECORD] * (window.active - 1) + [SAVE]
        assert actions[first : first + len(whole)] == whole
        assert window.step is None or first >= window.step


def test_a_wanted_window_has_a_plan_its_warmup_and_a_note_that_says_why(tmp_path: Path) -> None:
    wanted = Wanted((4, WindowRequest("somebody asked", 1, 2, 6)))
    rows, fake = steps_of(tmp_path, Schedule(active=1), wanted, fit(12))
    assert closed(rows) == [([2], False), ([7, 8], False)]
    opened = [row for row in rows if row.get("event") == "open"][1]
    assert (opened["warmup_steps"], opened["active_steps"]) == ([6], [7, 8])
    (note,) = [row for row in rows if row["kind"] == "note"]
    assert note["message"] == "window 1 was requested for steps 7–8: somebody asked"
    warm = [mark for mark in fake.marks if mark.step == 6]
    assert len(warm) == len(POINTS) + 2
    assert not any(mark.recorded for mark in warm)


def test_a_request_for_holders_without_their_collector_is_noted(tmp_path: Path) -> None:
    wanted = Wanted((4, WindowRequest("somebody", 1, 2, 6, leaks=True)))
    rows, _ = steps_of(tmp_path, Schedule(active=1), wanted, fit(12))
    notes = [row["message"] for row in rows if row["kind"] == "note"]
    assert notes[1:] == ["the request asks for holders of growing memory: add the collector Holders to the callback"]


def test_a_wanted_window_waits_for_the_schedules_and_the_schedules_begins_behind_a_wanted_one(tmp_path: Path) -> None:
    wanted = Wanted((3, WindowRequest("first", 0, 1)), (7, WindowRequest("second", 0, 4)))
    rows, _ = steps_of(tmp_path, Schedule(wait=2, warmup=0, active=3, repeat=3), wanted, fit(20))
    # Scheduled are 2-4, 7-9 and 12-14.
    assert closed(rows) == [([2, 3, 4], False), ([5], False), ([7, 8, 9], False), ([10, 11, 12, 13], False),
                            ([14], False)]  # fmt: skip


def test_a_new_epoch_does_not_cut_a_wanted_window(tmp_path: Path) -> None:
    positions = [Position(step, step, step // 5, step % 5) for step in range(10)]
    rows, _ = steps_of(tmp_path, Schedule(steps=(9,), anchor="epoch"), Wanted((3, WindowRequest("x", 0, 4))), positions)
    assert closed(rows) == [([3, 4, 5, 6], False)]


def test_a_users_function_that_leaves_a_window_without_saving_hands_over_to_the_wanted_one(tmp_path: Path) -> None:
    rows, _ = steps_of(
        tmp_path, lambda step: RECORD if step < 3 else NONE, Wanted((1, WindowRequest("x", 0, 2))), fit(8)
    )
    assert closed(rows) == [([0, 1, 2], False), ([3, 4], False)]


def test_the_end_of_the_run_cuts_a_wanted_window_and_names_what_never_opened(tmp_path: Path) -> None:
    wanted = Wanted((2, WindowRequest("one", 0, 9)), (3, WindowRequest("two", 0, 1)))
    rows, _ = steps_of(tmp_path, lambda _: NONE, wanted, fit(5))
    assert closed(rows) == [([2, 3, 4], True)]
    assert rows[-1]["message"] == "the run ended before a window could open: two"


def test_a_run_that_begins_inside_a_window_does_not_resume_it(tmp_path: Path) -> None:
    def begin_at(first: int) -> list[tuple[list[int], bool]]:
        schedule = Schedule(steps=(6, 12), active=3)
        positions = [Position(step, step, 0, step) for step in range(first, 16)]
        return closed(steps_of(tmp_path / str(first), schedule, Wanted(), positions)[0])

    assert begin_at(5) == begin_at(6) == [([6, 7, 8], False), ([12, 13, 14], False)]
    assert begin_at(7) == begin_at(8) == begin_at(9) == [([12, 13, 14], False)]


def test_a_step_that_holds_a_validation_is_told_as_unusual_and_only_that_one(tmp_path: Path) -> None:
    wanted: Any = Wanted()
    with context(tmp_path) as run:
        made = Session(run, lambda _: NONE, [], requests=wanted)
        made.open()
        for position in fit(3):
            made.begin_step(position)
            if position.step == 1:
                made.unusual()
            made.mark(Point.BATCH_END)
        made.close()
    assert [record.usual for record in wanted.records] == [True, False, True]


def test_requests_are_asked_for_when_they_are_due_and_not_before(tmp_path: Path) -> None:
    wanted: Any = Wanted((1, WindowRequest("too early", 0, 1)), (3, WindowRequest("due", 0, 1)))
    with context(tmp_path) as run:
        made = Session(run, lambda _: NONE, [], requests=wanted)
        for position in fit(5):
            wanted.due_ns = sys.maxsize if position.step < 3 else 0
            made.begin_step(position)
        made.close()
        assert closed(read_rows(run.sink.manifest.path)[0]) == [([3], False)]
