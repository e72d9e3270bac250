"""Window requests by file: rank 0 turns a request into a plan, and every rank records at the planned step."""

from __future__ import annotations

import logging
import os
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from lightning_memprof.artifacts.naming import TRIGGER_PLAN, TRIGGER_REQUEST
from lightning_memprof.artifacts.trigger import Plan, Request, read_plan, read_request, write_plan, write_request
from lightning_memprof.capture.planner import WindowRequest
from lightning_memprof.errors import ArtifactError

if TYPE_CHECKING:
    from lightning_memprof.capture.base import RunContext

__all__ = ["FileRequests"]

log = logging.getLogger(__name__)

# Ranks of one job are within a step or two of each other; the rest is for file systems that show a file late.
_LEAD_STEPS: Final = 20


class FileRequests:
    """The requests in a run directory.

    Rank 0 checks for a request once a step and writes a plan: the step at which every rank records, 20 steps after its
    own. The other ranks check for the plan once a step. There is no collective, and no rank waits.

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

    def write(self, cause: str, active: int | None) -> bool:
        """Request a window on all ranks; return whether the request was written."""
        try:
            write_request(self._directory, Request(id=uuid.uuid4().hex, cause=cause, active=active))
        except OSError as error:
            log.warning("the other ranks cannot be reached (%s): only rank %d records", error, self._run.rank)
            return False
        return True

    def read(self, step: int) -> WindowRequest | None:
        """Return a new request for a window at or after ``step``; costs one ``os.stat``."""
        try:
            status = os.stat(self._path)  # noqa: PTH116 a Path object would cost time in every step
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
            plan = Plan(
                id=request.id, cause=plan.cause, step=plan.step, warmup=plan.warmup, active=plan.active, seen_at=step
            )
        else:
            lead = _LEAD_STEPS if self._run.world_size > 1 else 0
            warmup = self._warmup if request.warmup is None else request.warmup
            active = self._active if request.active is None else request.active
            plan = Plan(
                id=request.id, cause=request.cause, step=step + lead, warmup=warmup, active=active, seen_at=step
            )
            answer = WindowRequest(cause=plan.cause, warmup=plan.warmup, active=plan.active, step=plan.step)
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
        return WindowRequest(cause=cause, warmup=plan.warmup, active=plan.active, step=plan.step)

    def _warn(self, message: str) -> None:
        log.warning("%s", message)
        with suppress(OSError):
            self._run.sink.manifest.append("note", collector="triggers", message=message)
