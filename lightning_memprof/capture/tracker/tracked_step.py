"""One step of a window under a memory tracker, and its report."""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_memprof.artifacts.sink import Artifact
from lightning_memprof.capture.base import SkipWindow
from lightning_memprof.schedule import Point

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_memprof.capture.base import OnMark, RunContext
    from lightning_memprof.capture.tracker.report import TrackerReport
    from lightning_memprof.capture.tracker.tracker import CategoryTracker
    from lightning_memprof.schedule import Mark, Window

__all__ = ["TrackedStep", "missing_tracker", "track_step", "write_log"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrackedStep:
    """The tracked step.

    Attributes:
        collector: its name.
        number: of the step among the window's recorded steps, from 0.
        begin: returns the tracker and the root's path.
        save: called with the mark of the step's end and the report; writes the files besides the series.

    """

    collector: str
    number: int
    begin: Callable[[], tuple[CategoryTracker, str]]
    save: Callable[[Mark, TrackerReport], None]


def missing_tracker() -> str | None:
    """Return why torch's memory trackers, which are private, are not available; None if they are."""
    try:
        import lightning_memprof.capture.tracker.sharded_tracker  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"this torch version has no supported memory tracker ({error})"
    return None


@contextmanager
def track_step(run: RunContext, window: Window, wanted: TrackedStep) -> Iterator[OnMark]:
    """Track the step from the start to the end of its batch, and write its series.

    A validation that follows in the same step is not included. A step that an exception ends is saved up to there.
    """
    with run.sink.series(window, wanted.collector) as write, ExitStack() as stack:
        step = _Step(run, wanted, stack)

        def on_mark(mark: Mark) -> None:
            reason = step.on_mark(mark)
            if reason is not None:
                run.sink.manifest.append(
                    "unavailable", collector=wanted.collector, window=window.index, reason=str(reason)
                )
                # The next window's step would fail at the same place.
                run.faults.disabled.add(wanted.collector)
                log.warning("%s: %s; it is disabled, training continues", wanted.collector, reason)
            if mark.point is Point.STEP_END and step.report is not None:
                report, step.report = step.report, None
                for row in report.rows():
                    write(mark, row)
                wanted.save(mark, report)

        with run.training.listen(batch=step.on_batch):
            yield on_mark


class _Step:
    def __init__(self, run: RunContext, wanted: TrackedStep, stack: ExitStack) -> None:
        self.report: TrackerReport | None = None
        self._run = run
        self._wanted = wanted
        self._stack = stack
        self._steps = 0
        self._batch: Any = None
        self._tracker: CategoryTracker | None = None
        self._root_path = ""
        self._tracking = ExitStack()

    def on_batch(self, batch: Any) -> None:
        if self._tracker is None and self._steps <= self._wanted.number:
            self._batch = batch

    def on_mark(self, mark: Mark) -> Exception | None:
        """Enter, update or leave; return why the step cannot be tracked."""
        if mark.point is Point.BATCH_START:
            batch, self._batch = self._batch, None
            if mark.recorded:
                self._steps += 1
                if self._steps == self._wanted.number + 1:
                    self._enter(batch)
        tracker = self._tracker
        if tracker is None:
            return None
        if mark.point is Point.AFTER_BACKWARD:
            tracker.guard.run(tracker.add_gradients, self._run.model)
        elif mark.point is Point.BEFORE_OPTIMIZER_STEP:
            tracker.guard.run(tracker.before_optimizer_step)
        if tracker.guard.failure is None and mark.point not in {Point.BATCH_END, Point.STEP_END}:
            return None
        self._leave(tracker)
        failure = tracker.guard.failure
        if failure is not None and not isinstance(failure, (SkipWindow, NotImplementedError)):
            raise failure
        return failure

    def _enter(self, batch: Any) -> None:
        self._tracker, self._root_path = self._wanted.begin()
        self._stack.push(self._tracking)
        self._tracking.enter_context(self._tracker.tracking(self._run.model, self._run.training.optimizers(), batch))

    def _leave(self, tracker: CategoryTracker) -> None:
        self._tracker = None
        try:
            if tracker.guard.failure is None:
                tracker.add_gradients(self._run.model)
                self.report = tracker.report(self._root_path)
        finally:
            self._tracking.close()


def write_log(run: RunContext, artifact: Artifact, text: str) -> None:
    """Write a report's text as an artifact."""
    with run.sink.file(artifact) as temporary:
        temporary.write_text(text, encoding="utf-8")
