"""Opening and replacing files safely: regular files only, and never through a link that another user left."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, TypeVar

import msgspec

from lightning_memprof.artifacts.naming import temporary_name
from lightning_memprof.errors import ArtifactError
from lightning_memprof.units import MIB, format_bytes

MOST_BYTES: Final = 512 * MIB
"""Limit of a file that is read whole; its rows take about 30 times as much."""

# A pipe may replace the file between the two checks: opening it must not wait for a writer.
_FLAGS: Final = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


def open_plain(path: str | Path, *, buffering: int = -1, most: int | None = None) -> IO[bytes]:
    """Open a regular file for reading.

    The author of a run directory may have put a pipe or a device into it. A pipe waits for its writer forever, a device
    may have no end, and opening one can do harm.

    Raises:
        OSError: it cannot be opened, is not a regular file, or is longer than ``most`` bytes; a sparse file, which
            takes no disk space, may be of any length.
    """
    _check(os.stat(path))  # noqa: PTH116 making a Path takes as long as the call
    opened = os.open(path, _FLAGS)
    try:
        _check(os.fstat(opened), most)
        return os.fdopen(opened, "rb", buffering)
    except BaseException:
        os.close(opened)
        raise


def read_plain(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: it cannot be read, or :func:`open_plain` refuses it.
    """
    with open_plain(path, buffering=0, most=most) as stream:
        # The requested size is allocated first. One call reads 2 GiB at most; no limit here is larger.
        return stream.read(os.fstat(stream.fileno()).st_size + 1) or b""


_Object = TypeVar("_Object")


def read_object(path: Path, kind: type[_Object], noun: str) -> _Object | None:
    """Return an object from a JSON file; None without one.

    Raises:
        ArtifactError: the file is damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"{path}: not {noun} ({error}); write it again, or remove it") from error


def place_of(out: Path) -> Path:
    """Return the file that a result replaces: the target of a link, else ``out``.

    A result appears by renaming, which puts a regular file in the place of anything: root, as in a container, would
    replace ``/dev/null`` for the whole machine.

    Raises:
        OSError: it has no name, or is something other than a regular file.
    """
    if not out.name or "\0" in os.fspath(out):
        raise OSError(errno.EINVAL, "not the name of a file")
    with suppress(FileNotFoundError):
        _check(out.stat())
    return Path(os.path.realpath(out))


def own_temporary(place: Path) -> Path:
    """Return the name under which a file is written before it is renamed to ``place``; nothing exists there.

    A process that was killed may have left a file. The author of the directory, which may have been unpacked, may have
    left a link, through which the result would go into another file of this user.

    Raises:
        OSError: the existing file cannot be removed.
    """
    temporary = place.with_name(temporary_name(place.name))
    temporary.unlink(missing_ok=True)
    return temporary


def _check(status: os.stat_result, most: int | None = None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
    if most is not None and status.st_size > most:
        raise OSError(errno.EFBIG, f"it is larger than {format_bytes(most)}")
