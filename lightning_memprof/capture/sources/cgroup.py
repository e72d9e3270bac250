"""How much memory the container that this process runs in may use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["memory_limit_bytes"]

_MEMBERSHIP: Final = Path("/proc/self/cgroup")
_MOUNT: Final = Path("/sys/fs/cgroup")
# Version 1 has no word for "no limit": it gives the largest number of pages that fits into 63 bits.
_UNLIMITED: Final = 1 << 60


def memory_limit_bytes(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> int | None:
    """Return the smallest memory limit of this process's control group and those around it; None without one.

    Versions 1 and 2 are read, also both at once. In a container the path that the kernel tells may be the host's, of
    which nothing is to be seen: then the mount itself is the container's group.

    Args:
        membership: the file that says which groups this process is in; source: cgroups(7).
        mount: where the groups are mounted.

    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    limits = [limit for line in lines for file in _files(line, mount) if (limit := _read(file)) is not None]
    return min(limits, default=None)


def _files(line: str, mount: Path) -> Iterator[Path]:
    """Yield the files that may hold a limit for one line ``number:controllers:path``, the innermost group first."""
    _, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if not controllers:
        top = mount if (mount / "cgroup.controllers").exists() else mount / "unified"
        name = "memory.max"
    elif "memory" in controllers.split(","):
        top, name = mount / "memory", "memory.limit_in_bytes"
    else:
        return
    parts = [part for part in path.split("/") if part not in {"", "..", "."}]
    for count in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:count], name)


def _read(file: Path) -> int | None:
    try:
        limit = int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return limit if limit < _UNLIMITED else None
