"""Windows that nobody planned: a file, a signal, a call, or something unusual asks for them."""

from __future__ import annotations

import logging
import os
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lightning_memprof.artifacts.naming import TRIGGER_PLAN, TRIGGER_REQUEST
from lightning_memprof.artifacts.trigger import (
    MOST_STEPS,
    Plan,
    Request,
    read_plan,
    read_request,
    write_plan,
    write_request,
)
from lightning_memprof.capture.triggers.anomalies import Anomaly
from lightning_memprof.capture.triggers.requests import Demand
from lightning_memprof.capture.triggers.signals import Usr2
from lightning_memprof.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_memprof.capture.base import RunContext, StepRecord
    from lightning_memprof.capture.triggers.anomalies import Watch

__all__ = ["TriggerWatch", "Triggers"]

log = logging.getLogger(__name__)

# Ranks of one job stay within a step or two of each other; the rest is for a file system that is slow to show a file.
_LEAD_STEPS: Final = 20


@dataclass(frozen=True, kw_only=True)
class Triggers:
    """What opens a window besides the schedule.

    Args:
        file: look once a step whether ``lightning-memprof trigger`` asks for a window.
        signal: SIGUSR2 opens a window on this rank.
        anomalies: what opens a window on this rank by itself.
        warmup: steps in which collectors run and what they see is thrown away.
        active: steps to record.

    Raises:
        ConfigError: a value is not usable.

    """

    file: bool = True
    signal: bool = True
    anomalies: list[Anomaly] = field(default_factory=list)
    warmup: int = 1
    active: int = 3

    def __post_init__(self) -> None:
        """Refuse what could never record."""
        check_steps("Triggers", "warmup", self.warmup, 0)
        check_steps("Triggers", "active", self.active, 1)
        if not isinstance(self.anomalies, (list, tuple)):
            msg = f"Triggers(anomalies={self.anomalies!r}): must be a list, as in anomalies=[SlowStep()]"
            raise ConfigError(msg)
        for anomaly in self.anomalies:
            if not isinstance(anomaly, Anomaly):
                msg = f"Triggers(anomalies=...) holds {anomaly!r}: must be instances of Anomaly, as in [SlowStep()]"
                raise ConfigError(msg)


def check_steps(owner: str, name: str, value: int, least: int) -> int:
    """Return a number of steps.

    Raises:
        ConfigError: it is none.

    """
    if type(value) is not int or not least <= value <= MOST_STEPS:
        msg = f"{owner}({name}={value!r}): must be an integer from {least} to {MOST_STEPS}"
        raise ConfigError(msg)
    return value


@dataclass
class _Watched:
    anomaly: Anomaly
    watch: Watch
    left: int


class TriggerWatch:
    """What asks for windows in one run of one rank; :class:`~lightning_memprof.capture.triggers.requests.Wishes`.

    A request is a file in the run directory. Rank 0 looks for it once a step, and writes a plan: which step, of its
    own step + 20. The other ranks look once a step for the plan. There is no collective, and no rank waits.

    Args:
        triggers: what is listened to.
        run: of this rank.

    Raises:
        ConfigError: an anomaly cannot be watched in this run.

    """

    def __init__(self, triggers: Triggers, run: RunContext) -> None:
        self._triggers = triggers
        self._run = run
        self._directory = run.sink.place.directory
        self._leads = run.rank == 0
        name = TRIGGER_REQUEST if self._leads else TRIGGER_PLAN
        self._looked_for = os.fspath(self._directory / name)
        self._file = triggers.file
        self._seen: tuple[int, int] | None = None
        self._plan: Plan | None = None
        self._usr2: Usr2 | None = None
        self._called: list[Demand] = []
        self._watched: list[_Watched] = []
        missing = [(anomaly, anomaly.unavailable(run)) for anomaly in triggers.anomalies]
        if refused := [f"{type(anomaly).__name__} ({reason})" for anomaly, reason in missing if reason is not None]:
            msg = f"cannot be watched in this run: {', '.join(refused)}; take it out of Triggers(anomalies=...)"
            raise ConfigError(msg)

    def start(self) -> None:
        """Begin to listen: for the signal, and to what is unusual."""
        if self._triggers.signal:
            usr2 = Usr2()
            reason = usr2.install()
            if reason is None:
                self._usr2 = usr2
            else:
                log.info("SIGUSR2 opens no window: %s", reason)
        for anomaly in self._triggers.anomalies:
            try:
                self._watched.append(_Watched(anomaly, anomaly.watch(self._run), anomaly.limit))
            except Exception as error:  # noqa: BLE001 an anomaly of anybody's must not stop the training
                self._run.faults.report(anomaly.name, "enter", None, error)

    def stop(self) -> None:
        """Listen no more; the signal's handler is as it was."""
        self._watched.clear()
        usr2, self._usr2 = self._usr2, None
        if usr2 is not None:
            usr2.remove()

    def call(self, active: int | None) -> None:
        """Want a window from inside the program: on all ranks where there are several, else at the next step."""
        cause = "MemProfilerCallback.trigger()"
        if self._run.world_size > 1 and self._file:
            try:
                write_request(self._directory, Request(uuid.uuid4().hex, cause, active))
            except OSError as error:
                log.warning("the other ranks cannot be told (%s): only rank %d records", error, self._run.rank)
            else:
                return
        self._called.append(self._demand(cause, active))

    def before_step(self, step: int) -> Iterable[Demand]:
        """Return what is wanted at or after ``step``; costs one ``os.stat``."""
        if self._file:
            try:
                status = os.stat(self._looked_for)  # noqa: PTH116 the time of a Path object is paid in every step
            except OSError:
                pass
            else:
                self._look(step, (status.st_mtime_ns, status.st_ino))
        if self._usr2 is not None and self._usr2.received:
            self._usr2.received = False
            self._called.append(self._demand("SIGUSR2", None))
        if not self._called:
            return ()
        called, self._called = self._called, []
        return called

    def after_step(self, record: StepRecord) -> None:
        """Ask what is unusual whether this step was; steps of windows are slow and large because of us."""
        if record.window is not None:
            return
        for watched in tuple(self._watched):
            try:
                said = watched.watch(record)
            except Exception as error:  # noqa: BLE001 an anomaly of anybody's must not stop the training
                self._watched.remove(watched)
                self._run.faults.report(watched.anomaly.name, "mark", None, error)
                continue
            if said is not None:
                self._called.append(self._demand(f"{type(watched.anomaly).__name__}: {said}", None))
                watched.left -= 1
                if watched.left <= 0:
                    self._watched.remove(watched)

    def _demand(self, cause: str, active: int | None) -> Demand:
        return Demand(cause, self._triggers.warmup, self._triggers.active if active is None else active)

    def _look(self, step: int, seen: tuple[int, int]) -> None:
        if seen == self._seen:
            return
        self._seen = seen
        try:
            if self._leads:
                self._answer(step)
            else:
                self._follow(step)
        except (ArtifactError, OSError) as error:
            log.warning("a window that was asked for is not recorded: %s", error)
            with suppress(OSError):
                self._run.sink.manifest.append("note", collector="triggers", message=f"not understood: {error}")

    def _answer(self, step: int) -> None:
        """Rank 0: decide at which step a window that is wanted opens, and write it down for all."""
        request = read_request(self._directory)
        if request is None:
            return
        plan, last = self._plan, self._last_step()
        if plan is not None and step <= last:
            # Several ranks may ask at once; they get one window.
            plan = Plan(request.id, plan.cause, plan.step, plan.warmup, plan.active, step)
        else:
            lead = _LEAD_STEPS if self._run.world_size > 1 else 0
            warmup = self._triggers.warmup if request.warmup is None else request.warmup
            active = self._triggers.active if request.active is None else request.active
            plan = Plan(request.id, request.cause, step + lead, warmup, active, step)
            self._called.append(Demand(plan.cause, plan.warmup, plan.active, plan.step))
        self._plan = plan
        try:
            write_plan(self._directory, plan)
        finally:
            # Where it cannot be removed it is known by its time.
            with suppress(OSError):
                os.unlink(self._looked_for)  # noqa: PTH108 as os.stat above

    def _last_step(self) -> int:
        return -1 if self._plan is None else self._plan.recorded[1]

    def _follow(self, step: int) -> None:
        """Other ranks: record where rank 0 says, or from now on where that is past."""
        plan = read_plan(self._directory)
        if plan is None:
            return
        known, self._plan = self._plan, plan
        if known is not None and known.step == plan.step:
            return
        cause = plan.cause
        if plan.step < step:
            cause = f"{cause}, planned for step {plan.step}, which this rank had passed when it saw the plan"
            log.warning("rank %d is at step %d: the window that was planned for step %d opens late", self._run.rank,
                        step, plan.step)  # fmt: skip
        self._called.append(Demand(cause, plan.warmup, plan.active, plan.step))
