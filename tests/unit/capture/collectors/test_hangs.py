"""Steps that exceed their limit: a row and the stacks while they run, and a row when they end after all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from lightning_memprof import ConfigError, Schedule
from lightning_memprof.artifacts.series import HangRow
from lightning_memprof.capture.base import OnMark, RunContext
from lightning_memprof.capture.collectors import hangs
from lightning_memprof.capture.collectors.hangs import _Reports, step_limit
from lightning_memprof.collectors import Hangs, Window
from lightning_memprof.schedule import Point
from lightning_memprof.testing import FakeCollector
from sessions import context, drive, session

SECOND = 1_000_000_000
NEVER = Schedule(skip_first=1_000)


def rows_of(directory: Path, limit: float, slow: Any) -> list[dict[str, Any]]:
    """Drive five steps; ``slow`` is called in the fourth with the file of the rows."""
    path = directory / "memprofiler" / "hangs.rank00000.jsonl"
    with context(directory) as run, session(run, NEVER, [Hangs(max_step_seconds=limit)]) as made:
        drive(made, range(5), lambda step: slow(path) if step == 3 else None)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)


def test_a_step_above_its_limit_has_a_row_and_the_stacks_while_it_runs(tmp_path: Path) -> None:
    # A busy machine may make another step as long.
    hang, end = (row for row in rows_of(tmp_path, 0.2, wait_for) if row["step"] == 3)
    assert (hang["kind"], hang["step"], end["kind"], end["step"]) == ("hang", 3, "end", 3)
    assert hang["waited_ns"] > hang["limit_ns"] == 0.2 * SECOND
    assert end["waited_ns"] >= hang["waited_ns"]
    stacks = (tmp_path / "memprofiler" / "stacks.rank00000.txt").read_text()
    assert "in wait_for" in stacks
    assert stacks.index("the training") < stacks.index("in wait_for")


def test_the_stack_is_that_of_the_moment_although_the_step_continues_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, left = threading.Event(), threading.Event()
    seen: list[str] = []

    def stacks(*_: object) -> Iterator[str]:
        asked.set()
        left.wait(60)
        return iter(())

    def place(calls: Any) -> tuple[None, None]:
        seen.extend(code.co_name for code, _, _ in calls)
        return None, None

    # The frame of a generator that is not running has no frame around it.
    def turns() -> Iterator[None]:
        asked.wait(60)
        yield

    def slow(_: Path) -> None:
        waiting = turns()
        next(waiting)
        left.set()
        time.sleep(0.05)

    monkeypatch.setattr(hangs, "_stacks", stacks)
    monkeypatch.setattr(hangs, "_place", place)
    rows_of(tmp_path, 0.2, slow)
    assert "slow" in seen
    assert "drive" in seen


def test_steps_below_their_limit_leave_no_file_and_no_thread(tmp_path: Path) -> None:
    assert rows_of(tmp_path, 3600, lambda _: None) == []
    assert not (tmp_path / "memprofiler" / "stacks.rank00000.txt").exists()
    assert "memprof-hangs" not in {thread.name for thread in threading.enumerate()}


def test_the_heartbeat_has_the_place_of_a_running_step_and_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "memprofiler" / "heartbeat.rank00000.jsonl"
    seen: list[dict[str, Any]] = []

    def slow(step: int) -> None:
        until = time.monotonic() + 60
        while step == 2 and not seen and time.monotonic() < until:
            time.sleep(0.02)
            seen.extend(row for row in map(json.loads, path.read_text().splitlines()) if row.get("step") == 2)

    with context(tmp_path) as run, session(run, NEVER, [Hangs(max_step_seconds=0.4)]) as made:
        drive(made, range(4), slow)
    (beat,) = seen
    assert (beat["phase"], beat["pid"]) == ("other", os.getpid())
    assert beat["waited_ns"] > 0
    assert not path.exists()


def test_a_rank_reports_its_place_when_another_one_has_reported(tmp_path: Path) -> None:
    path = tmp_path / "memprofiler" / "hangs.rank00000.jsonl"

    def slow(step: int) -> None:
        if step == 2:
            (tmp_path / "memprofiler" / "hang_reported").touch()
            wait_for(path)

    with context(tmp_path) as run, session(replace(run, world_size=2), NEVER, [Hangs(max_step_seconds=8)]) as made:
        drive(made, range(4), slow)
    asked, end = [json.loads(line) for line in path.read_text().splitlines()]
    assert (asked["kind"], asked["step"], end["kind"]) == ("asked", 2, "end")
    # The thread may be in a call of pathlib when it is asked.
    assert asked["function"].endswith("wait_for") or asked["function"].startswith("pathlib.")


def test_an_exception_is_written_with_the_state_of_the_process_of_a_neighbour(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    path = tmp_path / "memprofiler" / "hangs.rank00000.jsonl"
    with context(tmp_path) as made:
        run = replace(made, world_size=2)
        _Reports(replace(run, rank=1)).beat(HangRow(kind="heartbeat", step=4, phase="forward", time_ns=5))
        beat = tmp_path / "memprofiler" / "heartbeat.rank00001.jsonl"
        beat.write_text(json.dumps(json.loads(beat.read_text()) | {"pid": child.pid}) + "\n")
        with Hangs().guard(run) as on_exception:
            assert on_exception is not None
            assert not on_exception(KeyboardInterrupt())
            assert not path.exists()
            assert not on_exception(ValueError("empty"))
            child.kill()
            child.wait()
            assert not on_exception(ValueError("empty"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["kind"], row.get("error"), row.get("peer"), row.get("state"), row.get("step")) for row in rows] == [
        ("exception", "ValueError: empty", None, None, None),
        ("other", None, 1, "stopped", 4),
        ("exception", "ValueError: empty", None, None, None),
        ("other", None, 1, "gone", 4),
    ]


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone, which has called a collective."""
    # torch sets its own, and leaves it.
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    distributed.all_reduce(torch.ones(3))
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_row_has_its_collectives_on_disk_and_does_not_depend_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "memprofiler" / "collectives.rank00000.jsonl"
    written: list[str] = []

    def write(reports: _Reports, *rows: HangRow) -> None:
        written.append(f"{rows[0].kind} {json.loads(path.read_text())['operation'] if path.exists() else None}")

    monkeypatch.setattr(_Reports, "write", write)
    with context(tmp_path) as made:
        run = replace(made, world_size=2)
        _Reports(run).exception(ValueError("empty"))
        path.unlink()
        monkeypatch.setattr(hangs, "_dump_fr_trace_json", lambda: '{"entries": [{}]}')
        _Reports(run).exception(ValueError("empty"))
    assert written == ["exception all_reduce", "exception None"]


def test_time_between_two_steps_is_not_a_step_that_hangs(tmp_path: Path) -> None:
    class Slow(FakeCollector):
        """Takes long at the first mark of a step, before the step's clock starts."""

        @contextmanager
        def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
            yield lambda mark: time.sleep(2) if mark.point is Point.STEP_START else None

    with (
        context(tmp_path) as run,
        session(run, Schedule(wait=1, active=1), [Slow(), Hangs(max_step_seconds=1)]) as made,
    ):
        drive(made, range(3))
    assert not (tmp_path / "memprofiler" / "hangs.rank00000.jsonl").exists()


@pytest.mark.parametrize(
    ("durations", "unusual", "is_usual", "chosen", "limit"),
    [
        ([], 0, True, None, 600),
        ([1, 1], 0, True, None, 600),
        ([1, 1, 1], 0, True, None, 60),
        ([20, 10, 30], 0, True, None, 200),
        ([20, 10, 30], 0, True, 5, 5),
        ([1, 1, 1], 0, False, None, 600),
        ([1, 1, 1], 900, False, None, 2700),
        ([1, 1, 1], 900, True, None, 60),
    ],
)
def test_the_limit_follows_the_median_step_and_the_longest_validation(
    durations: list[int], unusual: int, is_usual: bool, chosen: int | None, limit: int
) -> None:
    times = [seconds * SECOND for seconds in durations]
    given = None if chosen is None else chosen * SECOND
    assert step_limit(times, unusual * SECOND, given, is_usual=is_usual) == limit * SECOND


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "60", True])
def test_an_option_that_means_nothing_is_refused(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="max_step_seconds"):
        Hangs(max_step_seconds=seconds)
    with pytest.raises(ConfigError, match="on_hang='restart'"):
        Hangs(on_hang="restart")  # type: ignore[arg-type]
