"""When to record: a pure function of the step number."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from lightning_memprof.errors import ConfigError

__all__ = ["Action", "Mark", "Point", "Schedule", "Window", "plan_window"]


class Action(Enum):
    """What the schedule asks for at one step; the members of ``torch.profiler.ProfilerAction`` under the same names."""

    NONE = 0
    WARMUP = 1
    RECORD = 2
    RECORD_AND_SAVE = 3


_LOOKAHEAD: Final = 100_000


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The cycle ``skip_first, wait, warmup, active, repeat``, counted in steps of this process from 0.

    Equal to ``torch.profiler.schedule`` with the same parameters for every step.

    Args:
        skip_first: steps to ignore once, before the first cycle.
        wait: steps to ignore at the start of every cycle.
        warmup: steps in which collectors run and what they see is thrown away.
        active: steps to record; one window.
        repeat: number of cycles; 0 repeats until the end of the run.
        skip_first_wait: 1 leaves out ``wait`` in the first cycle.
        anchor: ``"fit"`` counts across epochs, ``"epoch"`` starts the cycle again in each epoch.

    Raises:
        ConfigError: a number is negative, or ``active`` is 0.

    """

    skip_first: int = 0
    wait: int = 1
    warmup: int = 1
    active: int = 2
    repeat: int = 1
    skip_first_wait: int = 0
    anchor: Literal["fit", "epoch"] = "fit"

    def __post_init__(self) -> None:
        """Refuse what could never record."""
        for name, least in (
            ("skip_first", 0), ("wait", 0), ("warmup", 0), ("active", 1), ("repeat", 0), ("skip_first_wait", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                msg = f"Schedule({name}={value!r}): must be an integer of at least {least}"
                raise ConfigError(msg)
        if self.anchor not in ("fit", "epoch"):
            msg = f"Schedule(anchor={self.anchor!r}): must be 'fit' or 'epoch'"
            raise ConfigError(msg)

    def __call__(self, step: int) -> Action:
        """Decide what happens at ``step`` (0-based; since the start of the fit, or of the epoch: see ``anchor``)."""
        if step < self.skip_first:
            return Action.NONE
        step -= self.skip_first
        if self.skip_first_wait:
            step += self.wait
        length = self.wait + self.warmup + self.active
        if self.repeat and step >= self.repeat * length:
            return Action.NONE
        position = step % length
        if position < self.wait:
            return Action.NONE
        if position < self.wait + self.warmup:
            return Action.WARMUP
        return Action.RECORD if position < length - 1 else Action.RECORD_AND_SAVE

    @property
    def first_active(self) -> int:
        """The first step that is recorded."""
        return self.skip_first + (0 if self.skip_first_wait else self.wait) + self.warmup


class Point(str, Enum):
    """A place inside a step, in the order in which a training step passes them.

    The step starts with the fetch of its batch and ends where the next one starts; what happens at ``STEP_START`` and
    ``STEP_END`` is not counted as time of a step.
    """

    STEP_START = "step_start"
    BATCH_START = "batch_start"
    AFTER_FORWARD = "after_forward"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    BEFORE_OPTIMIZER_STEP = "before_optimizer_step"
    BATCH_END = "batch_end"
    STEP_END = "step_end"


@dataclass(frozen=True)
class Mark:
    """One moment of a step inside a window.

    Attributes:
        step: training batches seen by the run before this one.
        global_step: optimizer steps done by the run.
        point: the place inside the step.
        recorded: False in warmup steps, whose values are thrown away by whoever reads them.
        time_ns: Unix time in nanoseconds, monotonic within the process.

    """

    step: int
    global_step: int
    point: Point
    recorded: bool
    time_ns: int


@dataclass(frozen=True)
class Window:
    """A recorded stretch: the steps it will have if the run goes on long enough.

    Attributes:
        index: number of the window in its run, from 0.
        warmup: steps that warm up the collectors.
        active: steps that are recorded; empty, as ``warmup`` is, where a function of the user's is the schedule.

    """

    index: int
    warmup: tuple[int, ...]
    active: tuple[int, ...]


def plan_window(schedule: Schedule, count: int, *, step: int, index: int) -> Window:
    """Look ahead from a window's first step to its end.

    The look-ahead is bounded: a schedule that never saves gives the steps up to that bound.

    Args:
        schedule: decides by the schedule's own count.
        count: the schedule's count at the window's first step.
        step: the same step, counted since the start of the run.
        index: number of the window.

    """
    warmup: list[int] = []
    active: list[int] = []
    for ahead in range(_LOOKAHEAD):
        action = schedule(count + ahead)
        if action is Action.NONE or (action is Action.WARMUP and active):
            break
        (warmup if action is Action.WARMUP else active).append(step + ahead)
        if action is Action.RECORD_AND_SAVE:
            break
    return Window(index, tuple(warmup), tuple(active))
