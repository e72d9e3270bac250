"""The callback, and its subclass that a Trainer gets by name or from the environment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Literal, TextIO

import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer

from lightning_memprof.account.trace.operators import TableOptions
from lightning_memprof.artifacts.trace_rewriting import range_name
from lightning_memprof.capture.base import Collector, Position
from lightning_memprof.capture.budget import Budget
from lightning_memprof.capture.named_snapshots import NamedSnapshots, encodable
from lightning_memprof.capture.sources.growth import holders_of
from lightning_memprof.capture.triggers.watch import Triggers, check_steps
from lightning_memprof.errors import ConfigError, MemprofError
from lightning_memprof.integration.adapter import Adapter
from lightning_memprof.integration.attachment import Attachment
from lightning_memprof.integration.loggers import send_report
from lightning_memprof.integration.profiler import ExtendedPyTorchProfiler
from lightning_memprof.integration.registration import ENVIRONMENT_VARIABLE, options_fault, requested
from lightning_memprof.integration.settings import (
    OutputOptions,
    Ranks,
    Settings,
    check_collectors,
    check_ranks,
    joined,
    parse_schedule,
    schedule_of,
)
from lightning_memprof.logs import logger_of
from lightning_memprof.report.summary import print_summary
from lightning_memprof.schedule import Schedule, StageSchedules
from lightning_memprof.units import quoted

log = logger_of(__name__)

_DEFAULT_SCHEDULE: Final = Schedule()
_DEFAULT_TRIGGERS: Final = Triggers()
_DEFAULT_BUDGET: Final = Budget()
_DEFAULT_OUTPUT: Final = OutputOptions()


class MemProfilerCallback(Adapter):
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
        self._schedule = parse_schedule(schedule)
        self._collectors = check_collectors(collectors)
        self._ranks = check_ranks(ranks)
        for name, value, kind in (
            ("triggers", triggers, Triggers),
            ("budget", budget, Budget),
            ("output", output, OutputOptions),
        ):
            if not isinstance(value, kind):
                raise ConfigError(f"{name}={value!r}: must be a {kind.__name__}, as in {name}={kind.__name__}()")
        self._triggers = triggers
        self._budget = budget
        self._output = output
        self._named = NamedSnapshots()
        self._has_ended = False

    def settings(self, trainer: Trainer) -> Settings:
        """Return the settings; the profiler adds its collectors."""
        others = [other for other in trainer.callbacks if isinstance(other, MemProfilerCallback)]  # type: ignore[attr-defined]
        if len([other for other in others if not other.steps_aside(trainer)]) > 1:
            raise ConfigError("the Trainer has more than one MemProfilerCallback; give it one, with all collectors")
        profiler = trainer.profiler  # type: ignore[attr-defined]
        extended = profiler if isinstance(profiler, ExtendedPyTorchProfiler) else None
        return Settings(
            schedule=schedule_of(self._schedule, str(getattr(trainer.state.fn, "value", "fit"))),
            collectors=joined(self._collectors, () if extended is None else extended.lend()),
            ranks=self._ranks,
            triggers=self._triggers,
            budget=self._budget,
            output=self._output,
            table=TableOptions() if extended is None else extended.table,
        )

    def snapshot(self, name: str) -> None:
        """Record the current memory under ``name``, at any point of the program."""
        self._named.take(encodable(name), "snapshot", self._position())

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Record the memory at the start and the end of the body; in a window the trace has a range of this name."""
        name = encodable(name)
        in_window = self.attachment is not None and self.attachment.run.window is not None
        self._named.take(name, "start", self._position())
        try:
            with torch.profiler.record_function(range_name(name)) if in_window else nullcontext():
                yield
        finally:
            self._named.take(name, "end", self._position())

    def trigger(self, active: int | None = None, *, leaks: bool = False) -> None:
        """Record a window now, at any point of a training program; call it on one rank or on all ranks.

        With several ranks all of them open it at one step, at least 20 steps from now; alone it opens at the next.
        Without a live run, or on a rank that records nothing, nothing happens.

        Args:
            active: steps to record; None is what :class:`Triggers` says.
            leaks: search for the holders of memory that grows in the window, see :class:`Holders`.

        Raises:
            ConfigError: ``active`` is not a number of steps.
        """
        if active is not None:
            check_steps("trigger", "active", active, 1)
        if self.attachment is None:
            log.warning("trigger() has no effect: no run is being recorded")
            return
        self.attachment.triggers.call(active, leaks=leaks)

    def holders(self, wanted: Any) -> list[str]:
        """Return the holders of a tensor or another object, or of the objects of a type, with the source line.

        At any point of the program; takes up to 2 s and keeps nothing alive.

        Args:
            wanted: an object, or a type such as ``torch.Tensor``: then the most frequent holders come first.
        """
        return holders_of(wanted, None if self.attachment is None else self.attachment.run.model)

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
        place = attachment.place
        if self._output.loggers:
            send_report(trainer, attachment.run.sink)
        summary = self._output.summary
        if summary is None:
            summary = True if is_first or attachment.run.stage == "fit" else "line"
        if not summary:
            where = place.location
            log.info("recorded in %s; show it with: lightning-memprof show %s", where, quoted(where))
            return
        try:
            file = self.summary_file() if reason is None else sys.stderr
            print_summary(place.directory, file, url=place.url, is_line=summary == "line")
        except (MemprofError, OSError) as error:
            log.warning("the summary cannot be shown: %s", error)

    def _position(self) -> Position | None:
        return None if self.attachment is None else self.attachment.run.position


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
