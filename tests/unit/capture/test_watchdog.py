from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lightning_memprof import Collector, Mark, RunContext
from lightning_memprof.capture.budget import Budget, Ledger
from lightning_memprof.capture.watchdog import CollectorHungError, Watchdog
from lightning_memprof.collectors import Window
from lightning_memprof.schedule import Schedule
from recorded_rows import read_rows
from sessions import context, drive, session

WINDOW = Schedule(wait=0, warmup=0, active=2, repeat=1)
SECONDS = 0.2


def wait_for_ever() -> None:
    threading.Event().wait()


def turn_for_ever() -> None:
    while True:
        pass


def swallow_and_wait() -> None:
    try:
        time.sleep(600)
    except CollectorHungError:
        time.sleep(600)


def swallow_and_return() -> None:
    with suppress(Exception):
        time.sleep(600)


class Dying:
    """Python prints what `__del__` raises and goes on."""

    def __del__(self) -> None:
        time.sleep(600)


def hang_while_dying() -> None:
    Dying()


class Counting(Collector):
    """Takes no time: however slow the machine is, it is not what took too long."""

    name: ClassVar[str] = "counting"

    def __init__(self) -> None:
        self.marks = 0

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[Any]:
        def on_mark(mark: Mark) -> None:
            self.marks += 1

        yield on_mark


class Hanging(Collector):
    name: ClassVar[str] = "hanging"

    def __init__(self, where: str, hang: Callable[[], None]) -> None:
        self.where = where
        self.hang = hang

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[Any]:
        def on_mark(mark: Mark) -> None:
            if self.where == "mark":
                self.hang()

        if self.where == "enter":
            self.hang()
        yield on_mark
        if self.where == "exit":
            self.hang()


@contextmanager
def watched(tmp_path: Path) -> Iterator[RunContext]:
    with context(tmp_path) as run:
        yield replace(run, ledger=Ledger(Budget(max_collector_seconds=SECONDS)))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("hang", [wait_for_ever, turn_for_ever, swallow_and_wait, swallow_and_return])
@pytest.mark.parametrize("where", ["enter", "mark", "exit"])
def test_a_collector_that_hangs_is_interrupted_and_switched_off(
    tmp_path: Path, where: str, hang: Callable[[], None]
) -> None:
    counting = Counting()
    with watched(tmp_path) as run:
        with session(run, WINDOW, [counting, Hanging(where, hang)]) as made:
            drive(made, range(4))
        (row,) = [row for row in read_rows(run.sink.manifest.path)[0] if row["kind"] == "error"]
    assert (row["collector"], row["where"]) == ("hanging", where)
    assert row["message"].startswith("CollectorHungError: did not return within 0.2 s")
    # It says where it hung.
    assert f"in {hang.__name__}" in row["traceback"]
    assert counting.marks == 16


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_collector_whose_objects_hang_as_they_die_is_switched_off(tmp_path: Path) -> None:
    with watched(tmp_path) as run:
        with session(run, WINDOW, [Hanging("mark", hang_while_dying)]) as made:
            drive(made, range(4))
        (row,) = [row for row in read_rows(run.sink.manifest.path)[0] if row["kind"] == "error"]
    assert (row["collector"], row["where"]) == ("hanging", "mark")


@pytest.mark.timeout(20)
def test_one_that_swallows_the_interrupt_as_it_is_entered_is_left_again(tmp_path: Path) -> None:
    left: list[bool] = []

    class Entered(Hanging):
        @contextmanager
        def record(self, run: RunContext, window: Window) -> Iterator[Any]:
            self.hang()
            try:
                yield None
            finally:
                left.append(True)

    with watched(tmp_path) as run, session(run, WINDOW, [Entered("enter", swallow_and_return)]) as made:
        drive(made, range(4))
    assert left == [True]


@pytest.mark.timeout(20)
def test_one_that_hangs_on_its_way_out_after_its_failure_is_interrupted_too(tmp_path: Path) -> None:
    class Stubborn(Hanging):
        @contextmanager
        def record(self, run: RunContext, window: Window) -> Iterator[Any]:
            try:
                yield lambda mark: self.hang()
            finally:
                self.hang()

    with watched(tmp_path) as run, session(run, WINDOW, [Stubborn("mark", wait_for_ever)]) as made:
        drive(made, range(4))


def test_the_training_itself_may_take_as_long_as_it_wants(tmp_path: Path) -> None:
    slow = []

    def step(number: int) -> None:
        began = time.monotonic()
        time.sleep(3 * SECONDS)
        slow.append(time.monotonic() - began >= 3 * SECONDS)

    with watched(tmp_path) as run:
        with session(run, WINDOW, [Counting()]) as made:
            drive(made, range(2), step)
        rows, _ = read_rows(run.sink.manifest.path)
    assert slow == [True, True]
    assert not [row for row in rows if row["kind"] == "error"]


def test_the_signal_and_the_thread_are_there_in_windows_only(tmp_path: Path) -> None:
    def handlers() -> dict[int, Any]:
        return {int(number): signal.getsignal(number) for number in signal.valid_signals()}

    before, inside, threads = handlers(), [], []
    with watched(tmp_path) as run, session(run, Schedule(wait=1, warmup=0, active=1, repeat=1), [Counting()]) as made:

        def look(step: int) -> None:
            inside.append(handlers() != before)
            threads.append(any(thread.name == "memprof-watchdog" for thread in threading.enumerate()))

        drive(made, range(4), look)
    assert inside == threads == [False, True, False, False]
    assert handlers() == before


def test_a_signal_that_somebody_has_is_left_alone() -> None:
    mine: list[int] = []
    before = signal.signal(signal.SIGRTMAX, lambda number, frame: mine.append(number))
    try:
        watchdog = Watchdog(SECONDS)
        watchdog.start()
        signal.raise_signal(signal.SIGRTMAX)
        with pytest.raises(CollectorHungError):
            watchdog.call(lambda: wait_for_ever())  # noqa: PLW0108 a collector has a frame of its own
        watchdog.stop()
    finally:
        signal.signal(signal.SIGRTMAX, before)
    assert mine == [signal.SIGRTMAX]


def test_in_another_thread_and_without_a_bound_nothing_is_watched() -> None:
    found: list[Any] = []

    def other() -> None:
        watchdog = Watchdog(SECONDS)
        watchdog.start()
        found.append(watchdog._thread)
        watchdog.stop()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    unbound = Watchdog(None)
    unbound.start()
    unbound.stop()
    assert [*found, unbound._thread] == [None, None]


def test_where_no_thread_can_be_had_the_signal_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = [signal.getsignal(number) for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1)]
    watchdog = Watchdog(SECONDS)
    watchdog.start()
    watchdog.stop()
    assert [signal.getsignal(number) for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1)] == before
