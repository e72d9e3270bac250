"""What an adapter wants of a run, and what users may write for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from lightning_memprof.analysis.trace.operators import TableOptions
from lightning_memprof.capture.base import Collector
from lightning_memprof.capture.budget import Budget
from lightning_memprof.capture.collectors.allocator_history import AllocatorHistory
from lightning_memprof.capture.collectors.allocator_stats import AllocatorStats
from lightning_memprof.capture.collectors.functions import FunctionMemory
from lightning_memprof.capture.collectors.garbage import GarbageCollection
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
from lightning_memprof.integration.output import OutputOptions
from lightning_memprof.integration.ranks import Ranks
from lightning_memprof.schedule import Action, Schedule, StageSchedules

__all__ = ["Settings", "as_list", "as_schedule", "default_collectors", "joined"]


# Part of a file's name; what reads the run directory knows it by the same pattern.
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an adapter wants of a run.

    Attributes:
        schedule: decides by the count of steps.
        collectors: in the order in which they are told; by name, whether the user asked for them.
        ranks: which ranks record windows with every collector.
        every_collector: whether this rank is one of them.
        triggers: what opens windows besides the schedule.
        budget: what traces may cost.
        output: where results go, and the policy for failing collectors.
        table: how the operator table is made.

    """

    schedule: Callable[[int], Action]
    collectors: Sequence[tuple[Collector, bool]]
    ranks: Ranks = None
    every_collector: bool = True
    triggers: Triggers = field(default_factory=Triggers)
    budget: Budget = field(default_factory=Budget)
    output: OutputOptions = field(default_factory=OutputOptions)
    table: TableOptions = field(default_factory=TableOptions)


def default_collectors() -> list[Collector]:
    """Return the default set; what is not available in a run is left out of it there."""
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
        OOMAutopsy(),
        OperatorTrace(profile_memory=True),
    ]


def joined(asked: Sequence[Collector] | None, lent: Sequence[Collector]) -> list[tuple[Collector, bool]]:
    """Join a callback's collectors with those that a profiler lends; what the callback names wins.

    Args:
        asked: named by the user; None is the default set.
        lent: by the profiler.

    Raises:
        ConfigError: two of the user's collectors have one name.

    Returns:
        Collectors in the order in which they are told, the operator trace last, so that it holds the others' work at
        no mark; and whether the user asked for each.

    """
    for collector in asked or ():
        name = getattr(collector, "name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            msg = f"{type(collector).__name__}.name = {name!r}: must be 1 to 64 of letters, digits, '_' and '-'"
            raise ConfigError(msg)
    names = [collector.name for collector in asked or ()]
    if twice := {name for name in names if names.count(name) > 1}:
        msg = f"collectors holds {', '.join(sorted(twice))} more than once; leave one"
        raise ConfigError(msg)
    chosen = {
        collector.name: (collector, asked is not None)
        for collector in (default_collectors() if asked is None else asked)
    }
    for collector in lent:
        if asked is None or collector.name not in chosen:
            chosen[collector.name] = (collector, False)
    return sorted(chosen.values(), key=lambda entry: entry[0].marks_last)


def as_list(option: str, value: Any) -> Sequence[Any] | None:
    """Refuse what is no list.

    Raises:
        ConfigError: ``value`` is something else, and not None.

    """
    if value is not None and not isinstance(value, (list, tuple)):
        msg = f"{option}={value!r}: must be a list, as in {option}=[...], or None"
        raise ConfigError(msg)
    return value


def as_schedule(value: Any, stage: str = "fit") -> Callable[[int], Action]:
    """Turn what users may give into the schedule of one stage.

    Args:
        value: a :class:`Schedule`, a mapping of its fields, a function from step to ``torch.profiler.ProfilerAction``
            or :class:`Action`, :class:`StageSchedules`, or None, which records every step.
        stage: ``fit``, ``validate``, ``test`` or ``predict``.

    Raises:
        ConfigError: it is something else.

    """
    if value is None:
        return lambda _step: Action.RECORD
    if isinstance(value, Schedule):
        return value
    if isinstance(value, StageSchedules):
        return value.of(stage)
    if isinstance(value, Mapping):
        return _from_mapping(value, stage)
    if callable(value) and not isinstance(value, type):
        try:
            first = value(0)
        except Exception as error:
            msg = f"schedule={value!r}: fails for step 0 ({type(error).__name__}: {error})"
            raise ConfigError(msg) from error
        if not isinstance(first, (Action, torch.profiler.ProfilerAction)):
            msg = f"schedule={value!r}: returns {first!r}, a torch.profiler.ProfilerAction is expected"
            raise ConfigError(msg)
        return lambda step: Action[value(step).name]
    msg = f"schedule={value!r}: must be a Schedule, a mapping of its fields, StageSchedules, or a function of the step"
    raise ConfigError(msg)


def _from_mapping(value: Mapping[str, Any], stage: str) -> Callable[[int], Action]:
    try:
        if value and set(value) <= set(StageSchedules.__dataclass_fields__):
            by_stage = {
                name: Schedule(**options) if isinstance(options, Mapping) else options
                for name, options in value.items()
            }
            return StageSchedules(**by_stage).of(stage)
        return Schedule(**value)
    except TypeError as error:
        fields, stages = ", ".join(Schedule.__dataclass_fields__), ", ".join(StageSchedules.__dataclass_fields__)
        msg = f"schedule={value!r}: {error}; its fields are {fields}, or each stage has its own under {stages}"
        raise ConfigError(msg) from error
