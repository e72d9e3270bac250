"""When to record: a pure function of the step number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Final, Literal

from lightning_memprof.errors import ConfigError

__all__ = ["Action", "Mark", "Point", "Schedule", "StageSchedules", "Window", "no_window", "plan_window"]


class Action(Enum):
    """What the schedule asks for at one step; the members of ``torch.profiler.ProfilerAction`` under the same names."""

    NONE = 0
    WARMUP = 1
    RECORD = 2
    RECORD_AND_SAVE = 3


_LOOKAHEAD: Final = 100_000
_CYCLE: Final = {"skip_first": 0, "wait": 1, "repeat": 1, "skip_first_wait": 0}


def no_window(step: int) -> Action:  # noqa: ARG001 a schedule as any other
    """Decide never to record; the schedule of a stage that has none."""
    return Action.NONE


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The cycle ``skip_first, wait, warmup, active, repeat``, counted in steps of this process from 0; or listed steps.

    The cycle is equal to ``torch.profiler.schedule`` with the same parameters for every step. With ``steps`` a window
    of ``active`` steps begins at each of them, its ``warmup`` steps before that; a listed step that an earlier one's
    window records begins none.

    Args:
        skip_first: steps to skip once, before the first cycle.
        wait: steps to skip at the start of every cycle.
        warmup: steps in which collectors run and their data is discarded.
        active: steps to record; one window.
        repeat: number of cycles; 0 repeats until the end of the run.
        skip_first_wait: 1 omits ``wait`` in the first cycle.
        anchor: ``"fit"`` counts across epochs, ``"epoch"`` starts the cycle again in each epoch.
        steps: the steps at which windows begin, in place of the cycle; counted over the whole run, resumed parts
            included, or with ``anchor="epoch"`` from the start of each epoch.

    Raises:
        ConfigError: a number is negative, ``active`` is 0, or ``steps`` comes with a part of the cycle.
    """

    skip_first: int = 0
    wait: int = 1
    warmup: int = 1
    active: int = 2
    repeat: int = 1
    skip_first_wait: int = 0
    anchor: Literal["fit", "epoch"] = "fit"
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that record nothing."""
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
        self._check_steps()

    def _check_steps(self) -> None:
        given: Any = self.steps
        if not isinstance(given, (list, tuple)) or any(type(step) is not int or step < 0 for step in given):
            msg = f"Schedule(steps={self.steps!r}): must be a list of step numbers from 0, as in steps=[100, 2000]"
            raise ConfigError(msg)
        cycle = [name for name, default in _CYCLE.items() if getattr(self, name) != default]
        if self.steps and cycle:
            msg = f"Schedule(steps={self.steps!r}) says when windows begin: leave out {', '.join(cycle)}"
            raise ConfigError(msg)
        begins: list[int] = []
        for step in sorted(set(self.steps)):
            if not begins or step >= begins[-1] + self.active:
                begins.append(step)
        # Of the same value for a list and a tuple, and hashable.
        object.__setattr__(self, "steps", tuple(begins))

    def __call__(self, step: int) -> Action:
        """Return the action at ``step`` (0-based; since the start of the fit, or of the epoch: see ``anchor``)."""
        if self.steps:
            return self._listed(step)
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

    def _listed(self, step: int) -> Action:
        behind = bisect_right(self.steps, step)
        if behind and step < self.steps[behind - 1] + self.active:
            last = step == self.steps[behind - 1] + self.active - 1
            return Action.RECORD_AND_SAVE if last else Action.RECORD
        warms_up = behind < len(self.steps) and step >= self.steps[behind] - self.warmup
        return Action.WARMUP if warms_up else Action.NONE

    @property
    def windows(self) -> int:
        """Number of windows of a run, or with ``anchor="epoch"`` of an epoch, that is long enough; 0 is endless."""
        return len(self.steps) or self.repeat

    @property
    def first_active(self) -> int:
        """The first recorded step."""
        if self.steps:
            return self.steps[0]
        return self.skip_first + (0 if self.skip_first_wait else self.wait) + self.warmup


@dataclass(frozen=True, kw_only=True)
class StageSchedules:
    """A schedule for each stage; None is no window in that stage.

    Args:
        fit: of training.
        validate: of ``Trainer.validate``; validation inside fit belongs to fit.
        test: of ``Trainer.test``.
        predict: of ``Trainer.predict``.

    Raises:
        ConfigError: a value is not a :class:`Schedule`.
    """

    fit: Schedule | None = Schedule()
    validate: Schedule | None = Schedule()
    test: Schedule | None = Schedule()
    predict: Schedule | None = Schedule()

    def __post_init__(self) -> None:
        """Refuse values that are not schedules."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not isinstance(value, Schedule):
                msg = f"StageSchedules({field.name}={value!r}): must be a Schedule, or None for no window in that stage"
                raise ConfigError(msg)

    def of(self, stage: str) -> Callable[[int], Action]:
        """Return the schedule of ``fit``, ``validate``, ``test`` or ``predict``."""
        chosen: Schedule | None = getattr(self, stage)
        return no_window if chosen is None else chosen


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
        recorded: False in warmup steps, whose values readers discard.
        time_ns: Unix time in nanoseconds, monotonic within the process.
    """

    step: int
    global_step: int
    point: Point
    recorded: bool
    time_ns: int


@dataclass(frozen=True)
class Window:
    """A recorded stretch: the steps it will have if the run is long enough.

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
