"""Collectors of bytes by category in one step of a window, by torch's memory trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
import yaml
from torch import nn

from lightning_memprof.artifacts.naming import fsdp_log_name, fsdp_stats_name, module_log_name
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
    is tracked, from the start to the end of its batch; that step takes at least ten times as long, which affects the
    trace and the timings of the same window.

    In the step that allocates an optimizer's state, its temporaries count as optimizer_state too: track a later step,
    as the default schedule does. Each call of a module is a call of its own in the series; one inside another call of
    the same module is part of that.

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
            raise ConfigError(f"ModuleMemory(step={self.step!r}): must be the number of a recorded step, from 0")
        Layout(depth=self.depth, units=self.units)

    def unavailable(self, run: RunContext) -> str | None:  # noqa: ARG002 every stage of every run
        """Return a reason without torch's tracker."""
        return _missing_tracker()

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Track one step; write the series and the log."""
        from lightning_memprof.capture.tracker.tracker import ModuleTracker

        layout = Layout(depth=self.depth, units=self.units)

        def begin() -> tuple[CategoryTracker, str]:
            return ModuleTracker(run.model), ""

        def files(mark: Mark, report: TrackerReport) -> dict[str, str]:
            return {module_log_name(run.rank, run.function, mark.step + 1): report.text(layout)}

        with _track(run, window, _Wanted(collector=self.name, number=self.step, begin=begin, files=files)) as on_mark:
            yield on_mark


@dataclass(frozen=True, kw_only=True)
class FSDPMemory(Collector):
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

    depth: int = 2
    tabulate: bool = False
    units: str = "MiB"
    root_module: str = ""
    function: str | None = None

    def __post_init__(self) -> None:
        """Validate the values."""
        Layout(depth=self.depth, units=self.units)

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
        """Track the first recorded step; write the series, the log and this rank's mapping.

        Raises:
            SkipWindow: a part of the model is compiled.
        """
        if is_compiled(run.model):
            raise SkipWindow(COMPILED)
        from lightning_memprof.capture.tracker.sharded_tracker import ShardedTracker

        path, root = self._root(run.model)
        layout = Layout(depth=self.depth, units=self.units, tabulate=self.tabulate)
        function = self.function or run.function

        def begin() -> tuple[CategoryTracker, str]:
            return ShardedTracker(root), path

        def files(mark: Mark, report: TrackerReport) -> dict[str, str]:
            stats = run.sink.place.directory / fsdp_stats_name(run.rank)
            known: dict[str, Any] = yaml.safe_load(stats.read_text(encoding="utf-8")) if stats.exists() else {}
            known[f"{run.rank}.{function}.{mark.step + 1}"] = {"root_module": path, **report.mapping(layout)}
            log_name = fsdp_log_name(run.rank, function, mark.step + 1)
            return {log_name: report.text(layout), stats.name: yaml.safe_dump(known, sort_keys=False)}

        with _track(run, window, _Wanted(collector=self.name, number=0, begin=begin, files=files)) as on_mark:
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


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """The tracked step.

    Attributes:
        collector: its name.
        number: of the step among the window's recorded steps, from 0.
        begin: returns the tracker and the root's path.
        files: returns the texts of further files by name, from the mark of the step's end and the report.
    """

    collector: str
    number: int
    begin: Callable[[], tuple[CategoryTracker, str]]
    files: Callable[[Mark, TrackerReport], dict[str, str]]


def _missing_tracker() -> str | None:
    """Return why torch's memory trackers, which are private, are not available; None if they are."""
    try:
        import lightning_memprof.capture.tracker.sharded_tracker  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"this torch version has no supported memory tracker ({error})"
    return None


@contextmanager
def _track(run: RunContext, window: Window, wanted: _Wanted) -> Iterator[OnMark]:
    """Track the step from the start to the end of its batch, and write its series.

    A validation that follows in the same step is not included. A step that an exception ends is saved up to there.
    """
    with run.sink.series(window, wanted.collector) as write, ExitStack() as stack:
        step = _Step(run, wanted, stack)

        def on_mark(mark: Mark) -> None:
            reason = step.on_mark(mark)
            if reason is not None:
                run.note_unavailable(wanted.collector, str(reason), window)
                # The next window's step would fail at the same place.
                run.faults.disabled.add(wanted.collector)
                log.warning("%s: %s; it is disabled, training continues", wanted.collector, reason)
            if mark.point is Point.STEP_END and step.report is not None:
                report, step.report = step.report, None
                for row in report.rows():
                    write(mark, row)
                for name, text in wanted.files(mark, report).items():
                    path = run.sink.place.directory / name
                    file = ArtifactSpec(path=path, type="blob", collector=wanted.collector, window=window.index)
                    run.sink.write_text(file, text)

        with run.training.listen(batch=step.on_batch, loss=step.on_loss):
            yield on_mark


class _Step:
    def __init__(self, run: RunContext, wanted: _Wanted, stack: ExitStack) -> None:
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

    def on_loss(self, loss: torch.Tensor) -> None:
        if (tracker := self._tracker) is not None and is_compiled(self._run.model):
            tracker.guard.run(tracker.add_saved, loss)

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
        if isinstance(failure, RecursionError):
            return SkipWindow("the program reaches Python's recursion limit: raise it with sys.setrecursionlimit")
        if failure is not None and not isinstance(failure, NotImplementedError):
            raise failure
        return failure

    @without_torch_function
    def _enter(self, batch: Any) -> None:
        self._tracker, self._root_path = self._wanted.begin()
        self._stack.push(self._tracking)
        self._tracking.enter_context(self._tracker.tracking(self._run.model, self._run.training.optimizers(), batch))

    @without_torch_function
    def _leave(self, tracker: CategoryTracker) -> None:
        self._tracker = None
        try:
            if tracker.guard.failure is None:
                tracker.add_gradients(self._run.model)
                self.report = tracker.report(self._root_path)
        finally:
            self._tracking.close()
