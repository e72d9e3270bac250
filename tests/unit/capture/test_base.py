"""Hooks of collectors in the program's code, and marks, where its stack reaches Python's recursion limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

from lightning_memprof.capture.base import Collector, OnMark, RunContext
from lightning_memprof.schedule import Action, Mark, Point, Window
from sessions import context, positions, session
from stack import at_the_limit
from training import rows_of


def deep(frames: int) -> None:
    if frames:
        deep(frames - 1)


def test_a_hook_that_finds_no_frame_left_is_called_at_the_next_chance(tmp_path: Path) -> None:
    called: list[int] = []
    with context(tmp_path) as run:
        hook = run.guarded(called.append, collector="probe")
        for spare in range(12):
            with suppress(RecursionError):
                at_the_limit(partial(hook, spare), spare)
        assert not run.faults.disabled
        directory = run.sink.place.directory
    assert 0 < len(called) < 12
    assert called[-1] == 11
    assert not rows_of(directory, "error")


def test_a_hook_that_fails_where_few_frames_are_left_is_reported_and_raises_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        deep(100)
        raise ArithmeticError

    with context(tmp_path) as run:
        hook = run.guarded(fail, collector="probe")
        for spare in range(12):
            with suppress(RecursionError):
                at_the_limit(hook, spare)
        directory = run.sink.place.directory
    (row,) = rows_of(directory, "error")
    assert row["message"] == "ArithmeticError"


class Marks(Collector):
    name: ClassVar[str] = "marks"

    def __init__(self) -> None:
        self.points: list[Point] = []

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        def on_mark(mark: Mark) -> None:
            deep(50)
            self.points.append(mark.point)

        yield on_mark


def test_a_mark_where_few_frames_are_left_is_passed_on_and_one_where_none_is_left_is_not(tmp_path: Path) -> None:
    marks = Marks()
    with context(tmp_path) as run:
        with session(run, lambda _: Action.RECORD, [marks]) as made:
            made.begin_step(next(positions([0])))
            for spare in range(12):
                with suppress(RecursionError):
                    at_the_limit(partial(made.mark, Point.BEFORE_BACKWARD), spare)
        directory = run.sink.place.directory
    assert 0 < marks.points.count(Point.BEFORE_BACKWARD) < 12
    assert not rows_of(directory, "error")
