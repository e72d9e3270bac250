from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict

from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.capture.base import Collector, OnMark, Position, RunContext
from lightning_memprof.capture.session import Session
from lightning_memprof.schedule import Action, Point, Schedule, Window
from lightning_memprof.testing import FakeCollector
from recorded_rows import read_rows
from sessions import POINTS, context, drive, session

NONE, WARMUP, RECORD, SAVE = Action.NONE, Action.WARMUP, Action.RECORD, Action.RECORD_AND_SAVE


def scripted(*actions: Action) -> Callable[[int], Action]:
    """A function of the user's: these actions, and nothing afterwards."""
    return lambda step: actions[step] if step < len(actions) else NONE


def windows(run: RunContext) -> list[dict[str, Any]]:
    return [row for row in read_rows(run.sink.manifest.path)[0] if row["kind"] == "window" and row["event"] == "close"]


def overhead_of(made: Session) -> dict[str, Any]:
    overhead = made.facts().overhead
    assert overhead is not None
    return asdict(overhead)


def outcome(run: RunContext) -> list[tuple[list[int], bool, str | None]]:
    return [(row["steps"], row["truncated"], row["reason"]) for row in windows(run)]


def recorded(fake: FakeCollector) -> list[int]:
    return [mark.step for mark in fake.marks if mark.recorded and mark.point is Point.STEP_START]


@given(
    st.builds(
        Schedule,
        skip_first=st.integers(0, 3),
        wait=st.integers(0, 3),
        warmup=st.integers(0, 3),
        active=st.integers(1, 3),
        repeat=st.integers(0, 3),
        skip_first_wait=st.integers(0, 1),
    ),
    st.integers(0, 30),
)
def test_exactly_the_steps_that_the_schedule_asks_for_are_recorded(
    tmp_path_factory: pytest.TempPathFactory, schedule: Schedule, steps: int
) -> None:
    fake = FakeCollector()
    with context(tmp_path_factory.mktemp("run")) as run:
        with session(run, schedule, [fake]) as made:
            drive(made, range(steps))
        closed = windows(run)
    actions = [schedule(step) for step in range(steps)]
    assert recorded(fake) == [step for step, action in enumerate(actions) if action in (RECORD, SAVE)]
    assert [step for row in closed for step in row["steps"]] == recorded(fake)
    whole = actions.count(SAVE)
    assert [row["truncated"] for row in closed][:whole] == [False] * whole
    assert all(row["truncated"] for row in closed[whole:])
    assert sum(occasion == "enter" for occasion, _ in fake.calls) == len(closed)
    assert sum(occasion == "exit" for occasion, _ in fake.calls) == len(closed)


def test_marks_come_at_every_point_of_warmup_and_active_steps_and_nowhere_else(tmp_path: Path) -> None:
    fake = FakeCollector()
    with context(tmp_path) as run, session(run, Schedule(), [fake]) as made:
        drive(made, range(6))
    points = [Point.STEP_START, *POINTS, Point.STEP_END]
    assert [(mark.step, mark.point) for mark in fake.marks] == [(step, point) for step in (1, 2, 3) for point in points]
    assert [mark.time_ns for mark in fake.marks] == sorted(mark.time_ns for mark in fake.marks)


def test_the_plan_is_written_down_when_the_window_opens(tmp_path: Path) -> None:
    with context(tmp_path) as run, session(run, Schedule(), []) as made:
        drive(made, range(2))
        rows = read_rows(run.sink.manifest.path)[0]
    (row,) = [row for row in rows if row["kind"] == "window"]
    assert (row["event"], row["warmup_steps"], row["active_steps"]) == ("open", [1], [2, 3])


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        pytest.param([RECORD, RECORD], [([0, 1], False, None)], id="never saves, then nothing"),
        pytest.param(
            [RECORD, WARMUP, SAVE], [([0], False, None), ([2], False, None)], id="never saves, warms up again"
        ),
        pytest.param([WARMUP, WARMUP], [([], False, None)], id="only warms up"),
        pytest.param([SAVE, SAVE], [([0], False, None), ([1], False, None)], id="saves every step"),
        pytest.param([SAVE, RECORD, SAVE], [([0], False, None), ([1, 2], False, None)], id="one behind the other"),
        pytest.param([NONE], [], id="nothing"),
        pytest.param([NONE] * 4 + [RECORD, SAVE], [([4, 5], False, None)], id="until the last step"),
        pytest.param([RECORD] * 6, [([0, 1, 2, 3, 4, 5], True, "the run ended")], id="records for ever"),
    ],
)
def test_any_function_of_the_user_gives_whole_windows_unless_the_run_ends(
    tmp_path: Path, actions: list[Action], expected: list[tuple[list[int], bool, str | None]]
) -> None:
    with context(tmp_path) as run:
        with session(run, scripted(*actions), []) as made:
            drive(made, range(6))
        assert outcome(run) == expected


def test_a_function_is_asked_once_a_step_so_that_it_may_count(tmp_path: Path) -> None:
    asked: list[int] = []

    def counting(step: int) -> Action:
        asked.append(step)
        return Action.RECORD if len(asked) == 1 else Action.NONE

    with context(tmp_path) as run, session(run, counting, [FakeCollector()]) as made:
        drive(made, range(4))
    assert asked == [0, 1, 2, 3]
    assert outcome(run) == [([0], False, None)]


def test_a_new_epoch_cuts_a_window_that_counts_by_epochs(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        with session(run, Schedule(wait=1, warmup=0, active=2, anchor="epoch"), []) as made:
            for step, count in enumerate((0, 1, 0, 1, 2)):
                made.begin_step(Position(step, step, step // 2, count))
        assert outcome(run) == [([1], True, "a new epoch began"), ([3, 4], False, None)]


def test_the_reason_of_an_early_end_stands_in_the_window(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        with pytest.raises(RuntimeError), session(run, Schedule(wait=0, warmup=0, active=3), []) as made:
            drive(made, [0, 1], inside=fail_at(1))
        assert outcome(run) == [([0, 1], True, "RuntimeError: step 1")]


def fail_at(step: int) -> Callable[[int], None]:
    def inside(now: int) -> None:
        if now == step:
            msg = f"step {now}"
            raise RuntimeError(msg)

    return inside


def test_closing_twice_tells_and_writes_nothing_again(tmp_path: Path) -> None:
    fake = FakeCollector(follows=True)
    with context(tmp_path) as run:
        made = Session(run, Schedule(wait=0), [fake])
        made.open()
        drive(made, range(2))
        made.close(reason="first")
        told, rows = list(fake.calls), read_rows(run.sink.manifest.path)[0]
        made.close(reason="second")
        assert fake.calls == told
        assert read_rows(run.sink.manifest.path)[0] == rows
        assert made.facts().steps == 2


def test_closing_a_session_without_steps_is_harmless(tmp_path: Path) -> None:
    with context(tmp_path) as run, session(run, Schedule(), [FakeCollector(follows=True)]) as made:
        assert run.position is None
        assert run.window is None
    assert made.facts().steps == 0


def test_followers_hear_of_every_step_with_phases_that_sum_to_it(tmp_path: Path) -> None:
    fake = FakeCollector(follows=True)
    with context(tmp_path) as run, session(run, Schedule(), [fake]) as made:
        forward = made.clock.slot("forward", PHASES.index("forward"))
        drive(made, range(5), lambda _: made.clock.enter(forward))
    assert [record.step for record in fake.steps] == [0, 1, 2, 3, 4]
    assert [record.window for record in fake.steps] == [None, 0, 0, 0, None]
    for record in fake.steps:
        assert sum(record.phases_ns) == record.duration_ns > 0
        assert record.phases_ns[PHASES.index("forward")] > 0
    for record, after in zip(fake.steps, fake.steps[1:], strict=False):
        assert record.start_ns + record.duration_ns <= after.start_ns
    assert [occasion for occasion, _ in fake.calls if occasion in ("follow", "unfollow")] == ["follow", "unfollow"]


def test_opening_and_saving_a_window_is_not_time_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 1 µs between two readings, and what the slow collector takes.
    now = itertools.count(step=1_000)
    slept = 0

    def reading() -> int:
        return next(now) + slept

    monkeypatch.setattr(time, "perf_counter_ns", reading)
    monkeypatch.setattr("lightning_memprof.capture.clock.perf_counter_ns", reading)

    class Slow(FakeCollector):
        def _call(self, occasion: Any, what: Any) -> None:
            nonlocal slept
            super()._call(occasion, what)
            if occasion in ("enter", "exit"):
                slept += 300_000_000

    fake, slow = FakeCollector(follows=True), Slow("slow")
    with context(tmp_path) as run, session(run, Schedule(), [fake, slow]) as made:
        drive(made, range(6))
        pauses = [row["ns"] for row in read_rows(run.sink.manifest.path)[0] if row["kind"] == "pause"]
    assert max(record.duration_ns for record in fake.steps) < 300_000_000
    overhead = overhead_of(made)
    assert overhead["windows_ns"] >= 600_000_000
    assert overhead["collectors_ns"]["slow"] >= 600_000_000
    assert overhead["collectors_ns"]["fake"] < 300_000_000
    assert 0 < overhead["pulse_ns"] < 300_000_000
    assert len(pauses) == 2
    assert 600_000_000 <= sum(pauses) <= overhead["windows_ns"]


def test_time_that_a_collector_charges_is_not_the_pulses_also_after_the_last_step(tmp_path: Path) -> None:
    with context(tmp_path) as run:

        class Reads(FakeCollector):
            def _call(self, occasion: Any, what: Any) -> None:
                super()._call(occasion, what)
                if occasion == "unfollow":
                    run.charge("reads", 60_000_000_000)

        with session(run, scripted(), [Reads("reads", follows=True)]) as made:
            drive(made, range(5))
        overhead = overhead_of(made)
    assert overhead["collectors_ns"] == {"reads": 60_000_000_000}
    assert overhead["windows_ns"] == 60_000_000_000
    assert overhead["pulse_ns"] > 0


def test_the_cpu_time_of_the_pulse_is_that_of_some_steps_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1 µs between two readings.
    readings = itertools.count(step=1_000)
    monkeypatch.setattr(time, "thread_time_ns", lambda: next(readings))
    with context(tmp_path) as run, session(run, scripted(), [FakeCollector(follows=True)]) as made:
        drive(made, range(1_000))
    overhead = overhead_of(made)
    assert overhead["pulse_cpu_ns"] == 1_000 * 1_000
    assert next(readings) < 2 * 90 * 1_000
    assert overhead["pulse_ns"] > 0


def test_outside_of_windows_only_the_pulse_costs_anything(tmp_path: Path) -> None:
    with context(tmp_path) as run, session(run, scripted(), [FakeCollector(follows=True)]) as made:
        drive(made, range(5))
    assert overhead_of(made)["windows_ns"] == 0
    assert overhead_of(made)["collectors_ns"] == {}


@pytest.mark.parametrize("occasion", ["follow", "step", "unfollow"])
def test_a_follower_that_fails_is_reported_once_and_the_others_go_on(tmp_path: Path, occasion: Any) -> None:
    faulty = FakeCollector("faulty", follows=True, fails={occasion: ValueError("no")})
    other = FakeCollector("other", follows=True)
    with context(tmp_path) as run:
        with session(run, Schedule(), [faulty, other]) as made:
            drive(made, range(5))
        errors = [row for row in read_rows(run.sink.manifest.path)[0] if row["kind"] == "error"]
    where = {"follow": "enter", "step": "mark", "unfollow": "exit"}[occasion]
    assert [(row["collector"], row["where"], row["message"]) for row in errors] == [("faulty", where, "ValueError: no")]
    assert len(other.steps) == 5
    assert len(faulty.steps) == {"follow": 0, "step": 1, "unfollow": 5}[occasion]
    assert [told for told, _ in faulty.calls].count("unfollow") == (occasion != "follow")


def test_the_present_step_and_window_can_be_asked_for(tmp_path: Path) -> None:
    with context(tmp_path) as run, session(run, Schedule(wait=0), []) as made:
        drive(made, [0])
        assert run.position == Position(0, 0, 0, 0)
        assert run.window == 0
    assert run.position is None


def test_marks_between_steps_are_heard_by_nobody(tmp_path: Path) -> None:
    fake = FakeCollector()
    with context(tmp_path) as run, session(run, Schedule(), [fake]) as made:
        made.mark(Point.BATCH_START)
        drive(made, range(6))
        made.close()
        made.mark(Point.BATCH_END)
    assert {mark.step for mark in fake.marks} == {1, 2, 3}


def test_the_time_of_windows_holds_that_of_their_collectors(tmp_path: Path) -> None:
    class Slow(Collector):
        name: ClassVar[str] = "slow"

        @contextmanager
        def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
            yield lambda _: time.sleep(0.002)

    # Cut short by the end of the run, whose last mark counts too.
    with context(tmp_path) as run, session(run, Schedule(wait=0, warmup=0, active=9), [Slow()]) as made:
        drive(made, range(2))
    overhead = overhead_of(made)
    assert overhead["windows_ns"] >= sum(overhead["collectors_ns"].values()) > 2 * len(POINTS) * 2_000_000
