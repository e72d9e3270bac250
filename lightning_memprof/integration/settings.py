"""The settings of a run: schedule, collectors, ranks and output, and the values that users may pass for them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from lightning_memprof.account.trace.operators import TableOptions
from lightning_memprof.artifacts.remote import check_url, is_url
from lightning_memprof.capture.base import Collector
from lightning_memprof.capture.budget import Budget
from lightning_memprof.capture.collectors.allocator_history import AllocatorHistory
from lightning_memprof.capture.collectors.allocator_stats import AllocatorStats
from lightning_memprof.capture.collectors.functions import FunctionMemory
from lightning_memprof.capture.collectors.garbage import GarbageCollection
from lightning_memprof.capture.collectors.hangs import Hangs
from lightning_memprof.capture.collectors.holders import Holders
from lightning_memprof.capture.collectors.hook_timings import HookTimings
from lightning_memprof.capture.collectors.host import HostMemory
from lightning_memprof.capture.collectors.oom import OOMAutopsy
from lightning_memprof.capture.collectors.operator_trace import OperatorTrace
from lightning_memprof.capture.collectors.pulse import Pulse
from lightning_memprof.capture.collectors.saved_tensors import SavedTensors
from lightning_memprof.capture.collectors.system import SystemStats
from lightning_memprof.capture.collectors.throughput import Throughput
from lightning_memprof.capture.triggers.watch import Triggers
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Action, Schedule, StageSchedules

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

DEFAULT: Final = "default"
Choice = Collector | Literal["default"]
Ranks = Literal["all", "none"] | int | list[int] | dict[str, int] | None

# With more ranks, files would strain a shared file system, and exceed the amount that people read.
_FEW_RANKS: Final = 8
# `Path` drops one of the two slashes of a URL.
_MANGLED: Final = re.compile(r"[a-z][a-z0-9+.:-]+:/[^/]")
# Part of a file name; readers of the run directory use the same pattern.
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Destination of the results of a run, and the policy for failing collectors.

    Args:
        dirpath: parent of the ``memprofiler`` directory; None is the Trainer's ``log_dir``. ``~`` is expanded, and a
            relative path is made absolute in ``setup``. Also an fsspec URL (``s3://``, ``gs://``, ``memory://``): files
            are written locally and copied there in the background.
        summary: print the page on rank 0 at the end of a run: True, False, or ``"line"``, one line with the verdict and
            the command that shows the page. None is the page for each fit and for the first run of the callback, and
            the line for a validate, test or predict after another run. After an exception they go to standard error.
        loggers: send the report files to the Trainer's loggers that accept files: TensorBoard (as text), MLflow, W&B.
        curves: log curves of the pulse during fit: to the Trainer's loggers on rank 0, and to TensorBoard event files
            in the run directory for other ranks, and for rank 0 without a TensorBoard logger. Points are maxima.
        report: write the HTML report, ``report.html`` in the run directory, after fit, in a separate process;
            ``lightning-memprof report RUN`` writes the same later.
        on_error: ``"warn"`` disables a failing collector and training continues; ``"raise"`` is for tests.

    Raises:
        ConfigError: a value is invalid.
    """

    dirpath: str | Path | None = None
    summary: bool | Literal["line"] | None = None
    loggers: bool = False
    curves: bool = False
    report: bool = False
    on_error: Literal["warn", "raise"] = "warn"

    def __post_init__(self) -> None:
        """Check the values."""
        if self.summary not in (None, True, False, "line"):
            raise ConfigError(f"OutputOptions(summary={self.summary!r}): must be True, False, 'line' or None")
        if self.on_error not in ("warn", "raise"):
            raise ConfigError(f"OutputOptions(on_error={self.on_error!r}): must be 'warn' or 'raise'")
        if self.dirpath is not None and not isinstance(self.dirpath, str | os.PathLike):
            raise ConfigError(f"OutputOptions(dirpath={self.dirpath!r}): must be a path or a URL")
        if isinstance(self.dirpath, Path) and _MANGLED.match(str(self.dirpath)):
            raise ConfigError(
                f"OutputOptions(dirpath={self.dirpath!r}): a Path drops one '/' of a URL; give the URL as a string"
            )
        if isinstance(self.dirpath, str) and is_url(self.dirpath):
            check_url(self.dirpath)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run.

    Attributes:
        schedule: returns the action of a step count.
        collectors: in the order of their marks, and for each whether the user requires it.
        ranks: which ranks record windows with every collector.
        every_collector: whether this rank is one of them.
        triggers: requests for windows outside the schedule.
        budget: limits on the cost of traces.
        output: destination of the results, and the policy for failing collectors.
        table: options of the operator table.
        fits_short_runs: whether a run that is too short for the schedule records every step.
    """

    schedule: Callable[[int], Action]
    collectors: Sequence[tuple[Collector, bool]]
    ranks: Ranks = None
    every_collector: bool = True
    triggers: Triggers = field(default_factory=Triggers)
    budget: Budget = field(default_factory=Budget)
    output: OutputOptions = field(default_factory=OutputOptions)
    table: TableOptions = field(default_factory=TableOptions)
    fits_short_runs: bool = False


def default_collectors() -> list[Collector]:
    """Return the default set; a run leaves out the collectors that are not available there."""
    return [
        Pulse(),
        HostMemory(),
        AllocatorStats(),
        HookTimings(),
        GarbageCollection(),
        SystemStats(),
        Throughput(),
        AllocatorHistory(),
        FunctionMemory(),
        SavedTensors(),
        Holders(),
        Hangs(),
        OOMAutopsy(),
        OperatorTrace(profile_memory=True),
    ]


def check_collectors(asked: Any) -> Sequence[Choice] | None:
    """Check the user's choice of collectors and return it.

    Args:
        asked: a list of collectors, in which ``"default"`` stands for the default set; None is the default set.

    Raises:
        ConfigError: it is another value, a collector has an invalid name, or two have the same one.
    """
    if asked is None:
        return None
    if not isinstance(asked, (list, tuple)):
        raise ConfigError(f"collectors={asked!r}: must be a list, as in collectors=[...], or None")
    names: list[str] = []
    for entry in asked:
        if not isinstance(entry, Collector) and entry != DEFAULT:
            raise ConfigError(
                f"collectors contains {entry!r}: must be {DEFAULT!r} or a Collector, as in [{DEFAULT!r}, MyCollector()]"
            )
        name = getattr(entry, "name", None) if isinstance(entry, Collector) else DEFAULT
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{type(entry).__name__}.name = {name!r}: must be 1 to 64 of letters, digits, '_' and '-'"
            )
        names.append(name)
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"collectors contains {', '.join(sorted(twice))} more than once; keep one")
    return list(asked)


def joined(asked: Sequence[Choice] | None, lent: Sequence[Collector]) -> list[tuple[Collector, bool]]:
    """Join the collectors of a callback with those that a profiler lends.

    A collector of the user takes precedence over a lent one of the same name, and that over one of the default set.

    Args:
        asked: the user's choice, see :func:`check_collectors`.
        lent: collectors of the profiler.

    Returns:
        The collectors in the order of their marks, and whether the user requires each. The operator trace is last:
        it does not record the work of the others at a mark.
    """
    required = {collector.name: collector for collector in asked or () if isinstance(collector, Collector)}
    default = default_collectors() if asked is None or DEFAULT in asked else []
    chosen = {collector.name: collector for collector in (*default, *lent)}
    # The user's own come first, in their order.
    ordered = ({} if default else required) | chosen | required
    return sorted(
        ((collector, name in required) for name, collector in ordered.items()), key=lambda entry: entry[0].marks_last
    )


def parse_schedule(value: Any) -> StageSchedules | Callable[[int], Action]:
    """Return the schedule of all stages or of each stage from the value that a user passed; it can be pickled.

    Args:
        value: a :class:`Schedule`, a mapping of its fields, a function from step to ``torch.profiler.ProfilerAction``
            or :class:`Action`, :class:`StageSchedules`, or None, which records every step.

    Raises:
        ConfigError: it is another value.
    """
    if value is None:
        return _every_step
    if isinstance(value, (Schedule, StageSchedules)):
        return value
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if callable(value) and not isinstance(value, type):
        try:
            first = value(0)
        except Exception as error:
            raise ConfigError(f"schedule={value!r}: fails for step 0 ({type(error).__name__}: {error})") from error
        if not isinstance(first, (Action, torch.profiler.ProfilerAction)):
            raise ConfigError(f"schedule={value!r}: returns {first!r}, a torch.profiler.ProfilerAction is expected")
        return _UserFunction(value)
    raise ConfigError(
        f"schedule={value!r}: must be a Schedule, a mapping of its fields, StageSchedules, or a function of the step"
    )


def schedule_of(parsed: StageSchedules | Callable[[int], Action], stage: str) -> Callable[[int], Action]:
    """Return the schedule of ``fit``, ``validate``, ``test`` or ``predict``."""
    return parsed.of(stage) if isinstance(parsed, StageSchedules) else parsed


def _every_step(_step: int) -> Action:
    return Action.RECORD


@dataclass(frozen=True)
class _UserFunction:
    function: Callable[[int], Any]

    def __call__(self, step: int) -> Action:
        return Action[self.function(step).name]


def _from_mapping(value: Mapping[str, Any]) -> StageSchedules | Schedule:
    try:
        if value and set(value) <= set(StageSchedules.__dataclass_fields__):
            by_stage = {
                name: Schedule(**options) if isinstance(options, Mapping) else options
                for name, options in value.items()
            }
            return StageSchedules(**by_stage)
        return Schedule(**value)
    except TypeError as error:
        fields, stages = ", ".join(Schedule.__dataclass_fields__), ", ".join(StageSchedules.__dataclass_fields__)
        raise ConfigError(
            f"schedule={value!r}: {error}; its fields are {fields}, or each stage has its own under {stages}"
        ) from error


def check_ranks(ranks: Any) -> Any:
    """Check a choice of ranks and return it.

    Args:
        ranks: ``"all"``, ``"none"``, a list of global ranks, a count (that many from rank 0 on), ``{"every": N}``, or
            None: all of up to 8 ranks, else the first of each node.

    Raises:
        ConfigError: it is another value.
    """
    if isinstance(ranks, dict):
        good = list(ranks) == ["every"] and _is_count(ranks["every"])
    elif isinstance(ranks, (list, tuple)):
        good = True
        for rank in ranks:
            if type(rank) is not int or rank < 0:
                raise ConfigError(f"ranks={ranks!r}: {rank!r} is not a global rank; use integers from 0, or 'all'")
    else:
        good = ranks in (None, "all", "none") or _is_count(ranks)
    if not good:
        raise ConfigError(
            f"ranks={ranks!r}: must be 'all', 'none', a list of global ranks, a count of at least 1, "
            "{'every': N} with N of at least 1, or None"
        )
    return ranks


def is_chosen(ranks: Ranks, *, rank: int, world_size: int, local_rank: int) -> bool:
    """Return whether a rank records windows with every collector.

    Args:
        ranks: the choice, see :func:`check_ranks`.
        rank: the global rank.
        world_size: number of ranks.
        local_rank: number of the rank on its node, from 0.
    """
    if ranks is None:
        return world_size <= _FEW_RANKS or local_rank == 0
    if isinstance(ranks, str):
        return ranks == "all"
    if isinstance(ranks, int):
        return rank < ranks
    if isinstance(ranks, dict):
        return rank % ranks["every"] == 0
    return rank in ranks


def choice_note(ranks: Ranks, world_size: int) -> str | None:
    """Return a note on the choice for the report; None where every rank is chosen."""
    if ranks is None:
        if world_size <= _FEW_RANKS:
            return None
        return "windows have every collector on the first rank of each node; ranks='all' gives them to all"
    if all(is_chosen(ranks, rank=rank, world_size=world_size, local_rank=0) for rank in range(world_size)):
        return None
    return f"windows have every collector on these ranks only: ranks={ranks!r}"


@dataclass(kw_only=True)
class RunOptions:
    """The arguments of :class:`MemProfilerCallback`, with their checks and defaults.

    Raises:
        ConfigError: a value is invalid.
    """

    schedule: Any = field(default_factory=Schedule)
    collectors: Any = None
    ranks: Any = None
    triggers: Triggers = field(default_factory=Triggers)
    budget: Budget = field(default_factory=Budget)
    output: OutputOptions = field(default_factory=OutputOptions)

    def __post_init__(self) -> None:
        """Check the values."""
        self.schedule = parse_schedule(self.schedule)
        self.collectors = check_collectors(self.collectors)
        self.ranks = check_ranks(self.ranks)
        for name, kind in (("triggers", Triggers), ("budget", Budget), ("output", OutputOptions)):
            if not isinstance(value := getattr(self, name), kind):
                raise ConfigError(f"{name}={value!r}: must be a {kind.__name__}, as in {name}={kind.__name__}()")

    def settings(self, stage: str, lent: Sequence[Collector] = (), table: TableOptions | None = None) -> Settings:
        """Return the settings of a stage, with the collectors and the table options of a profiler."""
        return Settings(
            schedule=schedule_of(self.schedule, stage),
            collectors=joined(self.collectors, lent),
            ranks=self.ranks,
            triggers=self.triggers,
            budget=self.budget,
            output=self.output,
            table=table or TableOptions(),
        )


def for_this_rank(settings: Settings, *, rank: int, world_size: int, local_rank: int) -> Settings:
    """Return the settings of a rank: all collectors, or those that are cheap enough for every rank."""
    if is_chosen(settings.ranks, rank=rank, world_size=world_size, local_rank=local_rank):
        return settings
    light = [(collector, asked) for collector, asked in settings.collectors if collector.every_rank]
    return replace(settings, collectors=light, every_collector=False)


def group_timeout_seconds(trainer: Trainer) -> float | None:
    """Return the timeout of the process group; None where no other rank waits for this one."""
    timeout = getattr(trainer.strategy, "_timeout", None)
    return timeout.total_seconds() if trainer.world_size > 1 and isinstance(timeout, timedelta) else None


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1
