"""Triggers of windows outside the schedule: a file, a signal, a call, or an anomaly."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_memprof.artifacts.trigger import MOST_STEPS
from lightning_memprof.capture.planner import WindowRequest
from lightning_memprof.capture.triggers.anomalies import Anomaly
from lightning_memprof.capture.triggers.requests import FileRequests
from lightning_memprof.capture.triggers.signals import Usr2
from lightning_memprof.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_memprof.capture.base import RunContext, StepRecord
    from lightning_memprof.capture.triggers.anomalies import Watch

__all__ = ["TriggerWatch", "Triggers", "check_steps"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Triggers:
    """Causes of windows outside the schedule.

    Args:
        file: check once a step whether ``lightning-memprof trigger`` requests a window.
        signal: SIGUSR2 opens a window on this rank.
        anomalies: anomalies that open a window on this rank.
        warmup: warmup steps, whose records are discarded.
        active: steps to record.

    Raises:
        ConfigError: a value is invalid.

    """

    file: bool = True
    signal: bool = True
    anomalies: list[Anomaly] = field(default_factory=list)
    warmup: int = 1
    active: int = 3

    def __post_init__(self) -> None:
        """Validate the values."""
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
        ConfigError: it is not an integer from ``least`` to the maximum.

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
    """The window requests of one run on one rank; a :class:`~lightning_memprof.capture.planner.RequestSource`.

    Args:
        triggers: the configuration.
        run: of this rank.

    Raises:
        ConfigError: an anomaly cannot be watched in this run.

    """

    def __init__(self, triggers: Triggers, run: RunContext) -> None:
        self._triggers = triggers
        self._run = run
        self._files = FileRequests(run, triggers.warmup, triggers.active) if triggers.file else None
        self._usr2: Usr2 | None = None
        self._requests: list[WindowRequest] = []
        self._watched: list[_Watched] = []
        missing = [(anomaly, anomaly.unavailable(run)) for anomaly in triggers.anomalies]
        if refused := [f"{type(anomaly).__name__} ({reason})" for anomaly, reason in missing if reason is not None]:
            msg = f"cannot be watched in this run: {', '.join(refused)}; remove it from Triggers(anomalies=...)"
            raise ConfigError(msg)

    def start(self) -> None:
        """Install the signal handler and start watching for anomalies."""
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
        """Stop watching and restore the signal's handler."""
        self._watched.clear()
        usr2, self._usr2 = self._usr2, None
        if usr2 is not None:
            usr2.remove()

    def call(self, active: int | None) -> None:
        """Request a window from the program: on all ranks if there are several, else at the next step."""
        cause = "MemProfilerCallback.trigger()"
        if self._run.world_size > 1 and self._files is not None and self._files.write(cause, active):
            return
        self._request(cause, active)

    def before_step(self, step: int) -> Iterable[WindowRequest]:
        """Return the new requests for windows at or after ``step``; costs one ``os.stat``."""
        if self._files is not None and (request := self._files.read(step)) is not None:
            self._requests.append(request)
        if self._usr2 is not None and self._usr2.received:
            self._usr2.received = False
            self._request("SIGUSR2")
        if not self._requests:
            return ()
        requests, self._requests = self._requests, []
        return requests

    def after_step(self, record: StepRecord) -> None:
        """Check a step for anomalies, except in windows, where the profiler overhead slows steps."""
        if record.window is not None:
            return
        for watched in tuple(self._watched):
            try:
                finding = watched.watch(record)
            except Exception as error:  # noqa: BLE001 an anomaly of anybody's must not stop the training
                self._watched.remove(watched)
                self._run.faults.report(watched.anomaly.name, "mark", None, error)
                continue
            if finding is not None:
                self._request(f"{type(watched.anomaly).__name__}: {finding}")
                watched.left -= 1
                if watched.left <= 0:
                    self._watched.remove(watched)

    def _request(self, cause: str, active: int | None = None) -> None:
        steps = self._triggers.active if active is None else active
        self._requests.append(WindowRequest(cause=cause, warmup=self._triggers.warmup, active=steps))
