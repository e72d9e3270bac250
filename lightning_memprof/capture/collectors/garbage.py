"""Pauses of Python's garbage collector."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from lightning_memprof.artifacts.series import GarbageRow
from lightning_memprof.capture.base import Collector, OnMark, RunContext
from lightning_memprof.capture.observe import gc_callback
from lightning_memprof.schedule import Mark, Point, Window


class GarbageCollection(Collector):
    """GC pauses in the window's steps: a series with one row per collection.

    A row has the start, duration, generation and number of collected objects. The whole process pauses, whichever
    thread triggered the collection. Outside windows nothing is called.
    """

    name: ClassVar[str] = "garbage"
    every_rank: ClassVar[bool] = True

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Register a callback of the garbage collector."""
        rows: list[GarbageRow] = []
        here: Mark | None = None
        began = 0

        def on_collection(phase: str, info: dict[str, int]) -> None:
            nonlocal began
            now = time.perf_counter_ns()
            if phase == "start":
                began = now
            elif began and here is not None:
                row = GarbageRow(
                    step=here.step,
                    global_step=here.global_step,
                    recorded=here.recorded,
                    time_ns=began + run.unix_offset_ns,
                    duration_ns=now - began,
                    generation=info["generation"],
                    collected=info["collected"],
                    uncollectable=info["uncollectable"],
                )
                rows.append(row)

        def on_mark(mark: Mark) -> None:
            nonlocal here
            # Pauses between two steps are not part of the training.
            here = None if mark.point is Point.STEP_END else mark

        try:
            with gc_callback(on_collection):
                yield on_mark
        finally:
            run.sink.write_rows(window, self.name, rows)
