"""The schedule is torch's schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprof import ConfigError, Schedule
from lightning_memprof.schedule import Action, plan_window

small = st.integers(0, 6)


@given(
    skip_first=small, wait=small, warmup=small, active=st.integers(1, 6), repeat=st.integers(0, 4),
    skip_first_wait=st.integers(0, 2), step=st.integers(0, 80),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_every_step_is_decided_as_torch_decides_it(step: int, **fields: Any) -> None:
    theirs = torch.profiler.schedule(**fields)(step)
    assert Schedule(**fields)(step).name == theirs.name


@given(
    skip_first=small, wait=small, warmup=small, active=st.integers(1, 6), repeat=st.integers(1, 3),
    skip_first_wait=st.integers(0, 1),
)  # fmt: skip
def test_a_planned_window_holds_exactly_the_steps_that_the_schedule_gives_it(**fields: Any) -> None:
    schedule = Schedule(**fields)
    first = next(step for step in range(200) if schedule(step) is not Action.NONE)
    window = plan_window(schedule, first, step=first + 1000, index=0)
    assert len(window.warmup) == fields["warmup"]
    assert len(window.active) == fields["active"]
    assert window.active[0] - 1000 == schedule.first_active
    assert schedule(window.active[-1] - 1000) is Action.RECORD_AND_SAVE


def test_the_table_of_the_documentation_holds() -> None:
    schedule = Schedule(skip_first=1, wait=1, warmup=1, active=2, repeat=2)
    named = [schedule(step).name for step in range(11)]
    record = ["RECORD", "RECORD_AND_SAVE"]
    assert named == ["NONE", "NONE", "WARMUP", *record, "NONE", "WARMUP", *record, "NONE", "NONE"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"active": 0}, "active=0"),
        ({"wait": -1}, "wait=-1"),
        ({"repeat": 1.5}, "repeat=1.5"),
        ({"anchor": "day"}, "anchor='day'"),
    ],
)
def test_a_value_that_cannot_record_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Schedule(**fields)  # type: ignore[arg-type]
