"""Operators and kernels of a window, recorded by torch.profiler; the only owner of Kineto in this package."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_memprof.artifacts.manifest import BudgetRow, NoteRow
from lightning_memprof.artifacts.naming import TraceName, numbered, series_path, temporary_name
from lightning_memprof.artifacts.remote import local_path
from lightning_memprof.artifacts.series import STARTED_PROFILER
from lightning_memprof.artifacts.sink import ArtifactSpec
from lightning_memprof.artifacts.trace_rewriting import write_trace
from lightning_memprof.capture.base import Collector, OnMark, OnStep, RunContext, SkipWindow
from lightning_memprof.capture.budget import Export, TraceLevel
from lightning_memprof.capture.collectors.hook_timings import timed_parts
from lightning_memprof.capture.sources.kineto import (
    TraceFile,
    WindowTrace,
    action_ranges,
    module_ranges,
    yields_to_others,
)
from lightning_memprof.capture.sources.user_hooks import hook_ranges
from lightning_memprof.capture.torch_internals import _profiler_enabled
from lightning_memprof.errors import ConfigError
from lightning_memprof.logs import logger_of
from lightning_memprof.schedule import Window
from lightning_memprof.units import format_bytes, format_count

log = logger_of(__name__)

# Parts of forward that are not the model's work, and no actions of the Trainer.
_WITHIN: Final = ("[Metric]", "[LightningModule]")
DEFAULT_FILENAME: Final = "fts_extended_pytorch_profiler"
# The process has one Kineto, whichever thread trains.
_KINETO = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class OperatorTrace(Collector):
    """Every operator and kernel of the window's steps, as a trace for Perfetto and TensorBoard's profiler tab.

    Args:
        record_shapes: input shapes of operators.
        profile_memory: allocations and frees.
        with_stack: Python stacks.
        with_flops: floating point operations of matrix products and convolutions.
        with_modules: module hierarchy of TorchScript models.
        activities: ``"cpu"``, ``"cuda"``, ``"xpu"`` or members of ``torch.profiler.ProfilerActivity``; None is all
            that this torch build supports.
        experimental_config: ``torch._C._profiler._ExperimentalConfig``.
        record_module_names: names of the modules' forwards, and of the program's hooks on them, in the trace.
        on_trace_ready: called at the end of each window with the ``torch.profiler.profile``, which can be exported.
        export: False writes no trace.
        stacks_metric: also write folded Python stacks weighted by this metric, ``"self_cpu_time_total"`` for
            instance; implies ``with_stack`` and takes seconds at the end of a window.
        filename: middle part of the trace names.
        dirpath: directory of the traces, made absolute immediately; None, or a URL, is the run's root, where
            TensorBoard finds them.
        options: further keyword arguments of ``torch.profiler.profile``.

    Raises:
        ConfigError: an activity is unknown.
    """

    name: ClassVar[str] = "operator_trace"
    marks_last: ClassVar[bool] = True

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
        """Check options that torch would reject only during training, and make ``dirpath`` absolute."""
        _activities(self.activities)
        if self.dirpath and (directory := local_path(self.dirpath)) is not None:
            object.__setattr__(self, "dirpath", str(directory))

    def unavailable(self, run: RunContext) -> str | None:
        """Return a reason if another profiler owns torch.profiler, or torch was built without Kineto."""
        if run.profiler_conflict is not None:
            return run.profiler_conflict
        return None if torch.profiler.kineto_available() else "this torch build has no Kineto"

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Warm up Kineto, record from the first recorded step on, and save at the end.

        If the program starts a torch profiler meanwhile, that one gets Kineto, and the trace ends there.
        """
        if _profiler_enabled():
            raise SkipWindow("another torch profiler is running")
        if not _KINETO.acquire(blocking=False):
            raise SkipWindow("another training of this process is recording")
        try:
            level = _plan(run, window)
            within = self._within(level)
            trace = WindowTrace(
                within.profiler(),
                lambda finished: within._save(run, window, finished),  # noqa: SLF001 of this class
                level.active_steps,
            )
            with ExitStack() as ranges:
                if self.record_module_names:
                    ranges.enter_context(module_ranges(run.model))
                    ranges.enter_context(hook_ranges(run.model))
                parts = [part for part in run.parts() if part.action.startswith(_WITHIN)]
                listeners = (run.actions.listen, functools.partial(timed_parts, parts))
                trace.prepare(ranges, ranges.enter_context(action_ranges(*listeners)))
                try:
                    with yields_to_others(trace.profiler.profiler, lambda: self._give_way(run, window, trace)):
                        yield trace.on_mark
                finally:
                    trace.finish()
                    self._release(trace.profiler)
        finally:
            _KINETO.release()

    def _give_way(self, run: RunContext, window: Window, trace: WindowTrace) -> bool:
        was_running = True
        # The caller is the program's profiler: a failure here is none of its training's.
        with run.faults.caught(self.name, "mark", window.index):
            was_running = trace.finish()
        if was_running:
            run.note_unavailable(self.name, STARTED_PROFILER, window)
            log.info("window %d: %s", window.index, STARTED_PROFILER)
        return was_running

    def _release(self, profiler: profile) -> None:
        # The profile is in a reference cycle: its events would stay until the garbage collector runs.
        if self.on_trace_ready is None and profiler.profiler is not None:
            profiler.profiler.kineto_results = None

    def profiler(self, **more: Any) -> profile:
        """Return torch's profiler with these options, and with ``more`` keyword arguments."""
        if self.with_modules:
            more["with_modules"] = True  # deprecated in torch 2.15: never passed unless it is set
        return profile(
            activities=_activities(self.activities),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack or self.stacks_metric is not None,
            with_flops=self.with_flops,
            experimental_config=self.experimental_config,
            **self.options,
            **more,
        )

    def _within(self, level: TraceLevel) -> OperatorTrace:
        return replace(
            self,
            with_stack=self.with_stack and level.stack,
            stacks_metric=self.stacks_metric if level.stack else None,
            record_shapes=self.record_shapes and level.shapes,
        )

    def _save(self, run: RunContext, window: Window, trace: WindowTrace) -> None:
        profiler = trace.profiler
        # At a URL, they are uploaded from the run's root.
        directory = (local_path(self.dirpath) if self.dirpath else None) or run.sink.place.root
        name = TraceName(
            stage=run.stage,
            filename=numbered(self.filename, run.sink.place.number),
            rank=run.rank,
            strategy=run.strategy,
            function=run.function,
            time_ns=time.time_ns(),
        )
        raw = run.sink.place.directory / series_path(window.index, run.rank, self.name)
        saved = TraceFile(raw.with_name(temporary_name(raw.name)), directory / str(name))
        size = saved.take(profiler) if self.export or self.on_trace_ready else None
        try:
            if self.stacks_metric is not None:
                stacks = directory / str(name).replace(".pt.trace.json.gz", ".stacks")
                with run.sink.file(
                    ArtifactSpec(path=stacks, type="blob", collector=self.name, window=window.index)
                ) as temporary:
                    profiler.export_stacks(str(temporary), self.stacks_metric)
            # Freeing millions of events takes seconds too.
            self._release(profiler)
            if size is not None:
                self._charge(run, window, trace, size)
            if self.on_trace_ready is not None:
                # Kineto saves a trace once; the user's export is a copy of ours.
                profiler.export_chrome_trace = saved.export  # type: ignore[method-assign]
                self.on_trace_ready(profiler)
        finally:
            run.in_background(lambda: self._compress(run, window, saved), collector=self.name, window=window)

    def _compress(self, run: RunContext, window: Window, saved: TraceFile) -> None:
        try:
            if self.export:
                path = self._write(run, window, saved)
                log.info("saved %s (%s)", path.name, format_bytes(path.stat().st_size))
        finally:
            with suppress(FileNotFoundError):
                saved.raw.unlink()

    def _write(self, run: RunContext, window: Window, saved: TraceFile) -> Path:
        """Compress a trace, or keep torch's JSON if the disk has no room for that; return its path."""
        try:
            with run.sink.file(
                ArtifactSpec(path=saved.trace, type="trace", collector=self.name, window=window.index)
            ) as temporary:
                write_trace(saved.raw, temporary)
        except Exception as error:  # noqa: BLE001 reported below, or raised again
            plain = saved.trace.with_suffix("")
            try:
                saved.raw.replace(plain)
            except OSError:
                raise error from None
            run.sink.list_artifact(ArtifactSpec(path=plain, type="trace", collector=self.name, window=window.index))
            run.faults.report(self.name, "write", window.index, error)
            return plain
        return saved.trace

    def _charge(self, run: RunContext, window: Window, trace: WindowTrace, size: int) -> None:
        """Add the cost of a trace, and warn if it is dangerous."""
        export = Export(
            window=window.index,
            seconds=(time.perf_counter_ns() - trace.stopping_ns) / 1e9,
            bytes=size,
            steps=trace.steps,
            stack=self.with_stack or self.stacks_metric is not None,
            shapes=self.record_shapes,
        )
        run.sink.manifest.append("export", window=export.window, seconds=round(export.seconds, 6), bytes=export.bytes)
        for message in run.ledger.charge(export):
            run.sink.manifest.append(NoteRow(collector=self.name, message=message))
            log.warning("rank %d: %s", run.rank, message)


def _activities(names: Sequence[str | ProfilerActivity] | None) -> list[ProfilerActivity] | None:
    if names is None:
        return None
    if isinstance(names, str):
        raise ConfigError(f"OperatorTrace(activities={names!r}): must be a list, as in [{names!r}]")
    known = ProfilerActivity.__members__
    found: list[ProfilerActivity] = []
    for name in names:
        member = known.get(name.upper()) if isinstance(name, str) else name
        if not isinstance(member, ProfilerActivity):
            msg = f"OperatorTrace(activities={names!r}): {name!r} is unknown; use {', '.join(known).lower()}"
            raise ConfigError(msg)
        found.append(member)
    return found


def _plan(run: RunContext, window: Window) -> TraceLevel:
    """Return the contents of this window's trace, and note in the manifest if they are less than before."""
    level = run.ledger.level
    if (found := run.ledger.tighten()) is not None:
        change, reason = found
        level = run.ledger.level
        row = BudgetRow(window=window.index, level=change, active_steps=level.active_steps, reason=reason)
        run.sink.manifest.append(row)
        without = {"no_stack": "no Python stacks", "no_shapes": "no input shapes"}
        words = without.get(change) or format_count(level.active_steps or 0, "active step")
        log.info("window %d: the trace has %s, because %s", window.index, words, reason)
    return level


class NvtxRanges(Collector):
    """Every operator as an NVTX range for ``nsys`` or ``nvprof --profile-from-start off``, during the whole run."""

    name: ClassVar[str] = "nvtx"

    def unavailable(self, run: RunContext) -> str | None:
        """NVTX needs CUDA."""
        return None if run.device.type == "cuda" else "NVTX ranges need a CUDA device"

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:  # noqa: ARG002 overriding
        """Emit ranges until the end of the run."""
        with torch.cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx():  # type: ignore[no-untyped-call]
            yield None
