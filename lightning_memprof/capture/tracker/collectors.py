"""Collectors of bytes by category in one step of a window, by torch's memory trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import nn

from lightning_memprof.artifacts.naming import fsdp_log_name
from lightning_memprof.artifacts.sink import ArtifactSpec
from lightning_memprof.capture.base import Collector, OnMark, OnStep, RunContext, SkipWindow, no_training_step
from lightning_memprof.capture.observe import without_torch_function
from lightning_memprof.capture.sources.compiled import COMPILED, is_compiled
from lightning_memprof.capture.tracker.report import Layout, TrackerReport
from lightning_memprof.errors import ConfigError
from lightning_memprof.logs import logger_of
from lightning_memprof.schedule import Mark, Point, Window

if TYPE_CHECKING:
    from lightning_memprof.capture.tracker.tracker import CategoryTracker

log = logger_of(__name__)

_NAMED: Final = 8


@dataclass(frozen=True, kw_only=True)
class ModuleMemory(Collector):
    """Parameters, gradients, optimizer state, activations, inputs and temporaries of one step, by torch's MemTracker.

    Works with any model on any device, also without an accelerator: it counts the storages that operators allocate and
    free, for a view the whole storage, on CUDA in the allocator's steps of 512 bytes. One recorded step of each window
    is tracked, from the start to the end of its batch; that step takes several times as long, which affects the
    trace and the timings of the same window.

    In the step that allocates an optimizer's state, its temporaries count as optimizer_state too: track a later step,
    as the default schedule does.

    Args:
        step: number of the recorded step of each window, from 0.

    Raises:
        ConfigError: ``step`` is invalid.
    """

    name: ClassVar[str] = "module_memory"

    step: int = 0

    def __post_init__(self) -> None:
        """Validate the value."""
        if type(self.step) is not int or self.step < 0:
            raise ConfigError(f"ModuleMemory(step={self.step!r}): must be the number of a recorded step, from 0")

    def unavailable(self, run: RunContext) -> str | None:  # noqa: ARG002 every stage of every run
        """Return a reason without torch's tracker."""
        return _missing_tracker()

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Track one step, and write the series."""
        from lightning_memprof.capture.tracker.tracker import CategoryTracker

        with _tracked(run, window, _Step(run, self.name, CategoryTracker, number=self.step)) as on_mark:
            yield on_mark


@dataclass(frozen=True, kw_only=True)
class FSDPMemory(Layout, Collector):
    """This rank's sharded and unsharded parameters and gradients, and the other categories, by torch's FSDPMemTracker.

    The first recorded step of each window is tracked, forward and backward, from the start to the end of its batch;
    that step is several times slower. A shard's padding to the size of the other ranks' shards does not count as
    parameter: the parameters of all ranks add up to the model's.

    Args:
        depth: levels of modules in the log; the root is the first.
        tabulate: tables in the log.
        units: ``B``, ``KiB``, ``MiB`` or ``GiB`` in the log.
        root_module: path of the module to track, which ``fully_shard`` was called on. Empty is the LightningModule, or
            otherwise the only outermost sharded module.
        function: part of the file names; None is the function that a step runs, ``training_step``.

    Raises:
        ConfigError: ``depth`` or ``units`` is invalid. When the training starts: ``root_module`` does not exist, or
            ``fully_shard`` was not called on it.
    """

    name: ClassVar[str] = "fsdp_memory"

    root_module: str = ""
    function: str | None = None

    def unavailable(self, run: RunContext) -> str | None:
        """Return a reason if the model will not be sharded; ``fully_shard`` is called later, before the first step."""
        if reason := no_training_step(run) or _missing_tracker():
            return reason
        from lightning_memprof.capture.tracker.sharded_tracker import sharded_modules

        if run.strategy != "ModelParallelStrategy" and not sharded_modules(run.model):
            return f"{run.strategy} does not use fully_shard (FSDP2); ModelParallelStrategy does"
        return None

    def follow(self, run: RunContext) -> AbstractContextManager[OnStep | None]:
        """Find the root before the first step.

        Raises:
            ConfigError: it does not exist, or ``fully_shard`` was not called on it.
        """
        self._root(run.model)
        return nullcontext(None)

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Track the first recorded step; write the series and the log.

        Raises:
            SkipWindow: a part of the model is compiled.
        """
        if is_compiled(run.model):
            raise SkipWindow(COMPILED)
        from lightning_memprof.capture.tracker.sharded_tracker import ShardedTracker

        path, root = self._root(run.model)
        step = _Step(run, self.name, lambda: ShardedTracker(root, path))

        def write_log(mark: Mark, report: TrackerReport) -> None:
            path = run.sink.place.directory / fsdp_log_name(run.rank, self.function or run.function, mark.step + 1)
            file = ArtifactSpec(path=path, type="blob", collector=self.name, window=window.index)
            run.sink.write_text(file, report.text(self))

        with _tracked(run, window, step, write_log) as on_mark:
            yield on_mark

    def _root(self, model: nn.Module) -> tuple[str, nn.Module]:
        from lightning_memprof.capture.tracker.sharded_tracker import sharded_modules

        sharded = sharded_modules(model)
        path = self.root_module
        outermost = [name for name in sharded if not any(_is_below(name, other) for other in sharded)]
        if not path and len(outermost) == 1:
            return outermost[0], sharded[outermost[0]]
        if path in sharded:
            return path, sharded[path]
        named = ", ".join(repr(name) for name in list(sharded)[:_NAMED]) + (", ..." if len(sharded) > _NAMED else "")
        known = f"sharded modules: {named}" if sharded else "the model has none: call fully_shard in configure_model"
        if path and path not in dict(model.named_modules()):
            msg = f"FSDPMemory(root_module={path!r}): the model has no such module; {known}"
        else:
            msg = f"FSDPMemory(root_module={path!r}): fully_shard was not called on it; {known}"
        raise ConfigError(msg)


def _is_below(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _missing_tracker() -> str | None:
    """Return why torch's memory trackers, which are private, are not available; None if they are."""
    try:
        import lightning_memprof.capture.tracker.sharded_tracker  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"this torch version has no supported memory tracker ({error})"
    return None


@contextmanager
def _tracked(
    run: RunContext, window: Window, step: _Step, saved: Callable[[Mark, TrackerReport], None] = lambda *_: None
) -> Iterator[OnMark]:
    """Track the step from the start to the end of its batch, and write the series.

    A validation that follows in the same step is not included. A step that an exception ends is saved up to there.
    """
    with run.sink.series(window, step.collector) as write:

        def on_mark(mark: Mark) -> None:
            reason = step.on_mark(mark)
            if reason is not None:
                run.note_unavailable(step.collector, str(reason), window)
                # The next window's step would fail at the same place.
                run.faults.disabled.add(step.collector)
                log.warning("%s: %s; it is disabled, training continues", step.collector, reason)
            if mark.point is Point.STEP_END and step.report is not None:
                report, step.report = step.report, None
                for row in report.rows():
                    write(mark, row)
                saved(mark, report)

        with step, run.training.listen(batch=step.on_batch, loss=step.on_loss):
            yield on_mark


class _Step(ExitStack):
    """The tracked step of a window.

    Args:
        run: the run.
        collector: name of the collector.
        begin: returns the tracker.
        number: of the step among the window's recorded steps, from 0.
    """

    def __init__(self, run: RunContext, collector: str, begin: Callable[[], CategoryTracker], number: int = 0) -> None:
        super().__init__()
        self.report: TrackerReport | None = None
        self.collector = collector
        self._run = run
        self._begin = begin
        self._number = number
        self._steps = 0
        self._batch: Any = None
        self._tracker: CategoryTracker | None = None

    def on_batch(self, batch: Any) -> None:
        if self._tracker is None and self._steps <= self._number:
            self._batch = batch

    def on_loss(self, loss: torch.Tensor) -> None:
        if (tracker := self._tracker) is not None and is_compiled(self._run.model):
            tracker.guard.run(tracker.add_saved, loss)

    def on_mark(self, mark: Mark) -> Exception | None:
        """Enter, update or leave; return why the step cannot be tracked."""
        if mark.point is Point.BATCH_START:
            batch, self._batch = self._batch, None
            if mark.recorded:
                self._steps += 1
                if self._steps == self._number + 1:
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
        if isinstance(failure, RecursionError):
            return SkipWindow("the program reaches Python's recursion limit: raise it with sys.setrecursionlimit")
        if failure is not None and not isinstance(failure, NotImplementedError):
            raise failure
        return failure

    @without_torch_function
    def _enter(self, batch: Any) -> None:
        self._tracker = self._begin()
        self.enter_context(self._tracker.tracking(self._run.model, self._run.training.optimizers(), batch))

    @without_torch_function
    def _leave(self, tracker: CategoryTracker) -> None:
        self._tracker = None
        try:
            if tracker.guard.failure is None:
                tracker.add_gradients(self._run.model)
                self.report = tracker.report()
        finally:
            self.close()
