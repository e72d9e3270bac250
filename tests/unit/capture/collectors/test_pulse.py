from __future__ import annotations

import cProfile
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

import pytest
import torch

from fake_devices import FakeCuda, FakeTimer
from lightning_memprof.artifacts.series import (
    PHASES,
    PULSE_COLUMNS,
    PYTHON_PROFILER,
    TORCH_PROFILER,
    ActionTotalRow,
    StallRow,
)
from lightning_memprof.capture.base import StepRecord
from lightning_memprof.capture.clock import StepClock
from lightning_memprof.capture.collectors.pulse import ActionTotals, CoreWait, Pulse, PulseWriter
from lightning_memprof.capture.sources.memory import ResidentSize
from lightning_memprof.schedule import Action, Schedule
from recorded_rows import read_pulse, read_rows
from sessions import Times, context, drive, session

CUDA = torch.device("cuda", 0)
FORWARD, OTHER = PHASES.index("forward"), PHASES.index("other")


def never(_: int) -> Action:
    return Action.NONE


def open_files(directory: Path) -> list[Path]:
    return [path for path in Path("/proc/self/fd").iterdir() if str(directory) in os.path.realpath(path)]


def record(step: int, timer: FakeTimer | None) -> StepRecord:
    """A step that works 100 ns in its forward and 10 ns outside of it."""
    moments = None
    if timer is not None:
        moments = [(FORWARD, timer.record(), 0)]
        timer.work(100)
        moments.append((OTHER, timer.record(), 0))
        timer.work(10)
        moments.append((OTHER, timer.record(), 0))
    return StepRecord(step, step, 0, None, step, 6, Times((1,) * len(PHASES)), moments)


def steps_on_disk(path: Path) -> list[int | None]:
    return [row["step"] for row in read_pulse(path)]


def test_a_row_is_written_when_the_device_has_come_to_its_end_and_not_before(tmp_path: Path) -> None:
    timer = FakeTimer()
    with FakeCuda().installed():
        writer = PulseWriter(tmp_path / "p.csv", CUDA, timer, ResidentSize())
        writer.add(record(0, timer))
        writer.flush()
        assert steps_on_disk(tmp_path / "p.csv") == []
        timer.catch_up()
        writer.add(record(1, timer))
        writer.flush()
        assert steps_on_disk(tmp_path / "p.csv") == [0]
        assert len(timer.held) == 3
        timer.catch_up()
        writer.close()
    first, second = read_pulse(tmp_path / "p.csv")
    for row in (first, second):
        assert (row["device_duration_ns"], row["device_forward_ns"], row["device_other_ns"]) == (110, 100, 10)
    assert timer.held == []


def test_what_the_device_has_not_reached_at_the_end_stays_empty(tmp_path: Path) -> None:
    timer = FakeTimer()
    with FakeCuda().installed():
        writer = PulseWriter(tmp_path / "p.csv", CUDA, timer, ResidentSize())
        writer.add(record(0, timer))
        timer.catch_up()
        writer.add(record(1, timer))
        writer.add(record(2, timer))
        writer.close()
    rows = read_pulse(tmp_path / "p.csv")
    assert [row["device_duration_ns"] for row in rows] == [110, None, None]
    assert [row["duration_ns"] for row in rows] == [6, 6, 6]
    assert all(rows[2][name] is None for name in PULSE_COLUMNS if name.startswith("device_") and name.endswith("_ns"))


def test_rows_stay_in_order_however_late_the_device_is(tmp_path: Path) -> None:
    timer = FakeTimer()
    with FakeCuda().installed():
        writer = PulseWriter(tmp_path / "p.csv", CUDA, timer, ResidentSize())
        for step in range(200):
            writer.add(record(step, timer))
            timer.done_ns += 70
        timer.catch_up()
        writer.close()
    rows = read_pulse(tmp_path / "p.csv")
    assert [row["step"] for row in rows] == list(range(200))
    assert all(row["device_duration_ns"] == 110 for row in rows)


def test_on_a_cpu_the_columns_of_the_device_are_empty(tmp_path: Path) -> None:
    with context(tmp_path) as run, session(run, never, [Pulse()]) as made:
        drive(made, range(3))
    rows = read_pulse(tmp_path / "memprofiler/pulse.rank00000.csv")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (rows[0]["rss_bytes"] or 0) > 2**20
    for row in rows:
        assert sum(row[f"{phase}_ns"] or 0 for phase in PHASES) == row["duration_ns"]
        assert row["device_peak_bytes"] is None
        assert row["device_duration_ns"] is None


def test_a_run_that_soon_hangs_has_most_of_its_steps_on_disk(tmp_path: Path) -> None:
    writer = PulseWriter(tmp_path / "p.csv", torch.device("cpu"), None, ResidentSize())
    for step in range(200):
        # All of them within the time of a chunk.
        writer.add(StepRecord(step, step, 0, None, 10**12 + 1000 * step, 1000, Times((1000, 0, 0, 0, 0, 0)), None))
        assert len(read_pulse(tmp_path / "p.csv")) > step / 2
        assert step + 1 - len(read_pulse(tmp_path / "p.csv")) < 64
    writer.close()


def test_memory_is_read_at_most_every_ten_milliseconds(tmp_path: Path) -> None:
    writer = PulseWriter(tmp_path / "p.csv", torch.device("cpu"), None, ResidentSize())
    lengths = [4_000_000] * 6 + [18_000_000] * 3
    start = 1_000_000_000
    for step, length in enumerate(lengths):
        writer.add(StepRecord(step, step, 0, None, start, length, Times((length, 0, 0, 0, 0, 0)), None))
        start += length
    writer.close()
    rows = read_pulse(tmp_path / "p.csv")
    assert [row["step"] for row in rows if row["rss_bytes"] is not None] == [0, 3, 6, 7, 8]
    counted = [] if CoreWait().read() is None else [0, 3, 6, 7, 8]
    assert [row["step"] for row in rows if row["core_wait_ns"] is not None] == counted


def of_profilers(path: Path, around: Callable[[int], AbstractContextManager[object]]) -> list[int | None]:
    """Return what the pulse says of other profilers, if each step ends in such a context."""
    with closing(PulseWriter(path, torch.device("cpu"), None, ResidentSize())) as writer:
        for step in range(3):
            with around(step):
                writer.add(record(step, None))
    return [row.other_profiler for row in read_pulse(path)]


def test_a_step_that_another_profiler_records_is_marked_and_one_with_markers_for_nsight_is_not(tmp_path: Path) -> None:
    def at_the_second(profiler: Callable[[], AbstractContextManager[object]]) -> list[int | None]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.csv"
        return of_profilers(path, lambda step: profiler() if step == 1 else nullcontext())

    assert at_the_second(torch.profiler.profile) == [None, TORCH_PROFILER, None]
    assert at_the_second(cProfile.Profile) == [None, PYTHON_PROFILER, None]
    assert at_the_second(nullcontext) == [None] * 3
    if torch.cuda.is_available():
        assert at_the_second(torch.autograd.profiler.emit_nvtx) == [None] * 3


def test_our_own_window_is_no_other_profiler(tmp_path: Path) -> None:
    with (
        closing(PulseWriter(tmp_path / "p.csv", torch.device("cpu"), None, ResidentSize())) as writer,
        torch.profiler.profile(),
    ):
        writer.add(record(0, None)._replace(window=0))
    assert [row.other_profiler for row in read_pulse(tmp_path / "p.csv")] == [None]


def test_on_an_accelerator_a_run_has_both_clocks_and_the_peak_and_never_synchronises(tmp_path: Path) -> None:
    with FakeCuda().installed() as cuda:
        with context(tmp_path, "cuda:0") as run, session(run, never, [Pulse()]) as made:

            def inside(_: int) -> None:
                made.clock.enter(made.clock.slot("forward", FORWARD))
                time.sleep(0.01)
                cuda.allocate(1000)
                cuda.timer.work(5_000_000)
                made.clock.leave()
                cuda.timer.work(1_000_000)

            for step in range(30):
                drive(made, [step], inside)
                cuda.timer.done_ns = max(cuda.timer.queued_ns - 9_000_000, 0)
            cuda.timer.catch_up()
        rows = read_pulse(tmp_path / "memprofiler/pulse.rank00000.csv")
    assert [row["device_forward_ns"] for row in rows] == [5_000_000] * 30
    assert [row["device_duration_ns"] for row in rows] == [6_000_000] * 30
    assert [row["device_peak_bytes"] for row in rows] == [1000 * (step + 1) for step in range(30)]
    assert cuda.events_made < 20


def test_the_pulse_can_be_read_while_the_run_goes_on_with_the_window_of_each_step(tmp_path: Path) -> None:
    schedule = Schedule(wait=1, warmup=1, active=1, repeat=2)
    with context(tmp_path) as run, session(run, schedule, [Pulse()]) as made:
        drive(made, range(150))
        rows = read_pulse(tmp_path / "memprofiler/pulse.rank00000.csv")
    assert len(rows) >= 64
    assert [row["window"] for row in rows[:8]] == [None, 0, 0, None, 1, 1, None, None]


def test_the_finished_pulse_is_listed(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        with session(run, never, [Pulse()]) as made:
            drive(made, range(2))
        rows, _ = read_rows(run.sink.manifest.path)
    (row,) = [row for row in rows if row["kind"] == "artifact" and row["type"] == "pulse"]
    assert (row["type"], row["path"]) == ("pulse", "memprofiler/pulse.rank00000.csv")
    assert row["size_bytes"] == (tmp_path / row["path"]).stat().st_size


ACTIONS = [("untracked", OTHER), ("hook", FORWARD), ("callback", PHASES.index("callbacks"))]


def acted(step: int, *spent: int, window: int | None = None) -> StepRecord:
    """A step in which each action ran once, or not at all where its time is 0."""
    entries = [int(ns > 0) for ns in spent]
    return StepRecord(step, step, 0, window, step * 10**9, sum(spent), Times(actions=(spent, entries)), None)


def totals_of(*records: StepRecord) -> list[ActionTotalRow | StallRow]:
    totals = ActionTotals(Path("unused"), ACTIONS)
    # At the same time: the file is written after a minute.
    totals.add([record._replace(start_ns=0) for record in records])
    return totals.rows()


def test_totals_are_separate_for_steps_in_windows_and_leave_out_the_first_step() -> None:
    rows = totals_of(acted(0, 900, 900, 900), acted(1, 1, 5, 0), acted(2, 1, 3, 10), acted(3, 2, 7, 0, window=0))
    found = [(row.action, row.phase, row.in_window, row.steps, row.count, row.total_ns) for row in totals_only(rows)]
    assert found == [
        ("callback", "callbacks", False, 2, 1, 10),
        ("hook", "forward", False, 2, 2, 8),
        ("untracked", "other", False, 2, 2, 2),
        ("hook", "forward", True, 1, 1, 7),
        ("untracked", "other", True, 1, 1, 2),
    ]


def totals_only(rows: list[ActionTotalRow | StallRow]) -> list[ActionTotalRow]:
    return [row for row in rows if isinstance(row, ActionTotalRow)]


def test_the_most_that_an_action_took_in_a_step_is_kept_with_its_step() -> None:
    rows = totals_of(acted(0, 1, 900), acted(1, 1, 5), acted(2, 1, 8), acted(3, 1, 8), acted(4, 1, 2))
    assert [(row.action, row.max_ns, row.max_step) for row in totals_only(rows)] == [
        ("hook", 8, 2),
        ("untracked", 1, 1),
    ]


def test_a_stall_names_the_action_that_exceeded_its_mean_the_most() -> None:
    usual = [acted(step, 1, 100, 10) for step in range(40)]
    (stall,) = [row for row in totals_of(*usual, acted(40, 2, 150, 90)) if isinstance(row, StallRow)]
    assert (stall.step, stall.duration_ns, stall.median_ns) == (40, 242, 111)
    assert (stall.action, stall.phase, stall.action_ns) == ("callback", "callbacks", 90)


def test_a_slow_step_in_a_window_and_one_of_less_than_twice_the_median_are_no_stalls() -> None:
    usual = [acted(step, 1, 100) for step in range(40)]
    rows = totals_of(*usual, acted(40, 1, 900, window=0), acted(41, 1, 190), acted(42, 1, 201))
    assert [row.step for row in rows if isinstance(row, StallRow)] == []


def test_the_median_follows_a_run_that_becomes_slower() -> None:
    rows = totals_of(*(acted(step, 100 if step < 100 else 300) for step in range(400)))
    stalls = [row.step for row in rows if isinstance(row, StallRow)]
    assert stalls == list(range(100, 133))


def test_of_many_stalls_the_longest_thousand_are_kept_in_their_order() -> None:
    steps = [acted(step, 1000 + step if step % 3 == 2 else 100) for step in range(3600)]
    stalls = [row.step for row in totals_of(*steps) if isinstance(row, StallRow)]
    assert stalls == [step for step in range(3600) if step % 3 == 2][-1000:]


def test_the_totals_are_on_disk_once_a_minute_and_listed_once(tmp_path: Path) -> None:
    file = tmp_path / "memprofiler/actions.rank00000.jsonl"
    with context(tmp_path) as run:
        run.clock = StepClock(None)
        with Pulse().follow(run) as add:
            assert add is not None
            for step in range(70):
                # Steps of one second: a chunk of the pulse has three of them.
                add(acted(step, 5))
                assert file.exists() == (step >= 62)
            early, _ = read_rows(file)
        listed = [row["path"] for row in read_rows(run.sink.manifest.path)[0] if row["kind"] == "artifact"]
    assert [(row["action"], row["steps"], row["total_ns"]) for row in early] == [("untracked", 62, 310)]
    assert [row["total_ns"] for row in read_rows(file)[0]] == [345]
    assert sorted(listed) == ["memprofiler/actions.rank00000.jsonl", "memprofiler/pulse.rank00000.csv"]


def test_a_run_of_one_step_has_no_totals(tmp_path: Path) -> None:
    with context(tmp_path) as run, session(run, never, [Pulse()]) as made:
        drive(made, range(1))
    assert not list(tmp_path.rglob("actions.*"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not list open files")
def test_a_disk_that_refuses_the_rows_leaves_no_file_open(tmp_path: Path) -> None:
    writer = PulseWriter(tmp_path / "p.csv", torch.device("cpu"), None, ResidentSize())
    writer.add(record(0, None))
    writer._file.close()
    writer.add(record(1, None))
    with pytest.raises(ValueError):
        writer.close()
    with pytest.raises(FileExistsError):
        PulseWriter(tmp_path / "p.csv", torch.device("cpu"), None, ResidentSize())
    assert not open_files(tmp_path)


@pytest.fixture
def one_core() -> Iterator[None]:
    """Run this thread and its children on one core."""
    if not hasattr(os, "sched_setaffinity") or CoreWait().read() is None:
        pytest.skip("the kernel does not count the wait for a core")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def test_a_thread_that_shares_its_core_waits_for_it_and_one_that_sleeps_does_not(one_core: None) -> None:
    program = "print(flush=True)\nwhile True: pass"
    with (
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other,
        closing(CoreWait()) as wait,
    ):
        try:
            assert other.stdout is not None
            other.stdout.readline()
            wait.read()
            ran_ns = time.thread_time_ns()
            while time.thread_time_ns() - ran_ns < 100_000_000:
                pass
            began_ns = time.perf_counter_ns()
            assert (wait.read() or 0) > 1_000_000
            time.sleep(0.05)
            assert (wait.read() or 0) <= time.perf_counter_ns() - began_ns - 50_000_000
        finally:
            other.kill()
