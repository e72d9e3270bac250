"""Open a file that should be a plain one: the author of a directory may have put a pipe or a device into it."""

from __future__ import annotations

import errno
import os
import stat
from typing import IO, TYPE_CHECKING, Final

from lightning_memprof.units import MIB, format_bytes

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MOST_BYTES", "open_plain", "read_plain"]

MOST_BYTES: Final = 512 * MIB
"""Of a file that is read whole; its rows take some 30 times as much. A manifest of 100,000 windows is smaller."""

# Where the place of a file is taken by a pipe between the two looks, opening it must not wait for somebody to write.
_FLAGS: Final = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


def open_plain(path: str | Path, *, buffering: int = -1, most: int | None = None) -> IO[bytes]:
    """Open a file for reading.

    A pipe would wait for its writer for ever, a device may have no end, and to open one can be enough to do harm.

    Raises:
        OSError: it cannot be opened, is not a plain file, or is longer than ``most`` bytes; a sparse file, which
            takes no disk space, may be of any length.

    """
    _check(os.stat(path))  # noqa: PTH116 to make a Path takes as long as to look
    opened = os.open(path, _FLAGS)
    try:
        _check(os.fstat(opened), most)
        return os.fdopen(opened, "rb", buffering)
    except BaseException:
        os.close(opened)
        raise


def read_plain(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Return what is in a file.

    Raises:
        OSError: it cannot be read, or is none that :func:`open_plain` opens.

    """
    with open_plain(path, buffering=0, most=most) as stream:
        # As much as is asked for is allocated first. One call reads 2 GiB at most; no limit here is larger.
        return stream.read(os.fstat(stream.fileno()).st_size + 1) or b""


def _check(status: os.stat_result, most: int | None = None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
    if most is not None and status.st_size > most:
        raise OSError(errno.EFBIG, f"it is larger than {format_bytes(most)}")
