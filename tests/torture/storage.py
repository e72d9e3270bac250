"""What a machine can do to the storage below a cell: a small disk, rights that are gone, a quota."""

from __future__ import annotations

import builtins
import ctypes
import errno
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import fault

from waiting import wait_until

DISK_BYTES: Final = 6 << 20
FILLER: Final = "filler"
# <sys/mount.h>
MNT_DETACH: Final = 2
# <linux/capability.h>: root reads and writes whatever the rights say.
CAP_DAC_OVERRIDE: Final = 1
CAPABILITY_VERSION: Final = 0x20080522
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@cache
def why_no_disk() -> str | None:
    """Say why no small disk can be mounted here, or None where one can."""
    with tempfile.TemporaryDirectory() as place:
        if _mount(Path(place)):
            _libc().umount2(os.fsencode(place), MNT_DETACH)
            return None
        return f"no tmpfs can be mounted here ({os.strerror(ctypes.get_errno())})"


@contextmanager
def small_disk(cell: fault.Cell) -> Iterator[None]:
    """Have ``log_dir`` be a disk of some megabytes until :func:`give_back`.

    Raises:
        OSError: it cannot be mounted.

    """
    disk = cell.log_dir
    if cell.rank == 0:
        disk.mkdir()
        if not _mount(disk):
            raise OSError(ctypes.get_errno(), "no small disk", str(disk))
        (cell.directory / "mounted").touch()
    wait_until((cell.directory / "mounted").exists)
    yield


def give_back(directory: Path) -> None:
    """Unmount the small disk of a cell and leave what was on it in its place, but for what filled it.

    Raises:
        OSError: it cannot be unmounted.

    """
    disk, kept = directory / "log", directory / "kept"
    if not disk.is_mount():
        return
    (disk / FILLER).unlink(missing_ok=True)
    shutil.copytree(disk, kept, symlinks=True)
    if _libc().umount2(os.fsencode(disk), MNT_DETACH):
        raise OSError(ctypes.get_errno(), "cannot be unmounted", str(disk))
    disk.rmdir()
    kept.rename(disk)


def fill(cell: fault.Cell) -> None:
    """Leave no byte on the disk of ``log_dir``."""
    # What is lost when closing is of no interest.
    with suppress(OSError), (cell.log_dir / FILLER).open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


@contextmanager
def ordinary_user(cell: fault.Cell) -> Iterator[None]:
    """Let rights on files hold for this thread and those that it starts, also where it is root's."""
    before = _effective(CAP_DAC_OVERRIDE, on=False)
    cell.log_dir.mkdir(exist_ok=True)
    try:
        yield
    finally:
        if before:
            _effective(CAP_DAC_OVERRIDE, on=True)
        for place in (cell.log_dir, *cell.log_dir.rglob("*")):
            with suppress(FileNotFoundError):
                place.chmod(place.stat().st_mode | stat.S_IWUSR)


def forbid(cell: fault.Cell) -> None:
    """Make everything in ``log_dir`` read-only; what is open stays open."""
    for place in (*cell.log_dir.rglob("*"), cell.log_dir):
        with suppress(FileNotFoundError):
            place.chmod(place.stat().st_mode & ~0o222)


def no_room_for_more(cell: fault.Cell) -> None:
    """Exceed the quota: from now on nothing below ``log_dir`` is opened for writing, and no descriptor takes more.

    It is injected: what torch's own code writes, and what is already open with a buffer, is not hit.
    """
    root = str(cell.log_dir)
    opened, io_opened, written, made = os.open, io.open, os.write, os.mkdir

    def refuse(path: Any) -> None:
        if isinstance(path, (str, bytes, os.PathLike)) and os.path.realpath(os.fsdecode(path)).startswith(root):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), os.fsdecode(path))

    def os_open(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & _WRITING:
            refuse(path)
        return opened(path, flags, *rest, **more)

    def io_open(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if set(mode) & set("wax+"):
            refuse(file)
        return io_opened(file, mode, *rest, **more)

    def write(fd: int, data: Any) -> int:
        refuse(f"/proc/self/fd/{fd}")
        return written(fd, data)

    def mkdir(path: Any, *rest: Any, **more: Any) -> None:
        refuse(path)
        made(path, *rest, **more)

    for owner, name, stand_in in (
        (os, "open", os_open), (os, "write", write), (os, "mkdir", mkdir), (io, "open", io_open),
        (builtins, "open", io_open),
    ):  # fmt: skip
        cell.notes.setdefault("patches", []).append((owner, name, getattr(owner, name)))
        setattr(owner, name, stand_in)


@contextmanager
def put_back(cell: fault.Cell) -> Iterator[None]:
    """Undo what a strike has replaced, as it noted in ``patches``."""
    try:
        yield
    finally:
        for owner, name, before in reversed(cell.notes.pop("patches", [])):
            setattr(owner, name, before)


def _mount(place: Path) -> bool:
    options = f"size={DISK_BYTES}".encode()
    return bool(_libc().mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, options) == 0)


def _effective(number: int, *, on: bool) -> bool:
    """Switch an effective capability of this thread; say whether it was on. See capset(2)."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    # Twice: effective, permitted, inheritable.
    data = (ctypes.c_uint32 * 6)()
    libc = _libc()
    if libc.capget(header, data):
        return False
    before = bool(data[0] & 1 << number)
    data[0] = data[0] | 1 << number if on else data[0] & ~(1 << number)
    return before and libc.capset(header, data) == 0


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
