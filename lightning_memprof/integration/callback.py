"""The callback, and its subclass that a Trainer gets by name or from the environment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TextIO

from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer

from lightning_memprof.capture.base import Collector
from lightning_memprof.capture.budget import Budget
from lightning_memprof.capture.triggers.watch import Triggers
from lightning_memprof.errors import ConfigError
from lightning_memprof.integration.adapter import Adapter
from lightning_memprof.integration.attachment import Attachment
from lightning_memprof.integration.background import print_page
from lightning_memprof.integration.live_run import LiveRun
from lightning_memprof.integration.loggers import send_report
from lightning_memprof.integration.profiler import ExtendedPyTorchProfiler
from lightning_memprof.integration.program_calls import ProgramCalls
from lightning_memprof.integration.registration import ENVIRONMENT_VARIABLE, options_fault, requested
from lightning_memprof.integration.settings import OutputOptions, Ranks, RunOptions, Settings
from lightning_memprof.schedule import Schedule, StageSchedules

_DEFAULT_SCHEDULE: Final = Schedule()
_DEFAULT_TRIGGERS: Final = Triggers()
_DEFAULT_BUDGET: Final = Budget()
_DEFAULT_OUTPUT: Final = OutputOptions()


class MemProfilerCallback(Adapter, ProgramCalls):
    """Records where a run spends its time and memory, and prints a summary at the end.

    Every step of the run adds one row to the pulse; the other collectors record inside the windows of ``schedule``.
    With :class:`ExtendedPyTorchProfiler` on the same Trainer both feed one run: the callback's schedule leads, and the
    profiler's options apply to the operator trace.

    Args:
        schedule: when windows open; a :class:`Schedule`, a mapping of its fields, a function from step to
            ``torch.profiler.ProfilerAction``, or :class:`StageSchedules` with a schedule for each stage.
        collectors: the collectors to use. ``"default"`` in the list stands for the default set, as in
            ``["default", MyCollector()]``; a collector of the same name replaces one of the set. None is the default
            set, as far as it is available: ``Pulse``, ``HostMemory``, ``AllocatorStats``, ``HookTimings``,
            ``GarbageCollection``, ``SystemStats``, ``Throughput``, ``AllocatorHistory``, ``FunctionMemory``,
            ``SavedTensors``, ``Holders``, ``Hangs``, ``OOMAutopsy`` and ``OperatorTrace``.
        ranks: global ranks that record windows with every collector: ``"all"``, ``"none"``, a list, a count (the
            first N), ``{"every": N}``; None is all of up to 8, else the first of each node. The other ranks use only
            collectors that are cheap enough for every rank.
        triggers: requests for windows outside the schedule; :class:`Triggers`.
        budget: limits on the cost of traces; :class:`Budget`.
        output: destination of the results, and the policy for failing collectors; :class:`OutputOptions`.

    Raises:
        ConfigError: a value is invalid.
    """

    def __init__(
        self,
        schedule: Schedule | StageSchedules | Callable[[int], Any] = _DEFAULT_SCHEDULE,
        collectors: Sequence[Collector | Literal["default"]] | None = None,
        ranks: Ranks = None,
        triggers: Triggers = _DEFAULT_TRIGGERS,
        budget: Budget = _DEFAULT_BUDGET,
        output: OutputOptions = _DEFAULT_OUTPUT,
    ) -> None:
        super().__init__()
        self._options = RunOptions(
            schedule=schedule, collectors=collectors, ranks=ranks, triggers=triggers, budget=budget, output=output
        )
        ProgramCalls.__init__(self)
        self._has_ended = False

    def settings(self, trainer: Trainer) -> Settings:
        """Return the settings; the profiler adds its collectors."""
        others = [other for other in trainer.callbacks if isinstance(other, MemProfilerCallback)]  # type: ignore[attr-defined]
        if len([other for other in others if not other.steps_aside(trainer)]) > 1:
            raise ConfigError("the Trainer has more than one MemProfilerCallback; give it one, with all collectors")
        profiler = trainer.profiler  # type: ignore[attr-defined]
        extended = profiler if isinstance(profiler, ExtendedPyTorchProfiler) else None
        stage = str(getattr(trainer.state.fn, "value", "fit"))
        if extended is None:
            return self._options.settings(stage)
        return self._options.settings(stage, extended.lend(), extended.table)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Claim a directory and prepare the run."""
        super().setup(trainer, pl_module, stage)
        if self.attachment is not None:
            self._named.place(self.attachment.place.directory, trainer.global_rank)

    def summary_file(self) -> TextIO | None:
        """Return the stream for the summary; None is standard output."""
        return None

    def ended(self, trainer: Trainer, attachment: Attachment, reason: str | None) -> None:
        """Print the page or the line."""
        is_first, self._has_ended = not self._has_ended, True
        if isinstance(profiler := trainer.profiler, ExtendedPyTorchProfiler):  # type: ignore[attr-defined]
            profiler.take(attachment)
        if not trainer.is_global_zero:
            return
        if self._options.output.loggers:
            send_report(trainer, attachment.run.sink)
        summary = self._options.output.summary
        if summary is None:
            summary = True if is_first or attachment.run.stage == "fit" else "line"
        print_page(attachment.place, summary, self.summary_file() if reason is None else sys.stderr)

    @property
    def _live(self) -> LiveRun | None:
        """The run that is recorded now."""
        return self.attachment


class AttachedCallback(MemProfilerCallback):
    """The callback of ``profiler="memprof"`` and of the environment; it defers to the program's own callback."""

    def summary_file(self) -> TextIO | None:
        """Return standard error if the environment attaches the callback: the program's output has readers."""
        return None if requested() is None else sys.stderr

    def steps_aside(self, trainer: Trainer) -> bool:
        """Whether the program has a MemProfilerCallback of its own."""
        return any(
            isinstance(other, MemProfilerCallback)
            and not isinstance(other, AttachedCallback)
            and not other.steps_aside(trainer)
            for other in trainer.callbacks  # type: ignore[attr-defined]
        )


def load_options(path: Path) -> dict[str, Any]:
    """Read arguments of :class:`MemProfilerCallback` from a YAML file.

    Raises:
        ConfigError: the file is missing or a value is invalid.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(MemProfilerCallback)
    options: dict[str, Any] = {}
    try:
        fault = options_fault(path)
        options = {} if fault else dict(parser.instantiate_classes(parser.parse_path(str(path))))
    except Exception as error:  # noqa: BLE001 jsonargparse raises several kinds, each with the traceback of its attempts
        fault = str(error) or type(error).__name__
    if fault:
        raise ConfigError(
            f"{ENVIRONMENT_VARIABLE}={path}: {' '.join(fault.split())}; "
            "use a YAML file of MemProfilerCallback's options, or 1"
        )
    return options
