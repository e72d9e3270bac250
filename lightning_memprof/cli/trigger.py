"""``lightning-memprof trigger``: ask the ranks of a running job for a window, and say which steps they will record."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final

from lightning_memprof.analysis.run.locate import find_run
from lightning_memprof.artifacts.manifest import read_manifest
from lightning_memprof.artifacts.naming import TRIGGER_REQUEST, manifest_name
from lightning_memprof.artifacts.trigger import MOST_STEPS, Plan, Request, check_private, read_plan, write_request
from lightning_memprof.errors import ArtifactError, ConfigError

__all__ = ["trigger"]

_POLL_SECONDS: Final = 0.2


def trigger(run: str, *, active: int | None = None, warmup: int | None = None, timeout: float = 60.0) -> int:
    """Ask for a window and wait until rank 0 has said where it will be.

    Args:
        run: a log directory, its memprofiler directory, or a parent directory with one run in it.
        active: steps to record; None is what the run's ``Triggers`` say.
        warmup: steps before that; None is what the run's ``Triggers`` say.
        timeout: seconds to wait for rank 0.

    Returns:
        The exit code.

    Raises:
        ConfigError: a number is not usable.
        ArtifactError: there is no run, it has ended, it does not look for requests, or rank 0 does not answer.

    """
    for name, value, least in (("active", active, 1), ("warmup", warmup, 0)):
        if value is not None and not least <= value <= MOST_STEPS:
            raise ConfigError(f"trigger: --{name} {value}: must be from {least} to {MOST_STEPS}")
    directory = find_run(Path(run)).directory
    world_size = _listening(directory)
    check_private(directory)
    request = Request(uuid.uuid4().hex, "lightning-memprof trigger", active, warmup)
    try:
        write_request(directory, request)
    except OSError as error:
        raise ArtifactError(f"{directory}: cannot be written ({error.strerror}); ask as the user who trains") from error
    plan = _wait(directory, request, timeout)
    who = "rank 0" if world_size == 1 else f"all {world_size} ranks"
    first, last = plan.recorded
    steps = f"step {first}" if first == last else f"steps {first}-{last}"
    warm = f", warming up from step {plan.step}" if plan.warmup else ""
    print(f"rank 0 is at step {plan.seen_at}: {who} will record {steps}{warm}")
    print(f"look at it with: lightning-memprof show {directory}")
    return 0


def _listening(directory: Path) -> int:
    """Return the number of ranks of a run that goes on and looks for requests."""
    rows = read_manifest(directory / manifest_name(0)).rows
    if any(row.get("kind") == "end" for row in rows):
        raise ArtifactError(f"{directory}: this run has ended; only a running job can record")
    facts = next(row for row in rows if row.get("kind") == "run")
    if facts.get("triggers") is False:
        raise ArtifactError(f"{directory}: this run was started with Triggers(file=False); send SIGUSR2 to its ranks")
    world_size = facts.get("world_size")
    return world_size if isinstance(world_size, int) else 1


def _wait(directory: Path, request: Request, timeout: float) -> Plan:
    deadline = time.monotonic() + timeout
    while True:
        plan = read_plan(directory)
        if plan is not None and plan.id == request.id:
            return plan
        if time.monotonic() > deadline:
            break
        _check_goes_on(directory)
        time.sleep(_POLL_SECONDS)
    raise ArtifactError(
        f"{directory}: rank 0 has not begun a step for {timeout:g} s; the request stays and is met at its next step "
        f"(remove {TRIGGER_REQUEST} there to take it back, or wait longer with --timeout)"
    )


def _check_goes_on(directory: Path) -> None:
    try:
        _listening(directory)
    except ArtifactError:
        with suppress(OSError):
            (directory / TRIGGER_REQUEST).unlink()
        raise
