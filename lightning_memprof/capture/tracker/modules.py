"""Bytes by category at the peak of a step, and around every module's forward and backward."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lightning_memprof.artifacts.naming import module_log_name
from lightning_memprof.artifacts.sink import Artifact
from lightning_memprof.capture.base import Collector, OnMark, SkipWindow, no_training_step
from lightning_memprof.capture.sources.module_calls import COMPILED, is_compiled
from lightning_memprof.capture.tracker.report import Layout
from lightning_memprof.capture.tracker.tracked_step import TrackedStep, missing_tracker, track_step, write_log
from lightning_memprof.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.capture.tracker.report import TrackerReport
    from lightning_memprof.capture.tracker.tracker import CategoryTracker
    from lightning_memprof.schedule import Mark, Window

__all__ = ["ModuleMemory"]


@dataclass(frozen=True, kw_only=True)
class ModuleMemory(Collector):
    """Parameters, gradients, optimizer state, activations, inputs and temporaries of one step, by torch's MemTracker.

    Works with any model on any device, also without an accelerator: it counts the storages that operators allocate and
    free, for a view the whole storage, on CUDA in the allocator's steps of 512 bytes. One recorded step of each window
    is tracked, from the start to the end of its batch; that step takes at least ten times as long, which affects the
    trace and the timings of the same window.

    In the step that allocates an optimizer's state, its temporaries count as optimizer_state too: track a later step,
    as the default schedule does. A module that is called twice and by no other module ends the tracking, with a reason.

    Args:
        step: number of the recorded step of each window, from 0.
        depth: levels of modules in the log; the LightningModule is the first.
        units: ``B``, ``KiB``, ``MiB`` or ``GiB`` in the log.

    Raises:
        ConfigError: ``step``, ``depth`` or ``units`` is invalid.

    """

    name: ClassVar[str] = "module_memory"

    step: int = 0
    depth: int = 2
    units: str = "MiB"

    def __post_init__(self) -> None:
        """Validate the values."""
        if type(self.step) is not int or self.step < 0:
            msg = f"ModuleMemory(step={self.step!r}): must be the number of a recorded step, from 0"
            raise ConfigError(msg)
        Layout(depth=self.depth, units=self.units)

    def unavailable(self, run: RunContext) -> str | None:
        """Return a reason outside fit, which alone has gradients, and without torch's tracker."""
        if reason := no_training_step(run):
            return reason
        return missing_tracker()

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Track one step; write the series and the log."""
        if is_compiled(run.model):
            raise SkipWindow(COMPILED)
        from lightning_memprof.capture.tracker.tracker import ModuleTracker

        layout = Layout(depth=self.depth, units=self.units)

        def begin() -> tuple[CategoryTracker, str]:
            return ModuleTracker(run.model), ""

        def save(mark: Mark, report: TrackerReport) -> None:
            path = run.sink.place.directory / module_log_name(run.rank, run.function, mark.step + 1)
            write_log(
                run, Artifact(path=path, type="blob", collector=self.name, window=window.index), report.text(layout)
            )

        wanted = TrackedStep(collector=self.name, number=self.step, begin=begin, save=save)
        with track_step(run, window, wanted) as on_mark:
            yield on_mark
