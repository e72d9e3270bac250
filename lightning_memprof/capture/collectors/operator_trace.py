"""torch.profiler by hand, for one window: the only owner of Kineto in this package."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch.autograd.profiler import profile as autograd_profile
from torch.profiler import ProfilerActivity, profile

from lightning_memprof.artifacts.naming import TraceName, numbered, series_path, temporary_name
from lightning_memprof.artifacts.sink import Artifact
from lightning_memprof.capture.base import Collector, NotNowError, OnMark, OnStep
from lightning_memprof.capture.budget import Export, plan_trace, settle
from lightning_memprof.capture.sources.annotations import action_ranges, module_ranges
from lightning_memprof.capture.sources.trace_file import TraceFile
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Point
from lightning_memprof.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.capture.budget import TraceLevel
    from lightning_memprof.schedule import Mark, Window

__all__ = ["DEFAULT_FILENAME", "NvtxRanges", "OperatorTrace"]

log = logging.getLogger(__name__)

DEFAULT_FILENAME: Final = "fts_extended_pytorch_profiler"
# Kineto is one for the process, whatever thread trains.
_KINETO = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class OperatorTrace(Collector):
    """Every operator and kernel of the window's steps, as a trace that Perfetto and TensorBoard's profiler tab open.

    Args:
        record_shapes: input shapes of operators.
        profile_memory: allocations and frees.
        with_stack: Python stacks.
        with_flops: floating point operations of matrix products and convolutions.
        with_modules: module hierarchy of TorchScript models.
        activities: ``"cpu"``, ``"cuda"``, ``"xpu"`` or members of ``torch.profiler.ProfilerActivity``; None is all
            that this build of torch supports.
        experimental_config: ``torch._C._profiler._ExperimentalConfig``.
        record_module_names: name modules' forwards in the trace.
        on_trace_ready: called at the end of each window with the ``torch.profiler.profile``, which may be exported.
        export: False writes no trace.
        stacks_metric: also write folded Python stacks weighted by this metric, ``"self_cpu_time_total"`` for
            instance; it implies ``with_stack`` and takes seconds at the end of a window.
        filename: middle part of the traces' names.
        dirpath: directory of the traces; None is the run's root, where TensorBoard finds them.
        options: further keyword arguments of ``torch.profiler.profile``.

    Raises:
        ConfigError: an activity is unknown.

    """

    name: ClassVar[str] = "operator_trace"

    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    activities: Sequence[str | ProfilerActivity] | None = None
    experimental_config: Any | None = None
    record_module_names: bool = True
    on_trace_ready: Callable[..., Any] | None = None
    export: bool = True
    stacks_metric: str | None = None
    filename: str = DEFAULT_FILENAME
    dirpath: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what torch would refuse in the middle of the training."""
        _activities(self.activities)

    def unavailable(self, run: RunContext) -> str | None:  # noqa: ARG002 overriding
        """Say so where torch was built without Kineto."""
        if not torch.profiler.kineto_available():
            return "this build of torch has no Kineto"
        return None

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Warm up Kineto now, record from the first recorded step on, save at the end.

        Where the program itself starts a torch profiler meanwhile, it gets Kineto, and the trace ends there.
        """
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001 no public way to ask
            msg = "another torch profiler is running"
            raise NotNowError(msg)
        if (spent := run.ledger.refusal()) is not None:
            raise NotNowError(spent)
        if not _KINETO.acquire(blocking=False):
            msg = "another training of this process is recording"
            raise NotNowError(msg)
        try:
            level = plan_trace(run, window)
            within = self._within(level)
            trace = _Trace(
                within._profiler(),  # noqa: SLF001 of this class
                lambda finished: within._save(run, window, finished),  # noqa: SLF001 of this class
                level.active_steps,
            )
            with ExitStack() as names:
                if self.record_module_names:
                    names.enter_context(module_ranges(run.model))
                cut_actions = names.enter_context(action_ranges(run.actions))
                trace.prepare(names, cut_actions)
                try:
                    with _giving_way(trace.owner, lambda: self._give_way(run, window, trace)):
                        yield trace.on_mark
                finally:
                    trace.finish()
                    self._release(trace.profiler)
        finally:
            _KINETO.release()

    def _give_way(self, run: RunContext, window: Window, trace: _Trace) -> bool:
        had_it = trace.finish()
        if had_it:
            reason = "the program started a torch profiler of its own; the trace ends there"
            run.sink.manifest.append("unavailable", collector=self.name, window=window.index, reason=reason)
            log.info("window %d: %s", window.index, reason)
        return had_it

    def _release(self, profiler: profile) -> None:
        # The profile is part of a reference cycle: its events would stay until a garbage collection.
        if self.on_trace_ready is None and profiler.profiler is not None:
            profiler.profiler.kineto_results = None

    def _profiler(self) -> profile:
        return profile(
            activities=_activities(self.activities),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack or self.stacks_metric is not None,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
            experimental_config=self.experimental_config,
            **self.options,
        )

    def _within(self, level: TraceLevel) -> OperatorTrace:
        return replace(
            self,
            with_stack=self.with_stack and level.stack,
            stacks_metric=self.stacks_metric if level.stack else None,
            record_shapes=self.record_shapes and level.shapes,
        )

    def _save(self, run: RunContext, window: Window, trace: _Trace) -> None:
        profiler = trace.profiler
        directory = Path(self.dirpath) if self.dirpath else run.sink.place.root
        name = TraceName(
            run.stage,
            numbered(self.filename, run.sink.place.number),
            run.rank,
            run.strategy,
            run.function,
            time.time_ns(),
        )
        raw = run.sink.place.directory / series_path(window.index, run.rank, self.name)
        saved = TraceFile(raw.with_name(temporary_name(raw.name)), directory / str(name))
        size = saved.take(profiler) if self.export or self.on_trace_ready else None
        try:
            if self.stacks_metric is not None:
                stacks = directory / str(name).replace(".pt.trace.json.gz", ".stacks")
                with run.sink.file(Artifact(stacks, "blob", self.name, window.index)) as temporary:
                    profiler.export_stacks(str(temporary), self.stacks_metric)
            # Letting go of millions of events takes seconds too.
            self._release(profiler)
            if size is not None:
                settle(run, self._cost(window, trace, size))
            if self.on_trace_ready is not None:
                # Kineto saves a trace once; what the user exports is a copy of ours.
                profiler.export_chrome_trace = saved.export  # type: ignore[method-assign]
                self.on_trace_ready(profiler)
        finally:
            run.in_background(lambda: self._compress(run, window, saved), collector=self.name, window=window)

    def _compress(self, run: RunContext, window: Window, saved: TraceFile) -> None:
        size = 0
        try:
            if self.export:
                kept = self._keep(run, window, saved)
                size = kept.stat().st_size
                log.info("saved %s (%s)", kept.name, format_bytes(size))
        finally:
            run.ledger.wrote(window.index, size)
            with suppress(FileNotFoundError):
                saved.raw.unlink()

    def _keep(self, run: RunContext, window: Window, saved: TraceFile) -> Path:
        """Compress a trace, or keep it as torch wrote it where there is no room for that; return its path."""
        try:
            with run.sink.file(Artifact(saved.trace, "trace", self.name, window.index)) as temporary:
                saved.compress(temporary)
        except Exception as error:  # noqa: BLE001 reported below, or raised again
            plain = saved.trace.with_suffix("")
            try:
                saved.raw.replace(plain)
            except OSError:
                raise error from None
            run.sink.list_artifact(Artifact(plain, "trace", self.name, window.index))
            run.faults.report(self.name, "write", window.index, error)
            return plain
        return saved.trace

    def _cost(self, window: Window, trace: _Trace, size: int) -> Export:
        return Export(
            window=window.index,
            seconds=(time.perf_counter_ns() - trace.stopping_ns) / 1e9,
            bytes=size,
            steps=trace.steps,
            stack=self.with_stack or self.stacks_metric is not None,
            shapes=self.record_shapes,
        )


class _Trace:
    """One window's use of Kineto: prepared, started at the first recorded step, finished once.

    Args:
        profiler: torch's profiler, not prepared yet.
        save: called with this when a started trace was stopped.
        most_steps: recorded steps after which it is finished; None is when the window ends.

    """

    def __init__(self, profiler: profile, save: Callable[[_Trace], None], most_steps: int | None = None) -> None:
        self.profiler = profiler
        self.steps = 0
        self.stopping_ns = 0
        self._save = save
        self._most_steps = most_steps
        self._step = ExitStack()
        self._names: ExitStack | None = None
        self._cut_actions: Callable[[], None] = lambda: None
        self._started = False

    @property
    def owner(self) -> object:
        """What torch's profiler hands to Kineto."""
        return self.profiler.profiler

    def prepare(self, names: ExitStack, cut_actions: Callable[[], None]) -> None:
        """Warm up Kineto; ``names`` are closed before the trace is stopped."""
        self.profiler.prepare_trace()
        self._names, self._cut_actions = names, cut_actions

    def on_mark(self, mark: Mark) -> None:
        """Start with the first recorded step, and name the steps."""
        if self._names is None:
            return
        if mark.point is Point.STEP_START and mark.recorded:
            if not self._started:
                self.profiler.start_trace()
                self._started = True
            self._step.enter_context(torch.profiler.record_function(f"ProfilerStep#{mark.step}"))
            self.steps += 1
        elif mark.point is Point.STEP_END:
            self._cut_actions()
            self._step.close()
            if self.steps == self._most_steps:
                self.finish()

    def finish(self) -> bool:
        """Stop the trace and save it; return whether there was one to stop."""
        names, self._names = self._names, None
        if names is None:
            return False
        self.stopping_ns = time.perf_counter_ns()
        try:
            self._cut_actions()
            self._step.close()
            names.close()
        finally:
            if not self._started:
                # Kineto stays prepared until a trace is stopped.
                self.profiler.start_trace()
            self.profiler.stop_trace()
        if self._started:
            self._save(self)
        return True


@contextmanager
def _giving_way(owner: object, give_way: Callable[[], bool]) -> Iterator[None]:
    """Call ``give_way`` when anybody else is about to use Kineto; it says whether we had it.

    A second profiler inside a first loses the first's data and can crash the process, and nothing of torch tells of
    one that warms up. So for the time of a window we stand in front of the two methods that every profiler begins with.
    """
    prepare, start = autograd_profile._prepare_trace, autograd_profile._start_trace  # noqa: SLF001 see above

    def prepare_trace(profiler: Any) -> None:
        if profiler is not owner:
            give_way()
        prepare(profiler)  # type: ignore[no-untyped-call]

    def start_trace(profiler: Any) -> None:
        if profiler is not owner and give_way():
            # Prepared before our window was: stopping ours has undone it.
            prepare(profiler)  # type: ignore[no-untyped-call]
        start(profiler)  # type: ignore[no-untyped-call]

    autograd_profile._prepare_trace = prepare_trace  # type: ignore[method-assign]  # noqa: SLF001 see above
    autograd_profile._start_trace = start_trace  # type: ignore[method-assign]  # noqa: SLF001 see above
    try:
        yield
    finally:
        autograd_profile._prepare_trace = prepare  # type: ignore[method-assign]  # noqa: SLF001 see above
        autograd_profile._start_trace = start  # type: ignore[method-assign]  # noqa: SLF001 see above


def _activities(names: Sequence[str | ProfilerActivity] | None) -> list[ProfilerActivity] | None:
    if names is None:
        return None
    if isinstance(names, str):
        msg = f"OperatorTrace(activities={names!r}): must be a list, as in [{names!r}]"
        raise ConfigError(msg)
    known = ProfilerActivity.__members__
    found: list[ProfilerActivity] = []
    for name in names:
        member = known.get(name.upper()) if isinstance(name, str) else name
        if not isinstance(member, ProfilerActivity):
            msg = f"OperatorTrace(activities={names!r}): {name!r} is unknown; use {', '.join(known).lower()}"
            raise ConfigError(msg)
        found.append(member)
    return found


class NvtxRanges(Collector):
    """Every operator as an NVTX range for ``nsys`` or ``nvprof --profile-from-start off``, over the whole run."""

    name: ClassVar[str] = "nvtx"

    def unavailable(self, run: RunContext) -> str | None:
        """NVTX needs CUDA."""
        return None if run.device.type == "cuda" else "NVTX ranges need a CUDA device"

    def record(self, run: RunContext, window: Window) -> AbstractContextManager[OnMark | None]:  # noqa: ARG002
        """Windows add nothing."""
        return nullcontext(None)

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:  # noqa: ARG002 overriding
        """Emit ranges until the end of the run."""
        with torch.cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx():  # type: ignore[no-untyped-call]
            yield None
