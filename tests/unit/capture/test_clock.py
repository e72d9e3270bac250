from __future__ import annotations

import gc
import itertools
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fake_devices import FakeCuda, FakeTimer
from lightning_memprof.artifacts.series import COMPILATION, GC_PAUSE, PHASES, PULSE_COLUMNS, UNTRACKED
from lightning_memprof.capture.base import StepRecord, unix_offset_ns
from lightning_memprof.capture.clock import (
    LEAVE,
    AcceleratorTimer,
    LoggedTimes,
    StepClock,
    compilations,
    device_timer,
    gc_pauses,
)
from lightning_memprof.capture.collectors.pulse import device_columns

FORWARD, BACKWARD, CALLBACKS, OTHER = (PHASES.index(name) for name in ("forward", "backward", "callbacks", "other"))
HOST_ONLY = (CALLBACKS, OTHER)
DEVICE_COLUMNS = tuple(name for name in PULSE_COLUMNS if name.startswith("device_") and name.endswith("_ns"))

# How long it takes, and the phase to enter then; None leaves.
moves = st.lists(st.tuples(st.integers(0, 10**12), st.none() | st.integers(0, len(PHASES) - 1)), max_size=40)
Moves = list[tuple[int, int | None]]


def exclusive_times(taken: Moves, *, device: bool) -> list[int]:
    """What each phase took by itself; on the device's clock host phases are the phase around them."""
    spent = [0] * len(PHASES)
    stack = [OTHER]
    for ns, phase in taken:
        seen = [inner for inner in stack if not device or inner not in HOST_ONLY]
        spent[seen[-1] if seen else OTHER] += ns
        if phase is not None:
            stack.append(phase)
        elif len(stack) > 1:
            stack.pop()
    return spent


def replay(taken: Moves, timer: FakeTimer | None = None) -> tuple[int, StepRecord]:
    """Run the moves on a clock whose time is the test's; give the duration that it should say, too."""
    now = SimpleNamespace(ns=10**15)
    with mock.patch("lightning_memprof.capture.clock.perf_counter_ns", side_effect=lambda: now.ns):
        clock = StepClock(timer)
        clock.start()
        started = now.ns
        for ns, phase in taken:
            now.ns += ns
            if timer is not None:
                timer.work(ns)
            if phase is None:
                clock.leave()
            else:
                enter(clock, phase)
        record = record_of(clock)
    return now.ns - started, record


def enter(clock: StepClock, phase: int) -> None:
    """Begin the action of that phase."""
    clock.enter(clock.slot(PHASES[phase], phase))


def record_of(clock: StepClock) -> StepRecord:
    """End the step of a clock."""
    end_ns, times, moments = clock.stop()
    return StepRecord(0, 0, 0, None, clock.start_ns, end_ns - clock.start_ns, times, moments)


@given(moves)
def test_phases_are_exclusive_times_and_sum_exactly_to_the_step(taken: Moves) -> None:
    duration, record = replay(taken)
    assert record.duration_ns == duration
    assert sum(record.phases_ns) == duration
    assert list(record.phases_ns) == exclusive_times(taken, device=False)
    assert record.moments is None


@given(moves)
def test_on_the_device_the_columns_are_exclusive_times_and_sum_to_its_step(taken: Moves) -> None:
    timer = FakeTimer()
    duration, record = replay(taken, timer)
    timer.catch_up()
    columns = dict(zip(DEVICE_COLUMNS, device_columns(record, timer), strict=True))
    assert columns["device_duration_ns"] == duration
    assert columns.pop("device_callbacks_ns") is None
    assert sum(ns or 0 for name, ns in columns.items() if name != "device_duration_ns") == duration
    expected = exclusive_times(taken, device=True)
    assert {name: columns[f"device_{name}_ns"] for name in PHASES if name != "callbacks"} == {
        name: expected[index] for index, name in enumerate(PHASES) if name != "callbacks"
    }
    assert timer.held == []


@pytest.mark.slow
@given(st.lists(moves, min_size=1, max_size=6))
def test_many_steps_computed_at_once_have_the_times_of_each(steps: list[Moves]) -> None:
    # Twice: steps with the same order of actions are computed together, with other lengths.
    steps += [[(3 * ns + 1, phase) for ns, phase in taken] for taken in steps]
    clock = StepClock(None)
    now = SimpleNamespace(ns=10**15)
    records = []
    with mock.patch("lightning_memprof.capture.clock.perf_counter_ns", side_effect=lambda: now.ns):
        for taken in steps:
            clock.start()
            for index, (ns, phase) in enumerate(taken):
                now.ns += ns
                if index % 3 == 2:
                    now.ns += 17
                    clock.leave_out(17)
                if phase is None:
                    clock.leave()
                else:
                    enter(clock, phase)
            records.append(record_of(clock))
    LoggedTimes.compute(record.times for record in records)
    assert [list(record.phases_ns) for record in records] == [exclusive_times(taken, device=False) for taken in steps]
    assert [sum(record.times.actions[0]) for record in records] == [record.duration_ns for record in records]
    entered = [1 + sum(phase is not None for _, phase in taken) for taken in steps]
    assert [sum(record.times.actions[1]) for record in records] == entered


def test_steps_that_are_all_different_keep_a_bounded_number_of_courses() -> None:
    clock = StepClock(None)
    records = []
    for step in range(600):
        clock.start()
        for bit in range(10):
            enter(clock, FORWARD if step >> bit & 1 else BACKWARD)
            clock.leave()
        records.append(record_of(clock))
    LoggedTimes.compute(record.times for record in records)
    assert all(sum(record.phases_ns) == record.duration_ns for record in records)
    assert len(clock.courses) <= 256


def test_the_real_clock_sums_exactly_too() -> None:
    clock = StepClock(None)
    clock.start()
    for phase in (FORWARD, BACKWARD, CALLBACKS):
        enter(clock, phase)
        sum(range(1000))
        clock.leave()
    record = record_of(clock)
    assert sum(record.phases_ns) == record.duration_ns
    assert all(record.phases_ns[phase] > 0 for phase in (FORWARD, BACKWARD, CALLBACKS))


def test_leaving_without_having_entered_changes_nothing() -> None:
    duration, record = replay([(5, None), (7, None), (1, FORWARD), (2, None), (3, None)])
    assert record.phases_ns[FORWARD] == 2
    assert sum(record.phases_ns) == duration


def test_a_phase_that_was_left_open_does_not_reach_into_the_next_step() -> None:
    clock = StepClock(None)
    clock.start()
    enter(clock, FORWARD)
    clock.stop()
    clock.start()
    record = record_of(clock)
    assert record.phases_ns[FORWARD] == 0
    assert record.phases_ns[OTHER] == record.duration_ns


def actions_of(clock: StepClock, record: StepRecord) -> dict[tuple[str, str], tuple[int, int]]:
    """Self time and entries of the actions that ran, by name and phase."""
    spent, entries = record.times.actions
    named = [(action, PHASES[phase]) for action, phase in clock.actions]
    return {name: (ns, count) for name, ns, count in zip(named, spent, entries, strict=False) if count}


def test_each_action_has_its_self_time_and_count_and_they_sum_to_the_step() -> None:
    now = SimpleNamespace(ns=100)
    with mock.patch("lightning_memprof.capture.clock.perf_counter_ns", side_effect=lambda: now.ns):
        clock = StepClock(None)
        forward, callback = clock.slot("forward", FORWARD), clock.slot("Slow.on_after_backward", CALLBACKS)
        clock.start()
        for ns, move in (
            (1, lambda: clock.enter(forward)),
            (20, lambda: clock.enter(callback)),
            (300, clock.leave),
            (20, lambda: clock.enter(callback)),
            (300, clock.leave),
            (20, clock.leave),
        ):
            now.ns += ns
            move()
        record = record_of(clock)
    assert actions_of(clock, record) == {
        (UNTRACKED, "other"): (1, 1),
        ("forward", "forward"): (60, 1),
        ("Slow.on_after_backward", "callbacks"): (600, 2),
    }
    assert sum(record.times.actions[0]) == record.duration_ns == 661


def test_an_action_without_a_phase_of_its_own_counts_for_the_one_around_it() -> None:
    clock = StepClock(None)
    clock.start()
    clock.enter_within("hook")
    clock.leave()
    enter(clock, FORWARD)
    clock.enter_within("hook")
    assert clock.phase() == "forward"
    clock.leave()
    clock.leave()
    assert (clock.phase(), clock.phase(raised=True)) == ("other", "forward")
    enter(clock, FORWARD)
    clock.leave()
    clock.interrupt("gc_pause", 0)
    clock.enter(clock.slot("[MemProfiler]", OTHER))
    clock.leave()
    assert (clock.phase(), clock.phase(raised=True)) == ("other", "forward")
    assert {("hook", "other"), ("hook", "forward")} <= actions_of(clock, record_of(clock)).keys()


def test_an_action_in_the_same_phase_costs_no_moment_on_the_device() -> None:
    timer = FakeTimer()
    clock = StepClock(timer)
    clock.start()
    enter(clock, FORWARD)
    clock.enter_within("hook")
    clock.leave()
    clock.leave()
    assert [phase for phase, _, _ in record_of(clock).moments or []] == [OTHER, FORWARD, OTHER, OTHER]


def test_an_action_that_is_new_in_a_step_is_counted_in_it() -> None:
    clock = StepClock(None)
    clock.start()
    clock.stop()
    clock.slot("between two steps", FORWARD)
    clock.start()
    enter(clock, BACKWARD)
    clock.leave()
    record = record_of(clock)
    assert ("backward", "backward") in actions_of(clock, record)
    assert sum(record.times.actions[0]) == record.duration_ns


def test_a_gc_pause_is_an_action_in_the_phase_that_it_interrupts() -> None:
    clock = StepClock(None)
    with gc_pauses(clock):
        clock.start()
        enter(clock, FORWARD)
        gc.collect()
        clock.leave()
        record = record_of(clock)
    taken = actions_of(clock, record)
    pause_ns, count = taken[GC_PAUSE, "forward"]
    assert count >= 1
    assert pause_ns > 10 * taken["forward", "forward"][0]
    assert sum(record.times.actions[0]) == sum(record.phases_ns) == record.duration_ns
    assert record.phases_ns[FORWARD] >= pause_ns


def test_a_gc_pause_between_two_steps_or_of_another_thread_is_in_no_step() -> None:
    clock = StepClock(None)
    before = list(gc.callbacks)
    with gc_pauses(clock):
        clock.start()
        clock.stop()
        gc.collect()
        gc.disable()
        clock.start()
        collecting = threading.Thread(target=gc.collect)
        collecting.start()
        collecting.join()
        record = record_of(clock)
        gc.enable()
    assert not any(action == GC_PAUSE for action, _ in actions_of(clock, record))
    assert sum(record.times.actions[0]) == record.duration_ns
    assert gc.callbacks == before


def test_phases_of_callbacks_cost_no_moment_on_the_device() -> None:
    timer = FakeTimer()
    _, record = replay([(1, CALLBACKS), (1, None), (1, OTHER), (1, None)], timer)
    assert record.moments is not None
    assert len(record.moments) == 2


def test_a_step_of_the_device_ends_where_its_work_was_queued_and_not_where_the_host_was() -> None:
    timer = FakeTimer()
    clock = StepClock(timer)
    clock.start()
    enter(clock, FORWARD)
    timer.work(10**12)
    clock.leave()
    record = record_of(clock)
    timer.catch_up()
    assert device_columns(record, timer)[0] == 10**12
    assert record.duration_ns < 10**12


def test_excluded_time_is_in_no_phase_of_either_clock() -> None:
    timer = FakeTimer()
    now = SimpleNamespace(ns=0)
    with mock.patch("lightning_memprof.capture.clock.perf_counter_ns", side_effect=lambda: now.ns):
        clock = StepClock(timer)
        clock.start()
        enter(clock, BACKWARD)
        for ns in (7, 1000, 500):
            now.ns += ns
            timer.work(ns)
        clock.leave_out(1000)
        clock.leave_out(500)
        clock.leave()
        record = record_of(clock)
    timer.catch_up()
    columns = dict(zip(DEVICE_COLUMNS, device_columns(record, timer), strict=True))
    assert record.duration_ns == record.phases_ns[BACKWARD] == 7
    assert columns["device_duration_ns"] == columns["device_backward_ns"] == 7


def test_a_cpu_has_no_clock_of_its_own() -> None:
    assert device_timer(torch.device("cpu")) is None
    assert device_timer(torch.device("meta")) is None


def test_events_are_made_once_and_used_again() -> None:
    with FakeCuda().installed() as cuda:
        timer = device_timer(torch.device("cuda", 0))
        assert isinstance(timer, AcceleratorTimer)
        for _ in range(5):
            start = timer.record()
            cuda.timer.work(1_500_000)
            end = timer.record()
            assert not timer.reached(end)
            cuda.timer.catch_up()
            assert timer.reached(end)
            assert timer.elapsed_ns(start, end) == 1_500_000
            timer.release(start)
            timer.release(end)
    assert cuda.events_made == 2


def test_a_reading_with_the_offset_of_a_run_is_the_systems_time() -> None:
    began, before = time.perf_counter_ns(), time.time_ns()
    offset = unix_offset_ns()
    after, ended = time.time_ns(), time.perf_counter_ns()
    assert before - ended <= offset <= after - began


def test_a_code_in_the_log_is_the_same_as_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(0, 10)
    monkeypatch.setattr("lightning_memprof.capture.clock.perf_counter_ns", lambda: next(now))
    clock = StepClock(None)
    slot = clock.slot("forward", FORWARD)
    clock.start()
    clock.log((slot, 5))
    clock.log((LEAVE, 12))
    clock.log((slot, next(now)))
    clock.log((LEAVE, next(now)))
    record = record_of(clock)
    assert actions_of(clock, record) == {(UNTRACKED, "other"): (13, 1), ("forward", "forward"): (17, 2)}


def test_short_steps_share_device_timestamps_which_cost_as_much_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr("lightning_memprof.capture.clock.perf_counter_ns", lambda: now)
    timer = FakeTimer()
    clock = StepClock(timer)
    slot = clock.slot("forward", FORWARD)
    timed = []
    for duration_ns in (10**6,) * 9 + (10**7,) * 3:
        clock.start()
        clock.enter(slot)
        timer.work(1000)
        clock.leave()
        now += duration_ns
        record = record_of(clock)
        timed.append(bool(record.moments))
        timer.catch_up()
        if record.moments:
            assert device_columns(record, timer)[0] == 1000
    assert timed == [True, False, False, False, True, False, False, False, True, False, True, True]
    assert not timer.held


def test_times_that_are_read_later_are_those_of_their_step() -> None:
    clock = StepClock(None)
    records = []
    for phase in (FORWARD, BACKWARD):
        clock.start()
        enter(clock, phase)
        clock.enter_within("hook")
        clock.leave()
        clock.leave()
        records.append(record_of(clock))
    assert clock.phase() == "other"
    entered = [{name for name, phase in actions_of(clock, record)} for record in reversed(records)]
    assert entered == [{UNTRACKED, "backward", "hook"}, {UNTRACKED, "forward", "hook"}]
    assert all(sum(record.phases_ns) == record.duration_ns for record in records)


def test_a_meeting_of_ranks_is_other_time_called_in_the_phase_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr("lightning_memprof.capture.clock.perf_counter_ns", lambda: now)
    clock = StepClock(None)
    clock.start()
    clock.enter(clock.slot("training_step", PHASES.index("forward")))
    now += 3
    clock.enter(clock.slot("[LightningModule]Net.log", PHASES.index("other")))
    assert clock.phase() == "forward"
    now += 10
    clock.leave()
    clock.leave()
    _, times, _ = clock.stop()
    assert (times.phases_ns[PHASES.index("other")], times.phases_ns[PHASES.index("forward")]) == (10, 3)


@pytest.mark.slow
def test_compiling_is_an_action_in_the_phase_that_calls_the_code() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager", dynamic=False)
    clock = StepClock(None)
    with compilations(clock):
        counts = []
        for size in (3, 3, 4):
            clock.start()
            enter(clock, FORWARD)
            compiled(torch.ones(size))
            clock.leave()
            record = record_of(clock)
            spent, entries = record.times.actions
            slots = [slot for slot, (name, _) in enumerate(clock.actions) if name == COMPILATION and entries[slot]]
            counts.append(sum(entries[slot] for slot in slots))
            assert all(clock.actions[slot][1] == FORWARD and spent[slot] > 0 for slot in slots)
            assert sum(spent) == record.duration_ns
    assert counts == [1, 0, 1]
    clock.start()
    compiled(torch.ones(5))
    assert COMPILATION not in {
        clock.actions[slot][0] for slot, count in enumerate(record_of(clock).times.actions[1]) if count
    }
