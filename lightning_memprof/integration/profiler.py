"""The profiler of ``Trainer(profiler="memprof")`` and ``Trainer(profiler="fts_extended")``."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerAction

from lightning_memprof.account.trace.operators import (
    AVAILABLE_SORT_KEYS,
    TableOptions,
    table_path,
    write_operator_table,
)
from lightning_memprof.artifacts.remote import local_path
from lightning_memprof.capture.base import Collector
from lightning_memprof.capture.collectors.allocator_history import AllocatorHistory
from lightning_memprof.capture.collectors.hook_timings import HookTimings
from lightning_memprof.capture.collectors.oom import OOMAutopsy
from lightning_memprof.capture.collectors.operator_trace import DEFAULT_FILENAME, NvtxRanges, OperatorTrace
from lightning_memprof.capture.collectors.pulse import Pulse
from lightning_memprof.capture.faults import describe as fault_text
from lightning_memprof.capture.sources.kineto import plain_directory
from lightning_memprof.capture.torch_internals import _profiler_enabled
from lightning_memprof.errors import ConfigError
from lightning_memprof.integration.adapter import Adapter
from lightning_memprof.integration.attachment import Attachment, end_abandoned
from lightning_memprof.integration.settings import (
    OutputOptions,
    Ranks,
    Settings,
    check_ranks,
    parse_schedule,
    schedule_of,
)
from lightning_memprof.logs import logger_of
from lightning_memprof.schedule import Schedule, StageSchedules
from lightning_memprof.units import quoted

log = logger_of(__name__)

_DEFAULT_SCHEDULE: Final = Schedule()
# A Trainer has actions before `setup`, after an exception, and in `save_checkpoint` after a run.
_OF_TRAINERS: Final = ("[LightningModule]", "[LightningDataModule]", "[Callback]", "[Strategy]")
_TRACE_OPTIONS = frozenset(
    ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules", "activities",
     "experimental_config", "on_trace_ready")
)  # fmt: skip


class ExtendedPyTorchProfiler(PyTorchProfiler):
    """Lightning's PyTorchProfiler with a repeating schedule in every stage, and no overhead outside its windows.

    It takes the arguments of :class:`lightning.pytorch.profilers.PyTorchProfiler` and those below. With a
    :class:`MemProfilerCallback` on the same Trainer, the callback's schedule leads and this profiler's options
    apply to the operator trace. Without a Trainer it records from the first ``profile(action)`` to ``describe()``, and
    ``function_events`` are the events of that recording; those of a run are in its traces.

    Args:
        dirpath: directory for traces and tables, made absolute immediately; None is the Trainer's ``log_dir``.
        filename: middle part of the file names; if given, a run of one process also writes Lightning's
            ``{stage}-{filename}.txt``.
        group_by_input_shapes: one row per shape in the operator table; needs ``record_shapes=True``.
        emit_nvtx: emit NVTX ranges for an outer profiler instead of recording a trace.
        export_to_chrome: write traces; in a run, the operator table is made from them.
        row_limit: rows of the operator table; -1 is all.
        sort_by_key: sort key of the operator table; every key of torch's table is accepted.
        record_module_names: record module forwards by name in the trace.
        table_kwargs: further arguments of torch's table: ``max_src_column_width``, ``max_name_column_width``,
            ``max_shapes_column_width``, ``header``, ``top_level_events_only``, and ``include_python_functions`` of
            ``key_averages()``, whose default is torch's.
        schedule: when windows open; a :class:`Schedule`, a mapping of its fields, a function from step to
            ``torch.profiler.ProfilerAction``, or :class:`StageSchedules` with a schedule for each stage. From Python
            also None, which records every step.
        schedule_cfg: another name for ``schedule``.
        ranks: global ranks that record windows with every collector, as in :class:`MemProfilerCallback`.
        max_name_column_width: width of the operator table's first column.
        profiler_kwargs: arguments of ``torch.profiler.profile``; ``export_to_flame_graph`` and ``metric`` as in
            Lightning.

    Raises:
        ConfigError: a value is invalid.
    """

    AVAILABLE_SORT_KEYS = set(AVAILABLE_SORT_KEYS)  # noqa: RUF012 Lightning's name and type
    idle_actions: ClassVar[bool] = True

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = DEFAULT_FILENAME,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: dict[str, Any] | None = None,
        schedule: Schedule | StageSchedules | Callable[[int], Any] = _DEFAULT_SCHEDULE,
        schedule_cfg: Schedule | dict[str, Any] | None = None,
        ranks: Ranks = None,
        max_name_column_width: int = 55,
        **profiler_kwargs: Any,
    ) -> None:
        self._traces: tuple[Path, ...] = ()
        table_kwargs = dict(table_kwargs or {})
        # Lightning knows the arguments of torch's table alone; this one is of `key_averages()`.
        default = "include_python_functions" not in inspect.signature(EventList.key_averages).parameters
        python_functions = table_kwargs.pop("include_python_functions", default)
        super().__init__(
            dirpath=dirpath if dirpath is None or isinstance(dirpath, str) else Path(dirpath),
            filename=filename or DEFAULT_FILENAME,
            group_by_input_shapes=group_by_input_shapes,
            emit_nvtx=emit_nvtx,
            export_to_chrome=export_to_chrome,
            row_limit=row_limit,
            sort_by_key=sort_by_key,
            record_module_names=record_module_names,
            table_kwargs={"max_name_column_width": max_name_column_width, **table_kwargs},
            **profiler_kwargs,
        )
        # Lightning's wrapper of a schedule ignores its `repeat`, and its export fails for stacks: ours have both.
        self._schedule, self._has_on_trace_ready = None, True
        # A strategy that spawns its ranks pickles the profiler, and torch's schedule is a local function.
        self._profiler_kwargs.pop("schedule", None)
        self._is_named = filename not in {None, DEFAULT_FILENAME}
        # YAML passes every default: a value that equals its default counts as unset.
        if schedule_cfg is not None and schedule != _DEFAULT_SCHEDULE:
            raise ConfigError("schedule and schedule_cfg are two names of the same option; use one")
        self._chosen_schedule = parse_schedule(schedule if schedule_cfg is None else schedule_cfg)
        self._ranks = check_ranks(ranks)
        self._trace = self._operator_trace(profiler_kwargs)
        self.table = TableOptions(
            sort_by=self._sort_by_key,
            row_limit=row_limit,
            group_by_input_shapes=self._group_by_input_shapes,
            include_python_functions=python_functions,
            **self._table_kwargs,
        )

    @property
    def table_path(self) -> Path | None:
        """Path of the operator table of the last run; None before the first, and where its traces were removed.

        The first use writes it, unless a report has: seconds for large traces.

        Raises:
            ArtifactError: the traces have no operators.
        """
        path = table_path(self._traces[-1]) if self._traces else None
        if path is None or path.exists():
            return path
        if not all(trace.exists() for trace in self._traces):
            return None
        write_operator_table(self._traces, path, self.table)
        return path

    def start(self, action_name: str) -> None:
        """Record an action outside of a Trainer; during a run, a tap on this instance listens to the actions."""
        if self.profiler is None:
            if self._is_trainers(action_name):
                return
            if _profiler_enabled():
                warnings.warn(f"{action_name!r} is not recorded: another torch profiler is running", stacklevel=2)
                return
            self._traces, self.function_events = (), None
        super().start(action_name)

    def stop(self, action_name: str) -> None:
        """End an action that :meth:`start` records."""
        if self._recording_map:
            super().stop(action_name)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Lend the collectors to the Trainer's MemProfilerCallback; without one, record alone."""
        try:
            # A recording that the program began outside ends here.
            self._delete_profilers()
        except Exception as error:  # noqa: BLE001 nothing of ours may stop the training
            log.warning("the recording before this run cannot be saved (%s)", fault_text(error))
            self.profiler = None
        self._stage = stage
        self._local_rank = local_rank
        if not self._export_to_chrome and not self._emit_nvtx and local_rank in (None, 0):
            log.warning(
                "export_to_chrome=False: without traces there is no operator table; "
                "use True and delete the traces afterwards"
            )
        trainer = self._trainer()
        if trainer is not None:
            # Its host leaves the Trainer with it.
            end_abandoned(trainer)
        callbacks = () if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
        adapters = (callback for callback in callbacks if isinstance(callback, Adapter))
        if trainer is None or not all(adapter.steps_aside(trainer) for adapter in adapters):
            return
        trainer.callbacks.append(_ProfilerHost(self))  # type: ignore[attr-defined]

    def lend(self) -> list[Collector]:
        """Return this profiler's collectors: hook timings, allocator history, and the operator trace or NVTX ranges."""
        lent: list[Collector] = [HookTimings(), AllocatorHistory()]
        return [*lent, NvtxRanges() if self._emit_nvtx else self._trace]

    def own_settings(self) -> Settings:
        """Return the settings of a run that this profiler records alone."""
        return Settings(
            schedule=schedule_of(self._chosen_schedule, self._stage or "fit"),
            collectors=[(collector, False) for collector in (Pulse(), OOMAutopsy(), *self.lend())],
            ranks=self._ranks,
            output=OutputOptions(dirpath=self._trace.dirpath),
            table=self.table,
            fits_short_runs=self._chosen_schedule == _DEFAULT_SCHEDULE,
        )

    def take(self, attachment: Attachment) -> None:
        """Keep the paths of the traces of a run that has ended."""
        self._traces = tuple(artifact.path for artifact in attachment.run.sink.artifacts if artifact.type == "trace")
        self.function_events = None

    def summary(self) -> str:
        """Return the operator table of the last recording, with Lightning's heading."""
        if (path := self.table_path) is None:
            return super().summary()
        return self._stats_to_str({"records": path.read_text(encoding="utf-8")})

    def describe(self) -> None:
        """Write the table of a recording outside of a Trainer; of a run, Lightning's file if it has a name of yours."""
        if self.profiler is not None or self.function_events is not None:
            super().describe()
        elif self._is_named and self._local_rank is None and (table := self.table_path) is not None:
            copy = table.with_name(self._prepare_filename())
            try:
                with copy.open("a", encoding="utf-8") as file:
                    file.write(self.summary())
            except OSError as error:
                log.warning("%s cannot be written (%s)", copy, fault_text(error))

    def teardown(self, stage: str | None) -> None:
        """End a recording outside of a Trainer; works after an ``__init__`` that failed."""
        if hasattr(self, "_recording_map"):
            super().teardown(stage)

    def _trainer(self) -> Trainer | None:
        try:
            return getattr(self._lightning_module, "_trainer", None)
        except ReferenceError:  # Lightning keeps a weak proxy of the last run's module
            self._lightning_module = None
            return None

    def _is_trainers(self, action_name: str) -> bool:
        if (trainer := self._trainer()) is not None and (
            trainer.state.status == "running" or action_name == "save_checkpoint"
        ):
            return True
        return action_name.startswith(_OF_TRAINERS)

    def _create_profiler(self, profiler: type[Any]) -> Any:
        """Return the profiler of a recording outside of a Trainer, which the default schedule does not limit."""
        if self._emit_nvtx:
            return super()._create_profiler(profiler)
        plain = self._chosen_schedule in (_DEFAULT_SCHEDULE, parse_schedule(None))
        schedule = None if plain else schedule_of(self._chosen_schedule, "fit")
        return self._trace.profiler(
            schedule=None if schedule is None else lambda step: ProfilerAction[schedule(step).name],
            on_trace_ready=self._trace.on_trace_ready or self._export,
        )

    def _export(self, profiler: torch.profiler.profile) -> None:
        """Write the trace of a recording outside of a Trainer into ``dirpath``, if it is a directory."""
        if self.dirpath is None or (directory := local_path(self._trace.dirpath or "")) is None:
            return
        if self._export_to_chrome:
            with plain_directory(directory) as plain:
                torch.profiler.tensorboard_trace_handler(plain, self._prepare_filename(extension=""))(profiler)
        if self._trace.stacks_metric is not None:
            profiler.export_stacks(
                str(directory / self._prepare_filename(extension=".stack")), self._trace.stacks_metric
            )

    def _operator_trace(self, profiler_kwargs: dict[str, Any]) -> OperatorTrace:
        asked = {name: value for name, value in profiler_kwargs.items() if name in _TRACE_OPTIONS}
        known = set(inspect.signature(torch.profiler.profile).parameters) - _TRACE_OPTIONS - {"schedule"}
        flames = profiler_kwargs.get("export_to_flame_graph", False)
        return OperatorTrace(
            **asked,
            record_module_names=self._record_module_names,
            export=self._export_to_chrome,
            stacks_metric=profiler_kwargs.get("metric", "self_cpu_time_total") if flames else None,
            filename=str(self.filename),
            dirpath=None if self.dirpath is None else os.fspath(self.dirpath),
            options={name: value for name, value in profiler_kwargs.items() if name in known},
        )


class _ProfilerHost(Adapter):
    """The adapter of a profiler that records alone; it is removed from the Trainer at the end of the run."""

    def __init__(self, profiler: ExtendedPyTorchProfiler) -> None:
        super().__init__()
        self._profiler = profiler

    def settings(self, trainer: Trainer) -> Settings:
        """Return the settings of the profiler."""
        return self._profiler.own_settings()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare the run, or leave the Trainer where this run is not recorded."""
        super().setup(trainer, pl_module, stage)
        if self.attachment is None:
            self._leave(trainer)

    def ended(self, trainer: Trainer, attachment: Any, reason: str | None) -> None:
        """Leave the Trainer."""
        self._profiler.take(attachment)
        place = attachment.place.location
        log.info("recorded in %s; show it with: lightning-memprof show %s", place, quoted(place))
        self._leave(trainer)

    def _leave(self, trainer: Trainer) -> None:
        # A new list: Lightning is iterating over the old one.
        trainer.callbacks = [other for other in trainer.callbacks if other is not self]  # type: ignore[attr-defined]
