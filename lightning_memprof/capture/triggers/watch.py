"""Triggers of windows outside the schedule: a file in the run directory, a signal, a call, or an anomaly."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.artifacts.manifest import NoteRow
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
from lightning_memprof.capture.planner import WindowRequest
from lightning_memprof.capture.sources.proc import handles_signal
from lightning_memprof.capture.triggers.anomalies import Anomaly, Watch
from lightning_memprof.errors import ArtifactError, ConfigError
from lightning_memprof.logs import logger_of

if TYPE_CHECKING:
    from lightning_memprof.capture.base import RunContext, StepRecord

log = logger_of(__name__)

# Ranks of one job are within a step or two of each other; the rest is for file systems that show a file late.
_LEAD_STEPS: Final = 20
# Between two checks for a file: after a training step, with cold caches, one takes up to 15 µs.
_CHECK_NS: Final = 50_000_000


@dataclass(frozen=True, kw_only=True)
class Triggers:
    """Causes of windows outside the schedule.

    Args:
        file: check every 50 ms whether ``lightning-memprof trigger`` requests a window.
        signal: install a SIGUSR2 handler that opens a window on this rank.
        anomalies: anomalies that open a window on this rank.
        warmup: warmup steps, whose records are discarded.
        active: steps to record.

    Raises:
        ConfigError: a value is invalid.
    """

    file: bool = True
    signal: bool = False
    anomalies: list[Anomaly] = field(default_factory=list)
    warmup: int = 1
    active: int = 3

    def __post_init__(self) -> None:
        """Validate the values."""
        check_steps("Triggers", "warmup", self.warmup, 0)
        check_steps("Triggers", "active", self.active, 1)
        if not isinstance(self.anomalies, (list, tuple)):
            raise ConfigError(f"Triggers(anomalies={self.anomalies!r}): must be a list, as in anomalies=[SlowStep()]")
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
        raise ConfigError(f"{owner}({name}={value!r}): must be an integer from {least} to {MOST_STEPS}")
    return value


@dataclass
class _Watched:
    anomaly: Anomaly
    watch: Watch
    left: int


class TriggerWatch:
    """The window requests of one run on one rank.

    Args:
        triggers: the configuration.
        run: of this rank.

    Attributes:
        due_ns: reading of ``time.perf_counter_ns`` from which on :meth:`before_step` is called.
        watched: the anomalies that may still open a window.

    Raises:
        ConfigError: an anomaly cannot be watched in this run.
    """

    def __init__(self, triggers: Triggers, run: RunContext) -> None:
        self.due_ns = 0
        self._triggers = triggers
        self._run = run
        self._files = _FileRequests(run, triggers.warmup, triggers.active) if triggers.file else None
        self._usr2: Usr2 | None = None
        self._requests: list[WindowRequest] = []
        self.watched: list[_Watched] = []
        missing = [(anomaly, anomaly.unavailable(run)) for anomaly in triggers.anomalies]
        if refused := [f"{type(anomaly).__name__} ({reason})" for anomaly, reason in missing if reason is not None]:
            msg = f"cannot be watched in this run: {', '.join(refused)}; remove it from Triggers(anomalies=...)"
            raise ConfigError(msg)

    def start(self) -> None:
        """Install the signal handler and start watching for anomalies."""
        if self._triggers.signal:
            usr2 = Usr2(self._make_due)
            reason = usr2.install()
            if reason is None:
                self._usr2 = usr2
            else:
                log.info("SIGUSR2 opens no window: %s", reason)
        for anomaly in self._triggers.anomalies:
            with self._run.faults.caught(anomaly.name, "enter"):
                self.watched.append(_Watched(anomaly, anomaly.watch(self._run), anomaly.limit))

    def stop(self) -> None:
        """Stop watching and restore the signal's handler."""
        self.watched.clear()
        usr2, self._usr2 = self._usr2, None
        if usr2 is not None:
            usr2.remove()

    def call(self, active: int | None, *, leaks: bool = False) -> None:
        """Request a window from the program: on all ranks if there are several, else at the next step."""
        cause = "MemProfilerCallback.trigger()"
        if self._run.world_size > 1 and self._files is not None and self._files.write(cause, active, leaks=leaks):
            self._make_due()
            return
        self._request(cause, active, leaks=leaks)

    def before_step(self, step: int) -> Iterable[WindowRequest]:
        """Return the new requests for windows at or after ``step``."""
        # First: a signal may arrive at any point of this method.
        self.due_ns = sys.maxsize if self._files is None else time.perf_counter_ns() + _CHECK_NS
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
        for watched in tuple(self.watched):
            try:
                finding = watched.watch(record)
            except Exception as error:  # noqa: BLE001 an anomaly of anybody's must not stop the training
                self.watched.remove(watched)
                self._run.faults.report(watched.anomaly.name, "mark", None, error)
                continue
            if finding is not None:
                self._request(f"{type(watched.anomaly).__name__}: {finding}")
                watched.left -= 1
                if watched.left <= 0:
                    self.watched.remove(watched)

    def _request(self, cause: str, active: int | None = None, *, leaks: bool = False) -> None:
        steps = self._triggers.active if active is None else active
        self._requests.append(WindowRequest(cause=cause, warmup=self._triggers.warmup, active=steps, leaks=leaks))
        self._make_due()

    def _make_due(self) -> None:
        self.due_ns = 0


class _FileRequests:
    """The requests in a run directory.

    Rank 0 checks for a request and writes a plan: the step at which every rank records, 20 steps after its own and
    after those between two checks. The other ranks check for the plan. There is no collective, and no rank waits.

    Args:
        run: of this rank.
        warmup: warmup steps of a request that does not specify them.
        active: recorded steps of a request that does not specify them.
    """

    def __init__(self, run: RunContext, warmup: int, active: int) -> None:
        self._run = run
        self._warmup = warmup
        self._active = active
        self._directory = run.sink.place.directory
        self._leads = run.rank == 0
        self._path = os.fspath(self._directory / (TRIGGER_REQUEST if self._leads else TRIGGER_PLAN))
        self._seen: tuple[int, int] | None = None
        self._plan: Plan | None = None
        self._checked_step: int | None = None
        # Most steps between two checks of this rank; the other ranks check as rarely.
        self._unchecked = 0

    def write(self, cause: str, active: int | None, *, leaks: bool) -> bool:
        """Request a window on all ranks; return whether the request was written."""
        try:
            write_request(self._directory, Request(id=uuid.uuid4().hex, cause=cause, active=active, leaks=leaks))
        except OSError as error:
            log.warning("the other ranks cannot be reached (%s): only rank %d records", error, self._run.rank)
            return False
        return True

    def read(self, step: int) -> WindowRequest | None:
        """Return a new request for a window at or after ``step``; costs one ``os.access``."""
        if self._checked_step is not None:
            self._unchecked = max(self._unchecked, step - self._checked_step - 1)
        self._checked_step = step
        # The exception of a missing file would cost more than the rest of this.
        if not os.access(self._path, os.F_OK):
            return None
        try:
            status = os.stat(self._path)  # noqa: PTH116 a Path object would cost more
        except OSError:
            return None
        seen = (status.st_mtime_ns, status.st_ino)
        if seen == self._seen:
            return None
        self._seen = seen
        try:
            return self._answer(step) if self._leads else self._follow(step)
        except (ArtifactError, OSError) as error:
            self._warn(f"a requested window is not recorded: {error}")
            return None

    def _answer(self, step: int) -> WindowRequest | None:
        """Rank 0: choose the step at which the requested window opens, and write the plan for all ranks."""
        request = read_request(self._directory)
        if request is None:
            return None
        plan, answer = self._plan, None
        if plan is not None and step <= plan.recorded[1]:
            # Several ranks may request at once; they get one window.
            plan = replace(plan, id=request.id, seen_at=step)
        else:
            lead = _LEAD_STEPS + self._unchecked if self._run.world_size > 1 else 0
            warmup = self._warmup if request.warmup is None else request.warmup
            active = self._active if request.active is None else request.active
            plan = Plan(
                id=request.id,
                cause=request.cause,
                step=step + lead,
                warmup=warmup,
                active=active,
                seen_at=step,
                leaks=request.leaks,
            )
            answer = _planned(plan, plan.cause)
        self._plan = plan
        try:
            write_plan(self._directory, plan)
        except OSError as error:
            # This rank records anyway.
            self._warn(f"the plan of a requested window cannot be written ({error}): only rank 0 records")
        finally:
            # If it cannot be removed it is recognized by its time.
            with suppress(OSError):
                os.unlink(self._path)  # noqa: PTH108 as os.stat above
        return answer

    def _follow(self, step: int) -> WindowRequest | None:
        """Other ranks: record at rank 0's step, or from now on if that has passed."""
        plan = read_plan(self._directory)
        if plan is None:
            return None
        known, self._plan = self._plan, plan
        if known is not None and known.step == plan.step:
            return None
        cause = plan.cause
        if plan.step < step:
            cause = f"{cause}, planned for step {plan.step}, which this rank had passed when it read the plan"
            log.warning(
                "rank %d is at step %d: the window planned for step %d opens late", self._run.rank, step, plan.step
            )
        return _planned(plan, cause)

    def _warn(self, message: str) -> None:
        log.warning("%s", message)
        with suppress(OSError):
            self._run.sink.manifest.append(NoteRow(collector="triggers", message=message))


def _planned(plan: Plan, cause: str) -> WindowRequest:
    return WindowRequest(cause=cause, warmup=plan.warmup, active=plan.active, step=plan.step, leaks=plan.leaks)


class Usr2:
    """Notes that SIGUSR2 arrived, and calls the previous handler.

    Args:
        arrived: called in the signal's handler.

    Attributes:
        received: whether it arrived; reset it to False after handling it.
    """

    def __init__(self, arrived: Callable[[], None] = lambda: None) -> None:
        self.received = False
        self._arrived = arrived
        self._before: Any = None
        self._installed = False
        # One object, so that it can be compared.
        self._own = self._handle

    def install(self) -> str | None:
        """Install the handler; return why that is not possible, or None."""
        if threading.current_thread() is not threading.main_thread():
            return "the training does not run in the main thread"
        before = signal.getsignal(signal.SIGUSR2)
        if before is None or (not callable(before) and handles_signal(signal.SIGUSR2)):
            return "a handler outside Python is installed"
        self._before = before
        signal.signal(signal.SIGUSR2, self._own)
        self._installed = True
        return None

    def remove(self) -> None:
        """Restore the previous handler; if another was installed since, it stays and this one passes the signal on."""
        if not self._installed or signal.getsignal(signal.SIGUSR2) is not self._own:
            return
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, self._before)
            self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        self._arrived()
        if callable(self._before):
            self._before(number, frame)
