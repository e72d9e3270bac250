from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprof import ConfigError, Schedule, StageSchedules
from lightning_memprof.schedule import Action, no_window, plan_window


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 3), st.integers(1, 4))
def test_listed_steps_are_recorded_each_with_its_warmup_in_whole_windows(
    steps: list[int], warmup: int, active: int
) -> None:
    schedule = Schedule(steps=tuple(steps), warmup=warmup, active=active)
    actions = [schedule(step) for step in range(60)]
    recorded = {step for step, action in enumerate(actions) if action in (Action.RECORD, Action.RECORD_AND_SAVE)}
    assert set(steps) <= recorded
    assert recorded == {begin + ahead for begin in schedule.steps for ahead in range(active)}
    assert actions.count(Action.RECORD_AND_SAVE) == len(schedule.steps) == schedule.windows
    warm = {begin - before for begin in schedule.steps for before in range(1, warmup + 1) if begin >= before}
    assert {step for step, action in enumerate(actions) if action is Action.WARMUP} == warm - recorded
    assert schedule.first_active == min(steps)


def test_a_listed_window_is_planned_as_any_other() -> None:
    window = plan_window(Schedule(steps=(100, 2000), active=3), 99, step=99, index=0)
    assert (window.warmup, window.active) == ((99,), (100, 101, 102))


def test_a_list_and_a_tuple_make_equal_hashable_schedules() -> None:
    listed: Any = [2000, 100, 100]
    assert Schedule(steps=listed) == Schedule(steps=(100, 2000))
    assert len({Schedule(steps=listed), Schedule(steps=(100, 2000))}) == 1


@pytest.mark.parametrize("steps", [(-1,), ("1",), (1.5,), (True,), 7])
def test_what_is_no_step_is_refused(steps: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be a list of step numbers from 0, as in steps=\[100, 2000\]"):
        Schedule(steps=steps)


def test_listed_steps_and_a_cycle_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave out wait, repeat"):
        Schedule(steps=(3,), wait=5, repeat=2)


def test_each_stage_gives_its_schedule_and_none_records_nothing() -> None:
    stages = StageSchedules(fit=Schedule(wait=3), test=None)
    assert stages.of("fit") == Schedule(wait=3)
    assert stages.of("validate") == Schedule()
    assert stages.of("test") is no_window
    assert {no_window(step) for step in range(100)} == {Action.NONE}


@pytest.mark.parametrize("make", [lambda: StageSchedules(fit=3), lambda: StageSchedules(predict=lambda _: Action.NONE)])  # type: ignore[arg-type]
def test_a_stage_takes_a_schedule_or_none(make: Callable[[], StageSchedules]) -> None:
    with pytest.raises(ConfigError, match="must be a Schedule, or None for no window in that stage"):
        make()
