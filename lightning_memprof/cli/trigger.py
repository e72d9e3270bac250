"""``lightning-memprof trigger``: request a window from a running job."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.artifacts.manifest import read_manifest
from lightning_memprof.artifacts.naming import TRIGGER_REQUEST, manifest_name
from lightning_memprof.artifacts.trigger import MOST_STEPS, Plan, Request, check_private, read_plan, write_request
from lightning_memprof.cli.command import RUN_HELP, Command, say
from lightning_memprof.errors import ArtifactError, ConfigError
from lightning_memprof.units import quoted

_POLL_SECONDS: Final = 0.2


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("RUN", help=RUN_HELP)
    parser.add_argument("--active", type=int, metavar="N", help="steps to record (default: the run's)")
    parser.add_argument("--warmup", type=int, metavar="N", help="warmup steps (default: the run's)")
    parser.add_argument(
        "--leaks", action="store_true", help="also search for the holders of memory that grows in the window"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds to wait for rank 0 (default: %(default)s)"
    )


def _execute(options: Namespace) -> int:
    """Request a window and wait until rank 0 has planned it."""
    from lightning_memprof.read.run.locate import find_run

    for name, value, least in (("active", options.active, 1), ("warmup", options.warmup, 0)):
        if value is not None and not least <= value <= MOST_STEPS:
            raise ConfigError(f"trigger: --{name} {value}: must be from {least} to {MOST_STEPS}")
    directory = find_run(Path(options.RUN)).directory
    world_size = _world_size(directory)
    check_private(directory)
    request = Request(
        id=uuid.uuid4().hex,
        cause="lightning-memprof trigger",
        active=options.active,
        warmup=options.warmup,
        leaks=options.leaks,
    )
    try:
        write_request(directory, request)
    except OSError as error:
        raise ArtifactError(
            f"{directory}: cannot be written ({error.strerror}); run the command as the user who trains"
        ) from error
    plan = _wait(directory, request, options.timeout)
    who = "rank 0" if world_size == 1 else f"all {world_size} ranks"
    first, last = plan.recorded
    steps = f"step {first}" if first == last else f"steps {first}-{last}"
    warm = f", warming up from step {plan.step}" if plan.warmup else ""
    print(f"rank 0 is at step {plan.seen_at}: {who} will record {steps}{warm}")
    say(f"next: lightning-memprof show {quoted(directory)}")
    return 0


def _world_size(directory: Path) -> int:
    """Return the number of ranks of a run; refuse one that has ended or ignores requests."""
    manifest = read_manifest(directory / manifest_name(0), with_artifacts=False)
    if manifest.run is None:
        raise ArtifactError(manifest.damage or "")
    if manifest.end is not None:
        raise ArtifactError(f"{directory}: this run has ended; only a running job can record a window")
    if manifest.run.fields.get("triggers") is False:
        raise ArtifactError(f"{directory}: this run was started with Triggers(file=False) and reads no requests")
    return manifest.run.world_size or 1


def _wait(directory: Path, request: Request, timeout: float) -> Plan:
    deadline = time.monotonic() + timeout
    while True:
        plan = read_plan(directory)
        if plan is not None and plan.id == request.id:
            return plan
        if time.monotonic() > deadline:
            break
        _check_running(directory)
        time.sleep(_POLL_SECONDS)
    raise ArtifactError(
        f"{directory}: rank 0 has not begun a step for {timeout:g} s; the request stays pending until its next step "
        f"(remove {TRIGGER_REQUEST} there to cancel it, or wait longer with --timeout)"
    )


def _check_running(directory: Path) -> None:
    try:
        _world_size(directory)
    except ArtifactError:
        with suppress(OSError):
            (directory / TRIGGER_REQUEST).unlink()
        raise


COMMAND: Final = Command(
    summary="record a window of a running job now",
    description=(
        "Record a window of a running job now, at the same step on all ranks.\n"
        "The command writes a request into the run directory; it sends no signal."
    ),
    add_options=_add_options,
    execute=_execute,
)
