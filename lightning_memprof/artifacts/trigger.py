"""Requests for a window of a running job, in two files: the request, and the plan of rank 0."""

from __future__ import annotations

import errno
import json
import os
import stat
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

from lightning_memprof.artifacts.naming import TRIGGER_PLAN, TRIGGER_REQUEST, temporary_name
from lightning_memprof.errors import ArtifactError

MOST_STEPS: Final = 10_000
"""Limit of warmup or recorded steps of a requested window; more is a typing error."""
_MOST_BYTES: Final = 1 << 16
_ROOT: Final = 0
_Active = Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)]
_Warmup = Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)]


@dataclass(frozen=True)
class Request:
    """A request for a window on all ranks.

    Attributes:
        id: unique identifier.
        cause: where the request comes from, for the report.
        active: steps to record; None for the value of the run's ``Triggers``.
        warmup: warmup steps before them; None for the value of the run's ``Triggers``.
        leaks: whether to search for the holders of memory that grows in the window.
    """

    id: str
    cause: str
    active: _Active | None = None
    warmup: _Warmup | None = None
    leaks: bool = False


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
        leaks: whether to search for the holders of memory that grows in the window.
    """

    id: str
    cause: str
    step: int
    warmup: _Warmup
    active: _Active
    seen_at: int
    leaks: bool = False

    @property
    def recorded(self) -> tuple[int, int]:
        """The first and the last step that are recorded."""
        first = self.step + self.warmup
        return first, first + self.active - 1


_T = TypeVar("_T", Request, Plan)


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
            f"a request; chmod o-w {directory}"
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
    request = _read(directory / TRIGGER_REQUEST, Request)
    # A lone surrogate can be neither logged nor shown.
    return request and replace(request, cause=request.cause.encode("utf-8", "replace").decode())


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
    return _read(directory / TRIGGER_PLAN, Plan)


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


def _read(path: Path, kind: type[_T]) -> _T | None:
    try:
        return msgspec.convert(json.loads(_content(path)), kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path) from error


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
