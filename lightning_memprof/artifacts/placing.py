"""Where a result may be written: never in the place of a device, a pipe or a directory, nor through a planted link."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from lightning_memprof.artifacts.naming import temporary_name

__all__ = ["own_temporary", "place_of"]


def place_of(out: Path) -> Path:
    """Return the file that is to be replaced by a result: of a link what it points to.

    A result appears by renaming, and renaming puts a plain file in the place of whatever has that name: root, as in a
    container, would lose ``/dev/null`` for the whole machine.

    Raises:
        OSError: it has no name, or something other than a plain file has it.

    """
    if not out.name or "\0" in os.fspath(out):
        raise OSError(errno.EINVAL, "not the name of a file")
    place = Path(os.path.realpath(out))
    try:
        mode = out.stat().st_mode
    except FileNotFoundError:
        return place
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
    return place


def own_temporary(place: Path) -> Path:
    """Return the name under which a file is written before it is renamed to ``place``, with nothing under it.

    A process that was stopped may have left a file there. Whoever made the directory, as by unpacking it, may have left
    a link: what is written would go through it, into a file of the person who only looks at a run.

    Raises:
        OSError: the existing file cannot be removed.

    """
    temporary = place.with_name(temporary_name(place.name))
    with suppress(FileNotFoundError):
        temporary.unlink()
    return temporary
