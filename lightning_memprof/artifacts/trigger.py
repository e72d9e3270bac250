"""Requests for a window of a running job, in two files: the request, and the plan of rank 0."""

from __future__ import annotations

import errno
import json
import os
import stat
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.artifacts.naming import TRIGGER_PLAN, TRIGGER_REQUEST, temporary_name
from lightning_memprof.errors import ArtifactError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "MOST_STEPS",
    "Plan",
    "Request",
    "check_private",
    "read_plan",
    "read_request",
    "write_plan",
    "write_request",
]

MOST_STEPS: Final = 10_000
"""Limit of warmup or recorded steps of a requested window; more is a typing error."""
_MOST_BYTES: Final = 1 << 16
_ROOT: Final = 0


@dataclass(frozen=True)
class Request:
    """A request for a window on all ranks.

    Attributes:
        id: unique identifier.
        cause: where the request comes from, for the report.
        active: steps to record; None for the value of the run's ``Triggers``.
        warmup: warmup steps before them; None for the value of the run's ``Triggers``.

    """

    id: str
    cause: str
    active: int | None = None
    warmup: int | None = None


@dataclass(frozen=True)
class Plan:
    """The decision of rank 0 for all ranks.

    Attributes:
        id: of the request.
        cause: where the request came from.
        step: the first step of the window; ``warmup`` steps from there, then ``active`` steps.
        warmup: steps whose records are discarded.
        active: steps to record.
        seen_at: rank 0's step when it saw the request.

    """

    id: str
    cause: str
    step: int
    warmup: int
    active: int
    seen_at: int

    @property
    def recorded(self) -> tuple[int, int]:
        """The first and the last step that are recorded."""
        first = self.step + self.warmup
        return first, first + self.active - 1


def check_private(directory: Path) -> None:
    """Refuse a run directory in which every user of the machine can replace files.

    Raises:
        ArtifactError: every user can write to it.
        OSError: its mode cannot be read.

    """
    mode = directory.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ArtifactError(
            f"{directory}: every user may write into it (mode {stat.S_IMODE(mode):04o}), so no file there is taken for "
            f"a request; chmod o-w {directory}, or send SIGUSR2 to the ranks"
        )


def write_request(directory: Path, request: Request) -> None:
    """Write a request into a run directory; it replaces a pending one.

    Raises:
        OSError: the directory cannot be written.

    """
    _write(directory / TRIGGER_REQUEST, asdict(request))


def read_request(directory: Path) -> Request | None:
    """Return the pending request of a run directory, or None.

    Raises:
        ArtifactError: it is not a request, or its owner is neither root nor the user who trains.

    """
    path = directory / TRIGGER_REQUEST
    row = _read(path)
    if row is None:
        return None
    active, warmup = row.get("active"), row.get("warmup")
    numbers = (active is None or _count(active, 1)) and (warmup is None or _count(warmup, 0))
    if not numbers or not isinstance(row.get("id"), str) or not isinstance(row.get("cause"), str):
        raise _damaged(path)
    # A lone surrogate can be neither logged nor shown.
    cause = row["cause"].encode("utf-8", "replace").decode()
    return Request(id=row["id"], cause=cause, active=active, warmup=warmup)


def write_plan(directory: Path, plan: Plan) -> None:
    """Write the decision of rank 0 into a run directory, where all ranks look for it.

    Raises:
        OSError: the directory cannot be written.

    """
    _write(directory / TRIGGER_PLAN, asdict(plan))


def read_plan(directory: Path) -> Plan | None:
    """Return the last decision of rank 0, or None.

    Raises:
        ArtifactError: it is not a plan, or its owner is neither root nor the user who trains.

    """
    path = directory / TRIGGER_PLAN
    row = _read(path)
    if row is None:
        return None
    numbers = _count(row.get("active"), 1) and _count(row.get("warmup"), 0)
    steps = all(type(row.get(name)) is int for name in ("step", "seen_at"))
    if not numbers or not steps or not all(isinstance(row.get(name), str) for name in ("id", "cause")):
        raise _damaged(path)
    return Plan(
        id=row["id"],
        cause=row["cause"],
        step=row["step"],
        warmup=row["warmup"],
        active=row["active"],
        seen_at=row["seen_at"],
    )


def _count(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= MOST_STEPS


def _write(path: Path, row: dict[str, Any]) -> None:
    # A random name: several ranks may ask at once, and another user could put a link under a predictable one.
    temporary = path.with_name(temporary_name(f"{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}"))
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def _read(path: Path) -> dict[str, Any] | None:
    try:
        row = json.loads(_content(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path) from error
    if not isinstance(row, dict):
        raise _damaged(path)
    return row


def _content(path: Path) -> bytes:
    # Opening a pipe, or reading without end, would stop the training. We write no links.
    status = path.lstat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
        raise _damaged(path)
    check_private(path.parent)
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(opened, "rb", buffering=0) as file:
        # The opened file: the one that was checked may have been replaced since.
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise _damaged(path)
        trains = path.parent.stat().st_uid
        if status.st_uid not in {os.geteuid(), trains, _ROOT}:
            raise ArtifactError(
                f"{path}: belongs to user {status.st_uid}; only user {trains}, who trains, and root may ask: remove it"
            )
        return file.read(_MOST_BYTES) or b""


def _damaged(path: Path) -> ArtifactError:
    return ArtifactError(f"{path}: is not as `lightning-memprof trigger` writes it; remove the file and ask again")
